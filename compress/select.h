// Exact selection of the k entries of largest magnitude of a row: positions ascending, ties to the lower position.
// Magnitudes are compared as integers (bits without sign). NaN and infinities are flagged and count as zero.
#pragma once
#include "kernels.h"
#include "numbers.cuh"
#include "tables.h"

// Rows longer than LC_MAX_ROW are never copied and are selected from by radix; at most LC_MAX_MARKED are listed at once.
constexpr int64_t LC_MAX_ROW = 65536, LC_MAX_MARKED = 1024;

struct LcThreshold {
  uint32_t bits;  // the k-th largest magnitude
  int64_t ties;   // how many entries of exactly this magnitude belong to the k
};

static inline uint32_t lc_key(float x) {
  const uint32_t bits = lc_bits(x) & 0x7FFFFFFFu;
  return bits < 0x7F800000u ? bits : 0;
}

static inline int lc_nonfinite(float x) {
  const uint32_t bits = lc_bits(x) & 0x7FFFFFFFu;
  return bits < 0x7F800000u ? 0 : bits == 0x7F800000u ? LC_HAS_INF : LC_HAS_NAN;
}

// Replaces what is not finite by zero.
static inline int lc_copy_finite(const float* x, int64_t m, float* out) {
  int flags = 0;
  for (int64_t i = 0; i < m; ++i) {
    const int bad = lc_nonfinite(x[i]);
    flags |= bad;
    out[i] = bad ? 0.0f : x[i];
  }
  return flags;
}

// Radix selection, 11 + 10 + 10 bits from the top. 1 <= k <= m.
static inline LcThreshold lc_radix_threshold(const float* x, int64_t m, int64_t k) {
  constexpr int shifts[] = {20, 10, 0}, widths[] = {11, 10, 10};
  uint32_t prefix = 0;
  int64_t needed = k;
  for (int digit = 0; digit < 3; ++digit) {
    const int shift = shifts[digit], width = widths[digit];
    uint32_t counts[2048] = {0};
    for (int64_t i = 0; i < m; ++i) {
      const uint32_t key = lc_key(x[i]);
      if (key >> shift >> width == prefix) ++counts[(key >> shift) & ((1u << width) - 1)];
    }
    uint32_t bucket = (1u << width) - 1;
    while (counts[bucket] < needed) needed -= counts[bucket--];
    prefix = prefix << width | bucket;
  }
  return {prefix, needed};
}

// Positions and values of the entries that a threshold selects, in order.
static inline void lc_take(const float* x, int64_t m, LcThreshold t, uint32_t* at, float* v) {
  int64_t taken = 0;
  for (int64_t i = 0; i < m; ++i) {
    const uint32_t key = lc_key(x[i]);
    if (key < t.bits || (key == t.bits && t.ties-- <= 0)) continue;
    at[taken] = (uint32_t)i;
    v[taken++] = lc_nonfinite(x[i]) ? 0.0f : x[i];
  }
}

// The k entries of a row of m elements, any k; where m < k the places m, m + 1, ... follow with value 0.
static inline void lc_select(const float* x, int64_t m, int64_t k, uint32_t* at, float* v) {
  const int64_t count = m < k ? m : k;
  lc_take(x, m, count < m ? lc_radix_threshold(x, m, count) : LcThreshold{0, m}, at, v);
  for (int64_t j = count; j < k; ++j) at[j] = (uint32_t)j, v[j] = 0.0f;
}

#ifdef LC_X86
// With AVX2, for rows of c elements, c a multiple of 64 and at most LC_MAX_ROW. A lower bound for the threshold is
// guessed from the rows before; one pass marks what reaches it; the exact threshold is then found among these few.
// Where the guess fails the bound is taken from the maxima of groups of elements: k groups that reach it contain k
// elements that do. Where that leaves too many (equal values), the whole row is bisected.
struct LcSelector {
  int64_t c, k;
  uint32_t guess = 0, margin = 1u << 19;    // smoothed k-th magnitude of the rows before; how far below it to mark
  uint32_t threshold = 0;                   // k-th magnitude of this row
  const float *next = nullptr, *next2 = nullptr;
  uint64_t marks[LC_MAX_ROW / 64];          // one bit for each element
  uint32_t keys[LC_MAX_MARKED + 64];
};

static inline bool lc_selector_takes(int64_t c, int64_t k) { return c % 64 == 0 && c <= LC_MAX_ROW && k < c; }

// Ask for a cache line of the next row. Spread over the whole work on a row: memory then never rests.
LC_AVX2 static inline void lc_fetch_ahead(const float* row, int64_t line) {
  _mm_prefetch((const char*)row + 64 * line, _MM_HINT_T0);
}

// Mark elements of magnitude >= threshold; return how many. With a residual, x is first replaced by decay * residual + x
// in `row`.
template <bool corrected>
LC_AVX2 static inline int64_t lc_mark_avx2(LcSelector& s, const float* x, const float* residual, float decay, float* row,
                                           uint32_t threshold) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF), below = _mm256_set1_epi32((int)threshold - 1);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing leaves the quarters of vectors interleaved
  const __m256 factor = _mm256_set1_ps(decay);
  int64_t count = 0;
  for (int64_t i = 0; i < s.c; i += 32) {
    __m256i above[4];
    for (int j = 0; j < 4; ++j) {
      __m256 p = _mm256_loadu_ps(x + i + 8 * j);
      if (corrected) {
        p = _mm256_add_ps(_mm256_mul_ps(factor, _mm256_loadu_ps(residual + i + 8 * j)), p);
        _mm256_storeu_ps(row + i + 8 * j, p);
      }
      above[j] = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(p), magnitude), below);
    }
    lc_fetch_ahead(x + s.c, i / 32);
    if (corrected) lc_fetch_ahead(residual + s.c, i / 32);
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(above[0], above[1]), _mm256_packs_epi32(above[2], above[3]));
    const uint32_t mark = (uint32_t)_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(bytes, order));
    memcpy((char*)s.marks + i / 8, &mark, 4);
    count += __builtin_popcount(mark);
  }
  return count;
}

LC_AVX2 static inline int64_t lc_sum8_avx2(__m256i v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xB1)));
}

LC_AVX2 static inline uint32_t lc_max8_bits_avx2(__m256i v) {
  __m128i a = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4E));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(a, _mm_shuffle_epi32(a, 0xB1)));
}

LC_AVX2 static inline __m256i lc_load_keys_avx2(const void* x, int64_t i) {
  return _mm256_and_si256(_mm256_loadu_si256((const __m256i*)((const uint32_t*)x + i)), _mm256_set1_epi32(0x7FFFFFFF));
}

LC_AVX2 static inline int64_t lc_count_avx2(const void* x, int64_t m, uint32_t threshold) {  // m % 8 == 0
  const __m256i below = _mm256_set1_epi32((int)threshold - 1);
  __m256i count = _mm256_setzero_si256();
  for (int64_t i = 0; i < m; i += 8) count = _mm256_sub_epi32(count, _mm256_cmpgt_epi32(lc_load_keys_avx2(x, i), below));
  return lc_sum8_avx2(count);
}

LC_AVX2 static inline uint32_t lc_largest_avx2(const void* x, int64_t m) {  // m % 8 == 0
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < m; i += 8) largest = _mm256_max_epu32(largest, lc_load_keys_avx2(x, i));
  return lc_max8_bits_avx2(largest);
}

// A threshold that at least k and, unless magnitudes are equal, at most k + slack of m magnitudes reach, between `low`,
// which `at_low` >= k reach, and `high`, which fewer than k do. at: how many reach it.
LC_AVX2 static inline uint32_t lc_bisect_avx2(const void* x, int64_t m, int64_t k, int64_t slack, uint32_t low,
                                              int64_t at_low, uint32_t high, uint32_t first, int64_t* at) {
  while (at_low > k + slack && high - low > 1) {
    const uint32_t middle = first > low && first < high ? first : low + (high - low) / 2;
    first = 0;
    const int64_t count = lc_count_avx2(x, m, middle);
    if (count >= k) {
      low = middle, at_low = count;
    } else {
      high = middle;
    }
  }
  *at = at_low;
  return low;
}

// Maxima of groups of elements a multiple of 8 apart, 64 groups in each of `segments` parts of the row. Returns the
// largest of them.
LC_AVX2 static inline uint32_t lc_group_maxima_avx2(const float* row, int64_t c, int64_t segments, uint32_t* maxima) {
  const int64_t length = c / segments;
  __m256i largest = _mm256_setzero_si256();
  for (int64_t s = 0; s < segments; ++s) {
    __m256i m[8];
    for (int j = 0; j < 8; ++j) m[j] = lc_load_keys_avx2(row, s * length + 8 * j);
    for (int64_t i = 64; i < length; i += 64)
      for (int j = 0; j < 8; ++j) m[j] = _mm256_max_epu32(m[j], lc_load_keys_avx2(row, s * length + i + 8 * j));
    for (int j = 0; j < 8; ++j) {
      largest = _mm256_max_epu32(largest, m[j]);
      _mm256_storeu_si256((__m256i*)(maxima + 64 * s + 8 * j), m[j]);
    }
  }
  return lc_max8_bits_avx2(largest);
}

// List the marked positions. Returns their number. `at` has room for 4 more.
LC_AVX2 static inline int64_t lc_list_marked_avx2(const uint64_t* marks, int64_t c, const float* next, const float* next2, uint32_t* at) {
  int64_t count = 0;
  for (int64_t word = 0; word < c / 64; ++word) {
    uint64_t mark = marks[word];
    lc_fetch_ahead(next, c / 32 + word);
    if (next2) lc_fetch_ahead(next2, c / 32 + word);
    const int64_t in_word = __builtin_popcountll(mark);
    uint32_t* to = at + count;
    for (int j = 0; j < 4; ++j, mark = _blsr_u64(mark)) to[j] = (uint32_t)(word * 64 + (int64_t)_tzcnt_u64(mark));
    for (int64_t j = 4; j < in_word; ++j, mark = _blsr_u64(mark)) to[j] = (uint32_t)(word * 64 + (int64_t)_tzcnt_u64(mark));
    count += in_word;
  }
  return count;
}

// From the marked entries those a threshold selects.
LC_AVX2 static inline void lc_take_marked_avx2(LcSelector& s, const float* row, LcThreshold t, uint32_t* at, float* v) {
  int64_t taken = 0;
  for (int64_t word = 0; word < s.c / 64; ++word) {
    for (uint64_t mark = s.marks[word]; mark; mark = _blsr_u64(mark)) {
      const uint32_t i = (uint32_t)(word * 64 + (int64_t)_tzcnt_u64(mark));
      if (lc_key(row[i]) == t.bits && t.ties-- <= 0) continue;
      at[taken] = i;
      v[taken++] = row[i];
    }
  }
}

// Bisection of the whole row. Returns false where something is not finite.
LC_AVX2 static inline bool lc_select_whole_avx2(LcSelector& s, const float* row, uint32_t* at, float* v) {
  const uint32_t largest = lc_largest_avx2(row, s.c);
  if (largest >= 0x7F800000u) return false;
  int64_t reach = s.c;
  const bool zeros = lc_count_avx2(row, s.c, 1) < s.k;  // the threshold is 0: most rows of many equal values
  const uint32_t bits = zeros ? 0 : lc_bisect_avx2(row, s.c, s.k, 0, 0, s.c, largest + 1, 0, &reach);
  const int64_t above = reach == s.k ? s.k : lc_count_avx2(row, s.c, bits + 1);
  lc_mark_avx2<false>(s, row, nullptr, 0.0f, nullptr, bits);
  lc_take_marked_avx2(s, row, {bits, reach == s.k ? s.k : s.k - above}, at, v);
  return true;
}

// Close the gaps left by entries below the threshold.
LC_AVX2 static inline void lc_compact_avx2(const uint32_t* keys, int64_t padded, uint32_t threshold, uint32_t* at, float* v) {
  const __m256i below = _mm256_set1_epi32((int)threshold - 1);
  int64_t taken = 0;
  for (int64_t j = 0; j < padded; j += 8) {
    const __m256i kept = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i*)(keys + j)), below);
    const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(kept));
    const __m256i places = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)LC_PLACES.of[mask]));
    const __m256i positions = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i*)(at + j)), places);
    const __m256 values = _mm256_permutevar8x32_ps(_mm256_loadu_ps(v + j), places);
    _mm256_storeu_si256((__m256i*)(at + taken), positions);
    _mm256_storeu_ps(v + taken, values);
    taken += __builtin_popcount((unsigned)mask);
  }
}

// `count` marked entries of which the k largest are kept, into at and v. Returns false where one is not finite.
LC_AVX2 static inline bool lc_select_marked_avx2(LcSelector& s, const float* row, int64_t count, uint32_t threshold,
                                                 uint32_t* at, float* v) {
  lc_list_marked_avx2(s.marks, s.c, s.next, s.next2, at);
  for (int64_t j = 0; j < count; ++j) {
    v[j] = row[at[j]];
    lc_fetch_ahead(s.next, s.c / 32 + s.c / 64 + j);
    if (s.next2) lc_fetch_ahead(s.next2, s.c / 32 + s.c / 64 + j);
  }
  for (int64_t j = 0; j < count; j += 8) _mm256_storeu_si256((__m256i*)(s.keys + j), lc_load_keys_avx2(v, j));
  const int64_t padded = (count + 7) / 8 * 8;
  for (int64_t j = count; j < padded; ++j) s.keys[j] = 0;
  const uint32_t largest = lc_largest_avx2(s.keys, padded);
  if (largest >= 0x7F800000u) return false;
  int64_t reach = count;
  const uint32_t bits = lc_bisect_avx2(s.keys, padded, s.k, 0, threshold, count, largest + 1, s.guess, &reach);
  s.threshold = bits;
  if (reach == s.k && bits) {
    lc_compact_avx2(s.keys, padded, bits, at, v);
    return true;
  }
  int64_t ties = s.k - lc_count_avx2(s.keys, padded, bits + 1), taken = 0;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t key = s.keys[j];
    at[taken] = at[j], v[taken] = v[j];
    taken += key > bits || (key == bits && ties-- > 0);
  }
  return true;
}

// Aim at about 1.4 k marked entries in the next row.
static inline void lc_learn(LcSelector& s, int64_t marked) {
  s.guess = s.guess ? (uint32_t)((int64_t)s.guess + ((int64_t)s.threshold - (int64_t)s.guess) / 4) : s.threshold;
  if (marked > s.k + s.k * 3 / 4) s.margin -= s.margin / 4;
  if (marked < s.k + s.k / 4 && s.margin < 1u << 24) s.margin += s.margin / 4 + 1;
}

// A lower bound of the k-th magnitude from group maxima; 0 where there is none above 0, infinity where something is not
// finite.
LC_AVX2 static inline uint32_t lc_group_bound_avx2(LcSelector& s, const float* row) {
  int64_t segments = 1, reach;
  while (64 * segments < 2 * s.k) segments *= 2;
  if (s.c % (64 * segments) || s.c < 128 * segments) return 0;
  const uint32_t largest = lc_group_maxima_avx2(row, s.c, segments, s.keys);
  if (largest >= 0x7F800000u) return largest;
  return lc_bisect_avx2(s.keys, 64 * segments, s.k, s.k / 10, 0, 64 * segments, largest + 1, 0, &reach);
}

// The k entries of a full row x, or, with a residual, of decay * residual + x, which is written to `row`. Returns false
// where something is not finite: then only `row` is complete. at and v have room for LC_MAX_MARKED + 8.
LC_AVX2 static inline bool lc_select_avx2(LcSelector& s, const float* x, const float* residual, float decay, float* row,
                                          uint32_t* at, float* v) {
  s.next = x + s.c, s.next2 = residual ? residual + s.c : nullptr;
  const bool few = 2 * s.k <= LC_MAX_MARKED;
  const int64_t limit = 4 * s.k + 64 < LC_MAX_MARKED ? 4 * s.k + 64 : LC_MAX_MARKED;
  uint32_t bound = s.guess > s.margin ? s.guess - s.margin : 0x7F800000u;
  int64_t count = residual ? lc_mark_avx2<true>(s, x, residual, decay, row, bound)
                  : few    ? lc_mark_avx2<false>(s, x, nullptr, 0.0f, nullptr, bound)
                           : 0;
  if (residual) x = row;
  if (!few) return lc_select_whole_avx2(s, x, at, v);
  if (count < s.k || count > limit) {
    bound = lc_group_bound_avx2(s, x);
    if (bound >= 0x7F800000u) return false;
    if (bound) count = lc_mark_avx2<false>(s, x, nullptr, 0.0f, nullptr, bound);
    if (!bound || count > limit) return lc_select_whole_avx2(s, x, at, v);
  }
  if (!lc_select_marked_avx2(s, x, count, bound, at, v)) return false;
  lc_learn(s, count);
  return true;
}
#endif
