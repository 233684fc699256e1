// Inputs of any supported dtype as float32.
#pragma once
#include "kernels.h"
#include "narrow.cuh"

#ifdef LC_X86
LC_AVX2 static inline int64_t lc_widen_avx2(const uint16_t* x, int dtype, int64_t m, float* out) {
  int64_t i = 0;
  for (; i + 8 <= m; i += 8) {
    const __m128i h = _mm_loadu_si128((const __m128i*)(x + i));
    const __m256 wide = dtype == LC_F16 ? _mm256_cvtph_ps(h)
                                        : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    _mm256_storeu_ps(out + i, wide);
  }
  return i;
}
#endif

// Elements first .. first+m-1 of x: x's own memory where it is float32, otherwise widened into `scratch` (m floats).
static inline const float* lc_input(const void* x, int dtype, int64_t first, int64_t m, float* scratch) {
  if (dtype == LC_F32) return (const float*)x + first;
  const uint16_t* narrow = (const uint16_t*)x + first;
  int64_t i = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) i = lc_widen_avx2(narrow, dtype, m, scratch);
#endif
  for (; i < m; ++i) scratch[i] = dtype == LC_F16 ? lc_f16_to_f32(narrow[i]) : lc_bf16_to_f32(narrow[i]);
  return scratch;
}
