// The frame of the block quantizers (integers.cu, float8.cu, e3m0.cu): reading, error feedback, sections of the body,
// decoding. A format has
//   BITS                                   width of a code
//   Grid                                   what a block's scale gives
//   int scale_bytes()
//   u32 adjust(p)                          changes finite elements that it cannot code; returns flags
//   Grid grid(p, largest, valid, group)    for a block, of which this thread has eight elements, the first `valid` real
//   void store(at, grid), Grid load(at)    the scale of a block
//   void codes(grid, p, first, codes)      of elements first .. first + 7
//   float value(grid, code)
#ifndef LC_BLOCKS_CUH
#define LC_BLOCKS_CUH
#include "device.cuh"
#include "integers.cuh"

template <class Format>
LC_DEVICE void lc_encode_blocks(const Format& format, const LcSource& source, float* candidate, int block, u8* body,
                                i64 codes_at, u32* flags) {
  const i64 n = source.n, first = 8 * lc_thread(), blocks = (n + block - 1) >> (31 - __clz(block));
  const LcEight e = lc_take8(source, first);
  float p[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) p[j] = e.v[j];
  lc_report(flags, e.flags | format.adjust(p));
  const int valid = first >= n ? 0 : n - first < 8 ? (int)(n - first) : 8;
  const typename Format::Grid grid = format.grid(p, e.largest, valid, block / 8);
  if (valid && (first & (block - 1)) == 0) format.store(body + lc_block_of(first, block) * format.scale_bytes(), grid);
  u32 codes[8];
  format.codes(grid, p, first, codes);
  u64 packed = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= valid) codes[j] = 0;
    packed |= (u64)(codes[j] & ((1u << Format::BITS) - 1)) << (Format::BITS * j);
  }
  lc_store_codes<Format::BITS>(body + codes_at, first, n, packed);
  lc_zero_padding(body, blocks * format.scale_bytes());
  lc_zero_padding(body + codes_at, (n * Format::BITS + 7) / 8);
  if (!candidate) return;
  float decoded[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) decoded[j] = format.value(grid, codes[j]);
  lc_store_residual(candidate, n, first, e, decoded);
}

template <class Format>
LC_DEVICE void lc_decode_blocks(const Format& format, const u8* bodies, const LcSink& sink, int block, i64 codes_at) {
  const i64 first = 8 * lc_thread();
  if (first >= sink.n) return;
  lc_sink8(sink, first, [&](int rank, float v[8]) {
    const u8* body = bodies + rank * sink.stride;
    const u64 packed = lc_load_codes<Format::BITS>(body + codes_at, first, sink.n);
    const typename Format::Grid grid = format.load(body + lc_block_of(first, block) * format.scale_bytes());
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = format.value(grid, (u32)(packed >> (Format::BITS * j)) & ((1u << Format::BITS) - 1));
  });
}

// A scale in one of the formats of integers.cuh.
LC_DEVICE int lc_scale_bytes(int format) { return format == LC_SCALE_F32 ? 4 : format == LC_SCALE_BF16 ? 2 : 1; }

LC_DEVICE void lc_store_scale(u8* at, float scale, int format) {
  if (format == LC_SCALE_F32) {
    lc_store_float(at, scale);
  } else if (format == LC_SCALE_BF16) {
    lc_store_bytes(at, lc_bits(scale) >> 16, 2);
  } else {
    *at = (u8)(lc_bits(scale) >> 23);
  }
}

LC_DEVICE float lc_load_scale(const u8* at, int format) {
  if (format == LC_SCALE_F32) return lc_load_float(at);
  return lc_float(format == LC_SCALE_BF16 ? (u32)lc_load_bytes(at, 2) << 16 : (u32)*at << 23);
}

#endif
