// Philox for CPU kernels: eight counters at a time with AVX2.
#pragma once
#include "kernels.h"
#include "philox.cuh"

#ifdef LC_X86
// Four counters, one in each 64-bit lane (upper halves are garbage that vpmuludq ignores).
LC_AVX2 static inline void lc_philox4_avx2(__m256i& a, __m256i& b, __m256i& c, __m256i& d, uint64_t seed) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const __m256i p = _mm256_mul_epu32(a, m0), q = _mm256_mul_epu32(c, m1);
    a = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), b), _mm256_set1_epi32((int)k0));
    c = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), d), _mm256_set1_epi32((int)k1));
    b = q;
    d = p;
  }
}

// Words of elements 16j .. 16j+15 of a stream, in order, where counter = 4j.
LC_AVX2 static inline void lc_random_words16_avx2(uint64_t counter, uint32_t stream, uint32_t step, uint64_t seed,
                                                  __m256i words[2]) {
  const __m256i q = _mm256_add_epi64(_mm256_set1_epi64x((long long)counter), _mm256_setr_epi64x(0, 2, 1, 3));
  __m256i a = q, b = _mm256_srli_epi64(q, 32), c = _mm256_set1_epi32((int)stream), d = _mm256_set1_epi32((int)step);
  lc_philox4_avx2(a, b, c, d, seed);
  // low halves of (a, b, c, d): lanes 0 and 2 hold counters 0 and 1, lanes 1 and 3 counters 2 and 3
  const __m256i ab = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
  const __m256i cd = _mm256_blend_epi32(c, _mm256_slli_epi64(d, 32), 0xAA);
  words[0] = _mm256_unpacklo_epi64(ab, cd);
  words[1] = _mm256_unpackhi_epi64(ab, cd);
}

// Uniforms in [0, 1) of elements 16j .. 16j+15, where counter = 4j.
LC_AVX2 static inline void lc_uniform16_avx2(uint64_t counter, uint32_t stream, uint32_t step, uint64_t seed,
                                             __m256 u[2]) {
  __m256i words[2];
  lc_random_words16_avx2(counter, stream, step, seed, words);
  const __m256 ulp = _mm256_set1_ps(5.9604644775390625e-8f);
  for (int i = 0; i < 2; ++i) u[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(words[i], 8)), ulp);
}
#endif
