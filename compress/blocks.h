// Parts of the block quantizers: reading the input, absolute maximum, writing decoded values.
#pragma once
#include "input.h"
#include "kernels.h"
#include "numbers.cuh"

enum { LC_SATURATED = 8 };  // codec.py

// Blocks up to this size are encoded by kernels; a block and its corrected copy then stay in the first-level cache.
constexpr int LC_MAX_BLOCK = 4096;
constexpr int LC_SEGMENT = 512;  // elements handled at a time: few, so that loading and computing overlap

// What is encoded: x, or decay * residual + x where there is a residual (then x is float32).
struct LcSource {
  const void* x;
  int32_t dtype;
  const float* residual;
  float decay;
};

// Elements [begin, begin + count) as float32: in place where they already are, else in `buffer`.
static inline const float* lc_view(const LcSource& s, int64_t begin, int64_t count, float* buffer) {
  if (!s.residual) return lc_input(s.x, s.dtype, begin, count, buffer);
  const float *x = (const float*)s.x + begin, *r = s.residual + begin;
  for (int64_t i = 0; i < count; ++i) buffer[i] = (s.decay == 1.0f ? r[i] : s.decay * r[i]) + x[i];
  return buffer;
}

// One thread's share of blocks: whole bytes of codes for every width, and enough work to pay for a thread.
static inline int64_t lc_block_grain(int64_t block) { return ((16384 + block - 1) / block + 7) / 8 * 8; }

// Replace NaN and infinities by zero and return the flags. bad[i] tells which ones, where given.
static inline int lc_clean(float* p, int count, bool* bad) {
  int flags = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = lc_magnitude(p[i]);
    const bool is_bad = magnitude >= LC_INFINITY_BITS;
    if (bad) bad[i] = is_bad;
    if (is_bad) flags |= magnitude > LC_INFINITY_BITS ? LC_HAS_NAN : LC_HAS_INF, p[i] = 0.0f;
  }
  return flags;
}

static inline float lc_absmax(const float* p, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = lc_magnitude(p[i]) > largest ? lc_magnitude(p[i]) : largest;
  return lc_float(largest);
}

// How decoded values leave: overwrite, overwrite past the caches, add, add times weight.
enum LcEmit { LC_STORE, LC_STREAM, LC_ADD, LC_ADD_WEIGHTED };

static inline LcEmit lc_emit_mode(const float* out, int64_t n, int add, float weight) {
  if (add) return weight == 1.0f ? LC_ADD : LC_ADD_WEIGHTED;
  return n * 4 >= LC_STREAM_BYTES && ((uintptr_t)out & 31) == 0 ? LC_STREAM : LC_STORE;
}

static inline void lc_emit(float* out, float value, LcEmit mode, float weight) {
  *out = mode <= LC_STREAM ? value : *out + (mode == LC_ADD ? value : weight * value);
}

#ifdef LC_X86
#define LC_AVX2_INLINE LC_AVX2 __attribute__((always_inline)) static inline

LC_AVX2_INLINE int lc_max8_avx2(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}

// Bits of the absolute maximum; at least LC_INFINITY_BITS where something is not finite. count % 32 == 0.
LC_AVX2_INLINE uint32_t lc_absmax_bits_avx2(const float* p, int64_t count) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < count; i += 32)
    for (int j = 0; j < 4; ++j)
      m[j] = _mm256_max_epi32(m[j], _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(p + i + 8 * j)), mask));
  return (uint32_t)lc_max8_avx2(_mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
}

// out = decay * residual + x, and the bits of its absolute maximum, in one pass. count % 32 == 0.
template <bool decays>
LC_AVX2_INLINE uint32_t lc_add_absmax_avx2(const float* x, const float* residual, float decay, int64_t count,
                                           float* out) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)), d = _mm256_set1_ps(decay);
  __m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < count; i += 32)
    for (int j = 0; j < 4; ++j) {
      __m256 r = _mm256_loadu_ps(residual + i + 8 * j);
      if (decays) r = _mm256_mul_ps(d, r);
      const __m256 p = _mm256_add_ps(r, _mm256_loadu_ps(x + i + 8 * j));
      _mm256_storeu_ps(out + i + 8 * j, p);
      m[j] = _mm256_max_epi32(m[j], _mm256_castps_si256(_mm256_and_ps(p, mask)));
    }
  return (uint32_t)lc_max8_avx2(_mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
}

// `blocks` whole blocks as float32, in place or in `buffer`, and the bits of their absolute maxima. Null where something
// is not finite: that is rare, and the portable code deals with it.
LC_AVX2 static inline const float* lc_prepare_avx2(const LcSource& s, int64_t begin, int64_t blocks, int64_t block,
                                                   float* buffer, uint32_t* absmax) {
  const float* p = buffer;
  uint32_t largest = 0;
  if (!s.residual) p = lc_input(s.x, s.dtype, begin, blocks * block, buffer);
  for (int64_t b = 0, at = 0; b < blocks; ++b, at += block) {
    const float *x = (const float*)s.x + begin + at, *r = s.residual + begin + at;
    absmax[b] = !s.residual       ? lc_absmax_bits_avx2(p + at, block)
                : s.decay == 1.0f ? lc_add_absmax_avx2<false>(x, r, 1.0f, block, buffer + at)
                                  : lc_add_absmax_avx2<true>(x, r, s.decay, block, buffer + at);
    largest = absmax[b] > largest ? absmax[b] : largest;
  }
  return largest < LC_INFINITY_BITS ? p : nullptr;
}

// Fetches 64 inputs that come next while others are computed; measured 1.2 times as fast.
LC_AVX2_INLINE void lc_prefetch64(const LcSource& s, int64_t i) {
  for (int j = 0; j < 64; j += 16) {
    if (s.dtype == LC_F32) _mm_prefetch((const char*)((const float*)s.x + i + j), _MM_HINT_T0);
    if (s.residual) _mm_prefetch((const char*)(s.residual + i + j), _MM_HINT_T0);
  }
}

// lc_block_scale and levels / absmax for eight blocks; both 0 for tiny blocks.
LC_AVX2_INLINE void lc_scales8_avx2(const uint32_t* absmax, float levels, float* scale, float* inverse) {
  const __m256 a = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)absmax)), q = _mm256_set1_ps(levels);
  const __m256 used = _mm256_cmp_ps(a, _mm256_set1_ps(LC_TINY), _CMP_GE_OQ);
  const __m256 s = _mm256_div_ps(a, q), top = _mm256_mul_ps(s, q);
  const __m256 overflows = _mm256_cmp_ps(top, _mm256_castsi256_ps(_mm256_set1_epi32(LC_INFINITY_BITS)), _CMP_EQ_OQ);
  const __m256 lowered = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(s), _mm256_castps_si256(overflows)));
  _mm256_storeu_ps(scale, _mm256_and_ps(lowered, used));
  _mm256_storeu_ps(inverse, _mm256_and_ps(_mm256_div_ps(q, a), used));
}

// Codes made in the cache go out past it where the body is large.
LC_AVX2_INLINE void lc_copy_out_avx2(uint8_t* out, const uint8_t* codes, int64_t bytes, bool stream) {
  if (!stream) {
    memcpy(out, codes, (size_t)bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256((__m256i*)(out + i), _mm256_load_si256((const __m256i*)(codes + i)));
}

// 16 or 8 bytes of 32 codes of 4 or 2 bits become one byte each; the halves of the result hold elements 0-3, 8-11,
// 16-19, 24-27 and the others. A 2-bit code stands in bits 0-1 or 2-3 of its byte.
template <int bits>
LC_AVX2_INLINE __m256i lc_spread32_avx2(const uint8_t* codes) {
  if (bits == 4) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13,  //
                                            2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes));
    const __m256i pairs = _mm256_shuffle_epi8(all, spread), upper = _mm256_srli_epi16(pairs, 4);
    return _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi16(0x000F)),
                           _mm256_and_si256(upper, _mm256_set1_epi16(0x0F00)));
  }
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6,  //
                                          1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7);
  const __m256i all = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)codes));
  const __m256i quads = _mm256_shuffle_epi8(all, spread), upper = _mm256_srli_epi16(quads, 4);
  return _mm256_or_si256(_mm256_and_si256(quads, _mm256_set1_epi32(0x00000C03)),
                         _mm256_and_si256(upper, _mm256_set1_epi32(0x0C030000)));
}

// Values of 32 codes in order, looked up in a table of the upper 16 bits of 16 floats whose lower bits are 0.
struct LcTable16 {
  alignas(16) uint8_t upper[16], lower[16];
  void set(int code, float value) {
    upper[code] = (uint8_t)(lc_bits(value) >> 24);
    lower[code] = (uint8_t)(lc_bits(value) >> 16);
  }
};

LC_AVX2_INLINE void lc_look_up32_avx2(__m256i spread, __m256i upper, __m256i lower, __m256 values[4]) {
  const __m256i high = _mm256_shuffle_epi8(upper, spread), low = _mm256_shuffle_epi8(lower, spread);
  const __m256i zero = _mm256_setzero_si256();
  const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  values[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, a));
  values[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, a));
  values[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, b));
  values[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, b));
}

LC_AVX2_INLINE __m256i lc_table_avx2(const uint8_t table[16]) {
  return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
}

template <LcEmit mode>
LC_AVX2_INLINE void lc_emit8_avx2(float* out, __m256 value, __m256 weight) {
  if (mode == LC_STORE) _mm256_storeu_ps(out, value);
  if (mode == LC_STREAM) _mm256_stream_ps(out, value);
  if (mode == LC_ADD) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), value));
  if (mode == LC_ADD_WEIGHTED) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_mul_ps(weight, value)));
}
#endif
