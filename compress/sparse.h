// Rows of c positions of which k are kept, as bytes: scales | indices | codes (sparse.py, indices.py, values.py).
// Ranges of rows that start at a multiple of 8 start on a byte boundary in every section, so threads share no byte.
#pragma once
#include "bits.h"
#include "narrow.cuh"
#include "reduce.h"

enum { LC_ELIAS_FANO, LC_FIELDS, LC_BITMAP, LC_U32 };                            // order of INDEX_CODECS
enum { LC_RAW_F32, LC_RAW_BF16, LC_MAG2, LC_SIGN1, LC_KEPT_INT8, LC_KEPT_INT4 };  // order of VALUE_CODECS
enum { LC_SATURATED_LEVEL = 8 };                                                 // flag SATURATED (codec.py)

constexpr int LC_CODE_BITS[] = {32, 16, 2, 1, 8, 4}, LC_SCALE_BYTES[] = {0, 0, 4, 2, 4, 4};
constexpr uint32_t LC_MAGNITUDE = 0x7FFFFFFFu, LC_INF_BITS = 0x7F800000u;

struct LcSparse {
  int64_t c, k;
  int index, value, iterations;

  int low() const { return lc_log2(c / k); }                                        // low bits of Elias-Fano
  int64_t upper() const { return k + (c >> low()); }                                // length of its bit vector
  int64_t record() const { return (k * low() + upper() + 7) / 8; }                  // bytes of a row
  int field() const { return c > 1 ? lc_log2(c - 1) + 1 : 0; }
  int code_bits() const { return LC_CODE_BITS[value]; }
  int scale_bytes() const { return LC_SCALE_BYTES[value]; }
  int64_t index_bytes(int64_t rows) const {
    if (index == LC_ELIAS_FANO) return rows * record();
    return (rows * (index == LC_BITMAP ? c : k * (index == LC_U32 ? 32 : field())) + 7) / 8;
  }
  int64_t code_bytes(int64_t rows) const { return (rows * k * code_bits() + 7) / 8; }

 private:
  static int lc_log2(int64_t v) { return 63 - __builtin_clzll((unsigned long long)v); }
};

struct LcSections {
  uint8_t *scales, *indices, *codes;
};

static inline int64_t lc_pad4(int64_t bytes) { return (bytes + 3) & ~(int64_t)3; }

static inline LcSections lc_sections(const LcSparse& f, uint8_t* body, int64_t rows) {
  uint8_t* indices = body + lc_pad4(rows * f.scale_bytes());
  return {body, indices, indices + lc_pad4(f.index_bytes(rows))};
}

template <class T>
static inline T lc_load(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
static inline void lc_store(uint8_t* to, T value) {
  memcpy(to, &value, sizeof(T));
}

static inline float lc_sign_of(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

// Nearest bfloat16; beyond its range the largest finite one, and a flag.
static inline uint16_t lc_to_bf16(float x, int& flags) {
  const uint32_t u = lc_bits_of_float(x), rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
  if ((rounded & 0x7FFF) < 0x7F80) return (uint16_t)rounded;
  flags |= LC_SATURATED_LEVEL;
  return (uint16_t)(rounded - 1);
}

// ---- positions

static inline void lc_set_bit(uint8_t* bits, int64_t i) { bits[i >> 3] |= (uint8_t)(1 << (i & 7)); }

static inline void lc_write_elias_fano(const LcSparse& f, const uint32_t* at, uint8_t* record) {
  const int low = f.low();
  memset(record, 0, (size_t)f.record());
  LcBitWriter lows(record);
  for (int64_t j = 0; j < f.k; ++j) lows.put(at[j], low);
  lows.finish();
  for (int64_t j = 0; j < f.k; ++j) lc_set_bit(record, f.k * low + (at[j] >> low) + j);
}

// Positions of the set bits first .. first + length - 1 of `bits`, relative to first. Returns how many, at most limit + 1.
static inline int64_t lc_set_bits(const uint8_t* bits, int64_t first, int64_t length, int64_t limit, uint32_t* at) {
  int64_t count = 0;
  const int64_t stop = first + length;
  for (int64_t byte = first >> 3; byte * 8 < stop; ++byte) {
    uint32_t set = bits[byte];
    if (byte * 8 < first) set &= 0xFFu << (first & 7);
    if (byte * 8 + 8 > stop) set &= (1u << (stop & 7)) - 1;
    for (; set; set &= set - 1) {
      if (count == limit) return limit + 1;
      at[count++] = (uint32_t)(byte * 8 + __builtin_ctz(set) - first);
    }
  }
  return count;
}

static inline int64_t lc_read_elias_fano(const LcSparse& f, const uint8_t* record, uint32_t* at) {
  const int low = f.low();
  const int64_t count = lc_set_bits(record, f.k * low, f.upper(), f.k, at);
  if (count != f.k) return count ? -1 : 0;
  LcBitReader lows(record);
  for (int64_t j = 0; j < f.k; ++j) at[j] = (uint32_t)((int64_t)(at[j] - j) << low) | lows.get(low);
  return count;
}

// ---- values

static inline uint32_t lc_largest_bits(const float* v, int64_t count) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t bits = lc_bits_of_float(v[j]) & LC_MAGNITUDE;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// tree_sum of get(0..k-1), of its blocks of 4096 first where k is larger. sums: 2048 + k / 2048 + 4 floats.
template <class Get>
static inline float lc_row_sum(const Get& get, int64_t k, float* sums) {
  if (k <= 4096) return lc_tree_sum(get, k, sums);
  const int64_t blocks = (k + 4095) / 4096;
  float* totals = sums + 2048;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * 4096, m = k - first < 4096 ? k - first : 4096;
    totals[b] = lc_tree_sum([&](int64_t j) { return get(first + j); }, m, sums);
  }
  return lc_tree_sum([&](int64_t b) { return totals[b]; }, blocks, totals);
}

// The power of two that keeps sums of a row within float32 (range_factor in ranges.py).
static inline float lc_sum_factor(uint32_t largest) {
  if (largest >= (127u + 40u) << 23) return lc_float_of_bits((127u - 80u) << 23);
  return lc_float_of_bits(largest < (127u - 40u) << 23 ? (127u + 80u) << 23 : 127u << 23);
}

struct LcLevels {
  float small, large, threshold;  // levels, and the threshold that divided the classes
};

static inline LcLevels lc_lloyd(const float* v, int64_t k, int64_t count, int iterations, float factor, float* sums) {
  const auto magnitude = [&](int64_t j) { return (v[j] < 0 ? -v[j] : v[j]) * factor; };
  float threshold = lc_row_sum(magnitude, k, sums) / (float)count;
  for (int i = 0;; ++i) {
    int64_t num_large = 0;
    for (int64_t j = 0; j < count; ++j) num_large += magnitude(j) > threshold;
    const auto small_part = [&](int64_t j) { return magnitude(j) > threshold ? 0.0f : magnitude(j); };
    const auto large_part = [&](int64_t j) { return magnitude(j) > threshold ? magnitude(j) : 0.0f; };
    float small = lc_row_sum(small_part, k, sums) / (float)(count - num_large);
    float large = lc_row_sum(large_part, k, sums) / (float)num_large;
    if (num_large == 0) large = small;
    if (num_large == count) small = large;  // rounding can put the mean of equal values below them
    if (i == iterations) return {small, large, threshold};
    threshold = (small + large) * 0.5f;
  }
}

static inline int lc_write_mag2(const float* v, int64_t k, int64_t count, int iterations, float* sums, uint8_t* scale,
                                LcBitWriter& codes, float* decoded) {
  const uint32_t largest = lc_largest_bits(v, count);
  const float factor = lc_sum_factor(largest);
  LcLevels levels = {0, 0, 0};
  const bool tiny = largest < (127u - 100u) << 23;
  if (!tiny) levels = lc_lloyd(v, k, count, iterations, factor, sums);
  int flags = 0;
  const uint16_t small = lc_to_bf16(levels.small / factor, flags), large = lc_to_bf16(levels.large / factor, flags);
  lc_store(scale, small), lc_store(scale + 2, large);
  for (int64_t j = 0; j < k; ++j) {
    const bool negative = v[j] < 0 && !tiny, is_large = (v[j] < 0 ? -v[j] : v[j]) * factor > levels.threshold && !tiny;
    codes.put((uint32_t)negative | (uint32_t)is_large << 1, 2);
    decoded[j] = lc_sign_of(lc_bf16_to_f32(is_large ? large : small), negative);
  }
  return flags;
}

static inline int lc_write_sign1(const float* v, int64_t k, int64_t count, float* sums, uint8_t* scale,
                                 LcBitWriter& codes, float* decoded) {
  const uint32_t largest = lc_largest_bits(v, count);
  const float factor = lc_sum_factor(largest);
  const bool tiny = largest < (127u - 100u) << 23;
  float level = 0;
  if (!tiny) {
    const auto magnitude = [&](int64_t j) { return (v[j] < 0 ? -v[j] : v[j]) * factor; };
    level = lc_row_sum(magnitude, k, sums) / (float)count / factor;
  }
  int flags = 0;
  const uint16_t rounded = lc_to_bf16(level, flags);
  lc_store(scale, rounded);
  for (int64_t j = 0; j < k; ++j) {
    const bool negative = v[j] < 0 && !tiny;
    codes.put(negative, 1);
    decoded[j] = lc_sign_of(lc_bf16_to_f32(rounded), negative);
  }
  return flags;
}

static inline void lc_write_int(const float* v, int64_t k, int width, uint8_t* scale_out, LcBitWriter& codes,
                                float* decoded) {
  const uint32_t largest = lc_largest_bits(v, k);
  const bool tiny = largest < (127u - 100u) << 23;
  const float top = (float)((1 << (width - 1)) - 1), absmax = tiny ? 0.0f : lc_float_of_bits(largest);
  const float inverse = tiny ? 0.0f : top / absmax;
  float scale = absmax / top;
  if (scale * top > 3.4028234663852886e38f) scale = lc_float_of_bits(lc_bits_of_float(scale) - 1);
  lc_store(scale_out, scale);
  for (int64_t j = 0; j < k; ++j) {
    float q = __builtin_rintf(tiny ? 0.0f : v[j] * inverse);
    q = q > top ? top : q < -top ? -top : q;
    codes.put((uint32_t)(int32_t)q, width);
    decoded[j] = (float)(int32_t)q * scale;
  }
}

// ---- rows

// Writes rows first, first + 1, ... of a range, in order.
struct LcRowWriter {
  LcSparse f;
  LcSections to;
  int64_t row;
  float* sums;
  LcBitWriter fields, codes;

  LcRowWriter(const LcSparse& f, LcSections to, int64_t first, int64_t stop, float* sums)
      : f(f), to(to), row(first), sums(sums), fields(to.indices + first * f.k * f.field() / 8),
        codes(to.codes + first * f.k * f.code_bits() / 8) {
    if (f.index == LC_BITMAP) memset(to.indices + first * f.c / 8, 0, (size_t)((stop * f.c + 7) / 8 - first * f.c / 8));
  }

  // k positions and values of which `count` are real; decoded: k floats, receives what a reader will get.
  int write(const uint32_t* at, const float* v, int64_t count, float* decoded) {
    write_positions(at);
    const int flags = write_values(v, count, decoded);
    ++row;
    return flags;
  }

  void write_positions(const uint32_t* at) {
    if (f.index == LC_ELIAS_FANO) lc_write_elias_fano(f, at, to.indices + row * f.record());
    for (int64_t j = 0; j < f.k && f.index != LC_ELIAS_FANO; ++j) {
      if (f.index == LC_FIELDS) fields.put(at[j], f.field());
      if (f.index == LC_BITMAP) lc_set_bit(to.indices, row * f.c + at[j]);
      if (f.index == LC_U32) lc_store(to.indices + (row * f.k + j) * 4, (uint32_t)(row * f.c + at[j]));
    }
  }

  int write_values(const float* v, int64_t count, float* decoded) {
    uint8_t* scale = to.scales + row * f.scale_bytes();
    int flags = 0;
    if (f.value == LC_MAG2) return lc_write_mag2(v, f.k, count, f.iterations, sums, scale, codes, decoded);
    if (f.value == LC_SIGN1) return lc_write_sign1(v, f.k, count, sums, scale, codes, decoded);
    if (f.value >= LC_KEPT_INT8) return lc_write_int(v, f.k, f.code_bits(), scale, codes, decoded), 0;
    for (int64_t j = 0; j < f.k; ++j) {
      uint8_t* code = to.codes + (row * f.k + j) * (f.code_bits() / 8);
      decoded[j] = v[j];
      if (f.value == LC_RAW_F32) {
        lc_store(code, v[j]);
      } else {
        const uint16_t rounded = lc_to_bf16(v[j], flags);
        lc_store(code, rounded);
        decoded[j] = lc_bf16_to_f32(rounded);
      }
    }
    return flags;
  }

  void finish() {
    if (f.index == LC_FIELDS) fields.finish();
    codes.finish();
  }
};

static inline bool lc_is_finite(float x) { return (lc_bits_of_float(x) & LC_MAGNITUDE) < LC_INF_BITS; }

// Reads rows first, first + 1, ... of a range, in order.
struct LcRowReader {
  LcSparse f;
  LcSections from;
  int64_t row;
  LcBitReader fields, codes;

  LcRowReader(const LcSparse& f, LcSections from, int64_t first)
      : f(f), from(from), row(first), fields(from.indices + first * f.k * f.field() / 8),
        codes(from.codes + first * f.k * f.code_bits() / 8) {}

  // Number of entries, 0 or k, or -1 where no writer can have written the row.
  int64_t read(uint32_t* at, float* v) {
    int64_t count = read_positions(at);
    for (int64_t j = 0; j < count; ++j)
      if (at[j] >= (uint64_t)f.c || (j && at[j] <= at[j - 1])) count = -1;
    if (!read_values(v)) count = -1;
    ++row;
    return count;
  }

  int64_t read_positions(uint32_t* at) {
    if (f.index == LC_ELIAS_FANO) return lc_read_elias_fano(f, from.indices + row * f.record(), at);
    if (f.index == LC_BITMAP) {
      const int64_t count = lc_set_bits(from.indices, row * f.c, f.c, f.k, at);
      return count == f.k ? count : count ? -1 : 0;
    }
    uint64_t any = 0;
    const uint64_t start = f.index == LC_U32 ? (uint64_t)(row * f.c) : 0;
    for (int64_t j = 0; j < f.k; ++j) {
      const uint32_t field = f.index == LC_U32 ? lc_load<uint32_t>(from.indices + (row * f.k + j) * 4) : fields.get(f.field());
      any |= field;
      at[j] = field >= start && field - start < (uint64_t)f.c ? (uint32_t)(field - start) : UINT32_MAX;
    }
    // zeros are "no entries", except one entry at position 0
    return any || (f.k == 1 && start == 0) ? f.k : 0;
  }

  bool read_values(float* v) {
    const uint8_t* scale = from.scales + row * f.scale_bytes();
    bool finite = true;
    float levels[2] = {0, 0};
    if (f.value >= LC_KEPT_INT8) levels[0] = lc_load<float>(scale);
    if (f.value == LC_MAG2 || f.value == LC_SIGN1) levels[0] = levels[1] = lc_bf16_to_f32(lc_load<uint16_t>(scale));
    if (f.value == LC_MAG2) levels[1] = lc_bf16_to_f32(lc_load<uint16_t>(scale + 2));
    for (int64_t j = 0; j < f.k; ++j) {
      const uint8_t* code = from.codes + (row * f.k + j) * (f.code_bits() / 8);
      if (f.value == LC_RAW_F32) finite &= lc_is_finite(v[j] = lc_load<float>(code));
      if (f.value == LC_RAW_BF16) finite &= lc_is_finite(v[j] = lc_bf16_to_f32(lc_load<uint16_t>(code)));
      if (f.value < LC_MAG2) continue;
      const uint32_t q = codes.get(f.code_bits());
      if (f.value == LC_KEPT_INT8) v[j] = (float)(int8_t)q * levels[0];
      if (f.value == LC_KEPT_INT4) v[j] = (float)(int32_t)((q ^ 8) - 8) * levels[0];
      if (f.value == LC_MAG2 || f.value == LC_SIGN1) v[j] = lc_sign_of(levels[q >> 1], q & 1);
    }
    return finite && lc_is_finite(levels[0]) && lc_is_finite(levels[1]);
  }
};
