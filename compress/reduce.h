// tree_sum, the one order of summation (packing.py): pad with zeros to a power of two, then fold halves.
#pragma once
#include "kernels.h"

static inline int64_t lc_next_pow2(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Sum of get(0..n-1). scratch: lc_next_pow2(n) / 2 floats (at least 1).
template <class Get>
static inline float lc_tree_sum(const Get& get, int64_t n, float* scratch) {
  if (n <= 1) return n == 1 ? get((int64_t)0) : 0.0f;
  int64_t width = lc_next_pow2(n) / 2;
  for (int64_t i = 0; i < width; ++i) scratch[i] = get(i) + (i + width < n ? get(i + width) : 0.0f);
  while (width > 1) {
    width /= 2;
    for (int64_t i = 0; i < width; ++i) scratch[i] += scratch[i + width];
  }
  return scratch[0];
}

#ifdef LC_X86
// The same for eight lanes: elements 8i..8i+7 are vector i.
LC_AVX2 static inline float lc_fold8(__m256 v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}

LC_AVX2 static inline __m256 lc_fold_8_vectors(const __m256* v, int64_t step) {
  const __m256 a = _mm256_add_ps(_mm256_add_ps(v[0], v[4 * step]), _mm256_add_ps(v[2 * step], v[6 * step]));
  const __m256 b = _mm256_add_ps(_mm256_add_ps(v[step], v[5 * step]), _mm256_add_ps(v[3 * step], v[7 * step]));
  return _mm256_add_ps(a, b);
}

// tree_sum of 8 * width elements held as vectors; width is a power of two. Destroys v.
LC_AVX2 static inline float lc_tree_sum_avx2(__m256* v, int64_t width) {
  for (; width >= 8; width /= 8)
    for (int64_t i = 0; i < width / 8; ++i) v[i] = lc_fold_8_vectors(v + i, width / 8);
  for (; width > 1; width /= 2)
    for (int64_t i = 0; i < width / 2; ++i) v[i] = _mm256_add_ps(v[i], v[i + width / 2]);
  return lc_fold8(v[0]);
}
#endif
