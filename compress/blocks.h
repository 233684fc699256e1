// Parts of the block quantizers: reading the input, absolute maximum, writing decoded values.
#pragma once
#include "kernels.h"
#include "numbers.cuh"

enum { LC_SATURATED = 8 };  // codec.py

// Blocks up to this size are encoded by kernels; a block and its corrected copy then stay in the first-level cache.
constexpr int LC_MAX_BLOCK = 4096;
constexpr int LC_SEGMENT = 2048;  // elements handled at a time

// What is encoded: x, or decay * residual + x.
struct LcSource {
  const void* x;
  int32_t dtype;
  const float* residual;
  float decay;
};

// One thread's share of blocks: whole bytes of codes for every width, and enough work to pay for a thread.
static inline int64_t lc_block_grain(int64_t block) { return ((16384 + block - 1) / block + 7) / 8 * 8; }

static inline float lc_input(const LcSource& s, int64_t i) {
  const float x = s.dtype == LC_F32    ? ((const float*)s.x)[i]
                  : s.dtype == LC_BF16 ? lc_bf16_to_f32(((const uint16_t*)s.x)[i])
                                       : lc_f16_to_f32(((const uint16_t*)s.x)[i]);
  if (!s.residual) return x;
  return (s.decay == 1.0f ? s.residual[i] : s.decay * s.residual[i]) + x;
}

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

LC_AVX2_INLINE __m256 lc_input8_avx2(const LcSource& s, int64_t i) {
  __m256 x;
  if (s.dtype == LC_F32) {
    x = _mm256_loadu_ps((const float*)s.x + i);
  } else {
    const __m128i half = _mm_loadu_si128((const __m128i*)((const uint16_t*)s.x + i));
    x = s.dtype == LC_F16 ? _mm256_cvtph_ps(half)
                          : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  if (!s.residual) return x;
  const __m256 r = _mm256_loadu_ps(s.residual + i);
  return _mm256_add_ps(s.decay == 1.0f ? r : _mm256_mul_ps(_mm256_set1_ps(s.decay), r), x);
}

// Elements [begin, begin + count) as float32: in place where they already are, else in `buffer`. count % 8 == 0.
LC_AVX2 static inline const float* lc_view_avx2(const LcSource& s, int64_t begin, int count, float* buffer) {
  if (s.dtype == LC_F32 && !s.residual) return (const float*)s.x + begin;
  for (int i = 0; i < count; i += 8) _mm256_storeu_ps(buffer + i, lc_input8_avx2(s, begin + i));
  return buffer;
}

LC_AVX2_INLINE int lc_max8_avx2(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}

// Bits of the absolute maximum; at least LC_INFINITY_BITS where something is not finite. count % 32 == 0.
LC_AVX2_INLINE uint32_t lc_absmax_bits_avx2(const float* p, int count) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int i = 0; i < count; i += 32)
    for (int j = 0; j < 4; ++j)
      m[j] = _mm256_max_epi32(m[j], _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(p + i + 8 * j)), mask));
  return (uint32_t)lc_max8_avx2(_mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
}

template <LcEmit mode>
LC_AVX2_INLINE void lc_emit8_avx2(float* out, __m256 value, __m256 weight) {
  if (mode == LC_STORE) _mm256_storeu_ps(out, value);
  if (mode == LC_STREAM) _mm256_stream_ps(out, value);
  if (mode == LC_ADD) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), value));
  if (mode == LC_ADD_WEIGHTED) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_mul_ps(weight, value)));
}
#endif
