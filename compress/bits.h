// LSB-first bit streams (packing.py).
#pragma once
#include "kernels.h"

// Appends fields of `width` <= 32 bits. Starts on a byte boundary; finish() writes the last byte, padded with zero bits.
struct LcBitWriter {
  uint8_t* out;
  uint64_t pending = 0;
  int bits = 0;

  explicit LcBitWriter(uint8_t* start) : out(start) {}
  void put(uint32_t code, int width) {
    pending |= (uint64_t)(code & (uint32_t)((1ull << width) - 1)) << bits;
    for (bits += width; bits >= 8; bits -= 8, pending >>= 8) *out++ = (uint8_t)pending;
  }
  void finish() {
    if (bits) *out++ = (uint8_t)pending;
    pending = 0, bits = 0;
  }
};

// Reads fields of `width` <= 32 bits, never a byte more than they occupy.
struct LcBitReader {
  const uint8_t* in;
  uint64_t pending = 0;
  int bits = 0;

  explicit LcBitReader(const uint8_t* start) : in(start) {}
  uint32_t get(int width) {
    for (; bits < width; bits += 8) pending |= (uint64_t)*in++ << bits;
    const uint32_t code = (uint32_t)(pending & ((1ull << width) - 1));
    pending >>= width, bits -= width;
    return code;
  }
};
