// Rows of c positions of which k are kept, as bytes: scales | indices | codes (sparse.py, indices.py, values.py).
// Ranges of rows that start at a multiple of 8 start on a byte boundary in every section, so threads share no byte.
#pragma once
#include "bits.h"
#include "numbers.cuh"
#include "reduce.h"
#include "sparse.cuh"
#include "tables.h"

constexpr int64_t LC_ROOM = 1040;  // arrays of entries of a row have room for this many
constexpr uint32_t LC_MAGNITUDE = 0x7FFFFFFFu, LC_INF_BITS = 0x7F800000u;

struct LcSparse {
  int64_t c, k;
  int index, value, iterations;

  int low() const { return lc_log2(c / k); }                                        // low bits of Elias-Fano
  int64_t upper() const { return k + (c >> low()); }                                // length of its bit vector
  int64_t record() const { return (k * low() + upper() + 7) / 8; }                  // bytes of a row
  // rows for the vector kernels: k whole bytes of low bits, and room for 8-byte accesses to them
  bool vectors() const { return lc_active_level >= LC_LEVEL_AVX2 && k % 8 == 0 && k <= 1024 && low() <= 8 && upper() >= 64; }
  int field() const { return c > 1 ? lc_log2(c - 1) + 1 : 0; }
  int code_bits() const { return lc_value_bits(value); }
  int scale_bytes() const { return lc_value_scale_bytes(value); }
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

// ---- positions

static inline void lc_set_bit(uint8_t* bits, int64_t i) { bits[i >> 3] |= (uint8_t)(1 << (i & 7)); }

#ifdef LC_X86
// For rows of which `vectors()` holds.
LC_AVX2 static inline void lc_write_elias_fano_avx2(const LcSparse& f, const uint32_t* at, uint8_t* record) {
  const int low = f.low();
  const __m256i mask = _mm256_set1_epi32((1 << low) - 1), pair_mask = _mm256_set1_epi64x((1ll << 2 * low) - 1);
  const __m256i places = _mm256_setr_epi64x(0, 2 * low, 4 * low, 6 * low);
  const __m128i second = _mm_cvtsi32_si128(32 - low);
  for (int64_t j = 0; j < f.k; j += 8) {  // shifts, as pext is slow on some machines
    __m256i v = _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(at + j)), mask);
    v = _mm256_and_si256(_mm256_or_si256(v, _mm256_srl_epi64(v, second)), pair_mask);
    v = _mm256_sllv_epi64(v, places);
    const __m128i half = _mm_or_si128(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    lc_store(record + j / 8 * low, _mm_cvtsi128_si64(_mm_or_si128(half, _mm_unpackhi_epi64(half, half))));
  }
  uint8_t* to = record + f.k / 8 * low;
  uint8_t* const end = record + f.record();
  uint64_t word = 0;
  int64_t next = 64;  // end of the current word
  for (int64_t j = 0; j < f.k; ++j) {
    const int64_t place = (at[j] >> low) + j;
    for (; place >= next; next += 64, to += 8, word = 0) lc_store(to, word);
    word |= 1ull << (place & 63);
  }
  for (; to < end; ++to, word >>= 8) *to = (uint8_t)word;
}
#endif

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

#ifdef LC_X86
// For rows that lc_write_elias_fano_avx2 writes. Returns k, 0, or -1 where the number of set bits is another. `at` has
// room for 8 more.
LC_AVX2 static inline int64_t lc_read_elias_fano_avx2(const LcSparse& f, const uint8_t* record, uint32_t* at) {
  const int low = f.low();
  const uint8_t* upper = record + f.k / 8 * low;
  int64_t count = 0;
  for (int64_t byte = 0; byte * 8 < f.upper() && count <= f.k; ++byte) {
    uint32_t bits = upper[byte];
    if (byte * 8 + 8 > f.upper()) bits &= (1u << (f.upper() & 7)) - 1;
    const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)LC_PLACES.of[bits]));
    _mm256_storeu_si256((__m256i*)(at + count), _mm256_add_epi32(places, _mm256_set1_epi32((int)byte * 8)));
    count += __builtin_popcount(bits);
  }
  if (count != f.k) return count ? -1 : 0;
  const __m256i mask = _mm256_set1_epi64x((1ll << low) - 1), shifts = _mm256_setr_epi64x(0, 2 * low, 4 * low, 6 * low);
  const __m128i left = _mm_cvtsi32_si128(low), second = _mm_cvtsi32_si128(32 - low);
  __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t j = 0; j < f.k; j += 8) {
    const __m256i pairs =
        _mm256_srlv_epi64(_mm256_set1_epi64x((long long)lc_load<uint64_t>(record + j / 8 * low)), shifts);
    const __m256i odd = _mm256_and_si256(_mm256_sll_epi64(pairs, second), _mm256_slli_epi64(mask, 32));
    const __m256i lows = _mm256_or_si256(_mm256_and_si256(pairs, mask), odd);
    const __m256i high = _mm256_sub_epi32(_mm256_loadu_si256((const __m256i*)(at + j)), order);
    _mm256_storeu_si256((__m256i*)(at + j), _mm256_or_si256(_mm256_sll_epi32(high, left), lows));
    order = _mm256_add_epi32(order, _mm256_set1_epi32(8));
  }
  return count;
}

// Whether positions below 2^31 ascend.
LC_AVX2 static inline bool lc_ascends_avx2(const uint32_t* at, int64_t count) {
  int64_t j = 0;
  __m256i all = _mm256_set1_epi32(-1);
  for (; j + 9 <= count; j += 8)
    all = _mm256_and_si256(all, _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)(at + j + 1)),
                                                   _mm256_loadu_si256((const __m256i*)(at + j))));
  bool ascends = _mm256_movemask_epi8(all) == -1;
  for (; j + 1 < count; ++j) ascends &= at[j + 1] > at[j];
  return ascends;
}

// Values of "mag2" for k % 4 == 0. v has room for 8 more.
LC_AVX2 static inline void lc_read_mag2_avx2(const uint8_t* codes, float small, float large, int64_t k, float* v) {
  const __m256 levels = _mm256_setr_ps(small, -small, large, -large, 0, 0, 0, 0);
  const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), mask = _mm256_set1_epi32(3);
  for (int64_t j = 0; j < k; j += 8) {
    const int bits = k - j < 8 ? codes[j / 4] : lc_load<uint16_t>(codes + j / 4);
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(bits), shifts), mask);
    _mm256_storeu_ps(v + j, _mm256_permutevar8x32_ps(levels, code));
  }
}
#endif

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
    const uint32_t bits = lc_bits(v[j]) & LC_MAGNITUDE;
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

struct LcLevels {
  LcTwoLevels levels;
  float threshold;  // that divided the classes
};

static inline LcLevels lc_lloyd(const float* v, int64_t k, int64_t count, int iterations, float factor, float* sums) {
  const auto magnitude = [&](int64_t j) { return (v[j] < 0 ? -v[j] : v[j]) * factor; };
  float threshold = lc_row_sum(magnitude, k, sums) / (float)count;
  for (int i = 0;; ++i) {
    int64_t num_large = 0;
    for (int64_t j = 0; j < count; ++j) num_large += magnitude(j) > threshold;
    const auto small_part = [&](int64_t j) { return magnitude(j) > threshold ? 0.0f : magnitude(j); };
    const auto large_part = [&](int64_t j) { return magnitude(j) > threshold ? magnitude(j) : 0.0f; };
    const LcTwoLevels levels = lc_two_levels(lc_row_sum(small_part, k, sums), lc_row_sum(large_part, k, sums),
                                             (float)(count - num_large), (float)num_large);
    if (i == iterations) return {levels, threshold};
    threshold = lc_midpoint(levels);
  }
}

#ifdef LC_X86
struct LcClasses {
  float small_sum, large_sum;
  int64_t num_large;
};

// Sums of the magnitudes above the threshold and of the others, zeros in each other's places. v: 8 * width floats, zeros
// behind the last value; width: a power of two, 8 to 128. large: a bit for each element.
LC_AVX2 static inline LcClasses lc_classify_avx2(const float* v, int64_t width, float threshold, uint8_t* large) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)), t = _mm256_set1_ps(threshold);
  const int64_t step = width / 8;
  __m256 small_sums[16], large_sums[16];
  int64_t num_large = 0;
  for (int64_t i = 0; i < step; ++i) {
    __m256 small_part[8], large_part[8];
    for (int j = 0; j < 8; ++j) {
      const __m256 m = _mm256_and_ps(_mm256_loadu_ps(v + 8 * (i + j * step)), magnitude);
      const __m256 is_large = _mm256_cmp_ps(m, t, _CMP_GT_OQ);
      const int bits = _mm256_movemask_ps(is_large);
      large[i + j * step] = (uint8_t)bits;
      num_large += __builtin_popcount((unsigned)bits);
      small_part[j] = _mm256_andnot_ps(is_large, m);
      large_part[j] = _mm256_and_ps(is_large, m);
    }
    small_sums[i] = lc_fold_8_vectors(small_part, 1);
    large_sums[i] = lc_fold_8_vectors(large_part, 1);
  }
  return {lc_tree_sum_avx2(small_sums, step), lc_tree_sum_avx2(large_sums, step), num_large};
}

// lc_write_mag2 for up to 1024 values whose sums stay in range. v has room for zeros up to the next power of two.
LC_AVX2 static inline int lc_write_mag2_avx2(float* v, int64_t k, int64_t count, int iterations, uint8_t* scale,
                                             LcBitWriter& codes, float* decoded) {
  const int64_t width = k <= 64 ? 8 : lc_next_pow2(k) / 8;
  for (int64_t j = k; j < 8 * width; ++j) v[j] = 0.0f;
  uint8_t large[128];
  float threshold = lc_classify_avx2(v, width, -1.0f, large).large_sum / (float)count;
  LcTwoLevels levels;
  for (int i = 0;; ++i) {
    const LcClasses sums = lc_classify_avx2(v, width, threshold, large);
    levels = lc_two_levels(sums.small_sum, sums.large_sum, (float)(count - sums.num_large), (float)sums.num_large);
    const float next = lc_midpoint(levels);
    if (i == iterations || next == threshold) break;  // from an unchanged threshold on, nothing changes
    threshold = next;
  }
  int flags = 0;
  const uint16_t small_code = lc_level_to_bf16(levels.small, &flags), large_code = lc_level_to_bf16(levels.large, &flags);
  lc_store(scale, small_code), lc_store(scale + 2, large_code);
  const __m256 both = _mm256_setr_ps(lc_bf16_to_f32(small_code), lc_bf16_to_f32(large_code), 0, 0, 0, 0, 0, 0);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t j = 0; j < k; j += 8) {
    const __m256 is_negative = _mm256_cmp_ps(_mm256_loadu_ps(v + j), _mm256_setzero_ps(), _CMP_LT_OQ);
    const __m256 sign = _mm256_and_ps(is_negative, _mm256_set1_ps(-0.0f));
    const __m256i is_large = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(large[j / 8]), lanes), _mm256_set1_epi32(1));
    _mm256_storeu_ps(decoded + j, _mm256_or_ps(_mm256_permutevar8x32_ps(both, is_large), sign));
    const uint32_t negative = (uint32_t)_mm256_movemask_ps(is_negative);
    const int left = k - j < 8 ? (int)(k - j) : 8;
    codes.put(LC_SPREAD.of[negative] | (uint32_t)LC_SPREAD.of[large[j / 8]] << 1, 2 * left);
  }
  return flags;
}
#endif

static inline int lc_write_mag2(const float* v, int64_t k, int64_t count, int iterations, float* sums, uint8_t* scale,
                                LcBitWriter& codes, float* decoded) {
  const uint32_t largest = lc_largest_bits(v, count);
  const float factor = lc_range_factor(lc_float(largest));
  LcLevels found = {{0, 0}, 0};
  const bool tiny = largest < (127u - 100u) << 23;
  if (!tiny) found = lc_lloyd(v, k, count, iterations, factor, sums);
  int flags = 0;
  const uint16_t small = lc_level_to_bf16(found.levels.small / factor, &flags), large = lc_level_to_bf16(found.levels.large / factor, &flags);
  lc_store(scale, small), lc_store(scale + 2, large);
  for (int64_t j = 0; j < k; ++j) {
    const uint32_t code = tiny ? 0 : lc_mag2_code(v[j], factor, found.threshold);
    codes.put(code, 2);
    decoded[j] = lc_sign_of(lc_bf16_to_f32(code >> 1 ? large : small), code & 1);
  }
  return flags;
}

static inline int lc_write_sign1(const float* v, int64_t k, int64_t count, float* sums, uint8_t* scale,
                                 LcBitWriter& codes, float* decoded) {
  const uint32_t largest = lc_largest_bits(v, count);
  const float factor = lc_range_factor(lc_float(largest));
  const bool tiny = largest < (127u - 100u) << 23;
  float level = 0;
  if (!tiny) {
    const auto magnitude = [&](int64_t j) { return (v[j] < 0 ? -v[j] : v[j]) * factor; };
    level = lc_row_sum(magnitude, k, sums) / (float)count / factor;
  }
  int flags = 0;
  const uint16_t rounded = lc_level_to_bf16(level, &flags);
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
  const float top = (float)((1 << (width - 1)) - 1), absmax = tiny ? 0.0f : lc_float(largest);
  const float inverse = tiny ? 0.0f : top / absmax;
  const float scale = lc_block_scale(absmax, top);
  lc_store(scale_out, scale);
  for (int64_t j = 0; j < k; ++j) {
    const int q = lc_kept_int(v[j], inverse, top);
    codes.put((uint32_t)q, width);
    decoded[j] = (float)q * scale;
  }
}

// ---- rows

// Writes rows first, first + 1, ... of a range, in order.
struct LcRowWriter {
  LcSparse f;
  LcSections to;
  int64_t row;
  float* sums;
  bool vectors;
  LcBitWriter fields, codes;

  LcRowWriter(const LcSparse& f, LcSections to, int64_t first, int64_t stop, float* sums)
      : f(f), to(to), row(first), sums(sums), vectors(f.vectors()), fields(to.indices + first * f.k * f.field() / 8),
        codes(to.codes + first * f.k * f.code_bits() / 8) {
    if (f.index == LC_BITMAP) memset(to.indices + first * f.c / 8, 0, (size_t)((stop * f.c + 7) / 8 - first * f.c / 8));
  }

  // k positions and values of which `count` are real; decoded receives what a reader will get. The arrays have room for
  // max(k, LC_ROOM) elements.
  int write(const uint32_t* at, float* v, int64_t count, float* decoded) {
    write_positions(at);
    const int flags = write_values(v, count, decoded);
    ++row;
    return flags;
  }

  void write_positions(const uint32_t* at) {
#ifdef LC_X86
    if (f.index == LC_ELIAS_FANO && vectors) return lc_write_elias_fano_avx2(f, at, to.indices + row * f.record());
#endif
    if (f.index == LC_ELIAS_FANO) lc_write_elias_fano(f, at, to.indices + row * f.record());
    for (int64_t j = 0; j < f.k && f.index != LC_ELIAS_FANO; ++j) {
      if (f.index == LC_FIELDS) fields.put(at[j], f.field());
      if (f.index == LC_BITMAP) lc_set_bit(to.indices, row * f.c + at[j]);
      if (f.index == LC_U32) lc_store(to.indices + (row * f.k + j) * 4, (uint32_t)(row * f.c + at[j]));
    }
  }

  int write_values(float* v, int64_t count, float* decoded) {
    uint8_t* scale = to.scales + row * f.scale_bytes();
    int flags = 0;
#ifdef LC_X86
    if (f.value == LC_MAG2 && vectors && lc_range_factor(lc_float(lc_largest_bits(v, count))) == 1.0f)
      return lc_write_mag2_avx2(v, f.k, count, f.iterations, scale, codes, decoded);
#endif
    if (f.value == LC_MAG2) return lc_write_mag2(v, f.k, count, f.iterations, sums, scale, codes, decoded);
    if (f.value == LC_SIGN1) return lc_write_sign1(v, f.k, count, sums, scale, codes, decoded);
    if (f.value >= LC_KEPT_INT8) return lc_write_int(v, f.k, f.code_bits(), scale, codes, decoded), 0;
    for (int64_t j = 0; j < f.k; ++j) {
      uint8_t* code = to.codes + (row * f.k + j) * (f.code_bits() / 8);
      decoded[j] = v[j];
      if (f.value == LC_RAW_F32) {
        lc_store(code, v[j]);
      } else {
        const uint16_t rounded = lc_level_to_bf16(v[j], &flags);
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

// Reads rows first, first + 1, ... of a range, in order.
struct LcRowReader {
  LcSparse f;
  LcSections from;
  int64_t row;
  bool vectors;
  LcBitReader fields, codes;

  LcRowReader(const LcSparse& f, LcSections from, int64_t first)
      : f(f), from(from), row(first), vectors(f.vectors()), fields(from.indices + first * f.k * f.field() / 8),
        codes(from.codes + first * f.k * f.code_bits() / 8) {}

  // Number of entries, 0 or k, or -1 where no writer can have written the row.
  int64_t read(uint32_t* at, float* v) {
    const int64_t count = read_positions(at);
    const bool valid = count >= 0 && ascends(at, count) & read_values(v);
    ++row;
    return valid ? count : -1;
  }

  bool ascends(const uint32_t* at, int64_t count) const {
    if (count && at[count - 1] >= (uint64_t)f.c) return false;
#ifdef LC_X86
    if (f.index == LC_ELIAS_FANO && vectors) return lc_ascends_avx2(at, count);
#endif
    bool ascends = true;
    for (int64_t j = 1; j < count; ++j) ascends &= at[j] > at[j - 1];
    return ascends;
  }

  int64_t read_positions(uint32_t* at) {
#ifdef LC_X86
    if (f.index == LC_ELIAS_FANO && vectors) return lc_read_elias_fano_avx2(f, from.indices + row * f.record(), at);
#endif
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
    float levels[2] = {0, 0};
    if (f.value >= LC_KEPT_INT8) levels[0] = lc_load<float>(scale);
    if (f.value == LC_MAG2 || f.value == LC_SIGN1) levels[0] = levels[1] = lc_bf16_to_f32(lc_load<uint16_t>(scale));
    if (f.value == LC_MAG2) levels[1] = lc_bf16_to_f32(lc_load<uint16_t>(scale + 2));
    bool finite = lc_finite(levels[0]) && lc_finite(levels[1]);
#ifdef LC_X86
    if (f.value == LC_MAG2 && vectors) {
      lc_read_mag2_avx2(from.codes + row * f.k / 4, levels[0], levels[1], f.k, v);
      return finite;
    }
#endif
    for (int64_t j = 0; j < f.k; ++j) {
      const uint8_t* code = from.codes + (row * f.k + j) * (f.code_bits() / 8);
      if (f.value == LC_RAW_F32) finite &= lc_finite(v[j] = lc_load<float>(code));
      if (f.value == LC_RAW_BF16) finite &= lc_finite(v[j] = lc_bf16_to_f32(lc_load<uint16_t>(code)));
      if (f.value < LC_MAG2) continue;
      const uint32_t q = codes.get(f.code_bits());
      if (f.value >= LC_KEPT_INT8) v[j] = lc_kept_int_value(q, f.code_bits(), levels[0]);
      if (f.value == LC_MAG2 || f.value == LC_SIGN1) v[j] = lc_sign_of(levels[q >> 1], q & 1);
    }
    return finite;
  }
};
