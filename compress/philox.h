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
    a = _mm256_xor_si256(_mm256_xor_si256(_mm256_shuffle_epi32(q, 0xF5), b), _mm256_set1_epi32((int)k0));
    c = _mm256_xor_si256(_mm256_xor_si256(_mm256_shuffle_epi32(p, 0xF5), d), _mm256_set1_epi32((int)k1));
    b = q;
    d = p;
  }
}

// Words of elements 16j .. 16j+15 of a stream, in order, where counter = 4j.
LC_AVX2 static inline void lc_random_words16_avx2(uint64_t counter, uint32_t stream, uint32_t step, uint64_t seed,
                                                  __m256i words[2]) {
  const __m256i q = _mm256_add_epi64(_mm256_set1_epi64x((long long)counter), _mm256_setr_epi64x(0, 2, 1, 3));
  __m256i a = q, b = _mm256_shuffle_epi32(q, 0xF5), c = _mm256_set1_epi32((int)stream), d = _mm256_set1_epi32((int)step);
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

// One stream of noise, read many times: round keys are kept as vectors, and what depends only on the stream is done once.
struct LcPhilox {
  __m256i keys[20];
  __m256i first_a, first_b, first_d, second_p;  // after round 1, and the first product of round 2
  uint64_t seed;
  uint32_t stream, step;

  LC_AVX2 LcPhilox(uint64_t seed_, uint32_t stream_, uint32_t step_) : seed(seed_), stream(stream_), step(step_) {
    for (uint32_t round = 0; round < 10; ++round) {
      keys[2 * round] = _mm256_set1_epi32((int)((uint32_t)seed + round * 0x9E3779B9u));
      keys[2 * round + 1] = _mm256_set1_epi32((int)((uint32_t)(seed >> 32) + round * 0xBB67AE85u));
    }
    const uint64_t q = 0xCD9E8D57ull * stream;
    const uint32_t a = (uint32_t)(q >> 32) ^ (uint32_t)seed;
    first_a = _mm256_set1_epi32((int)a);
    first_b = _mm256_set1_epi32((int)(uint32_t)q);
    first_d = _mm256_xor_si256(_mm256_set1_epi32((int)step), keys[1]);
    second_p = _mm256_set1_epi64x((long long)(0xD2511F53ull * a));
  }

  // Words of two times four counters below 2^32, in the lower halves of 64-bit lanes. Two at a time, because one chain
  // of products would wait for itself.
  LC_AVX2 __attribute__((always_inline)) inline void rounds(const __m256i counters[2], __m256i s[2][4]) const {
    const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
    for (int k = 0; k < 2; ++k) {
      s[k][3] = _mm256_mul_epu32(counters[k], m0);
      s[k][1] = _mm256_mul_epu32(_mm256_xor_si256(upper(s[k][3]), first_d), m1);
    }
    for (int k = 0; k < 2; ++k) {
      s[k][0] = _mm256_xor_si256(upper(s[k][1]), _mm256_xor_si256(first_b, keys[2]));
      s[k][2] = _mm256_xor_si256(s[k][3], _mm256_xor_si256(upper(second_p), keys[3]));
      s[k][3] = second_p;
    }
    for (int round = 2; round < 10; ++round) {
      __m256i p[2], r[2];
      for (int k = 0; k < 2; ++k) p[k] = _mm256_mul_epu32(s[k][0], m0), r[k] = _mm256_mul_epu32(s[k][2], m1);
      for (int k = 0; k < 2; ++k) {
        s[k][0] = _mm256_xor_si256(upper(r[k]), _mm256_xor_si256(s[k][1], keys[2 * round]));
        s[k][2] = _mm256_xor_si256(upper(p[k]), _mm256_xor_si256(s[k][3], keys[2 * round + 1]));
        s[k][1] = r[k], s[k][3] = p[k];
      }
    }
  }

  LC_AVX2 __attribute__((always_inline)) static inline __m256i upper(__m256i x) {
    return _mm256_shuffle_epi32(x, 0xF5);
  }

  // Uniforms in [0, 1) of elements 32j .. 32j+31, where counter = 8j.
  LC_AVX2 __attribute__((always_inline)) inline void uniform32(uint64_t counter, __m256 u[4]) const {
    if (counter + 8 > 0x100000000ull) {
      lc_uniform16_avx2(counter, stream, step, seed, u);
      lc_uniform16_avx2(counter + 4, stream, step, seed, u + 2);
      return;
    }
    const __m256i q = _mm256_add_epi64(_mm256_set1_epi64x((long long)counter), _mm256_setr_epi64x(0, 2, 1, 3));
    const __m256 ulp = _mm256_set1_ps(5.9604644775390625e-8f);
    const __m256i counters[2] = {q, _mm256_add_epi64(q, _mm256_set1_epi64x(4))};
    __m256i s[2][4];
    rounds(counters, s);
    for (int k = 0; k < 2; ++k) {
      const __m256i ab = _mm256_blend_epi32(s[k][0], _mm256_slli_epi64(s[k][1], 32), 0xAA);
      const __m256i cd = _mm256_blend_epi32(s[k][2], _mm256_slli_epi64(s[k][3], 32), 0xAA);
      const __m256i first = _mm256_srli_epi32(_mm256_unpacklo_epi64(ab, cd), 8);
      const __m256i second = _mm256_srli_epi32(_mm256_unpackhi_epi64(ab, cd), 8);
      u[2 * k] = _mm256_mul_ps(_mm256_cvtepi32_ps(first), ulp);
      u[2 * k + 1] = _mm256_mul_ps(_mm256_cvtepi32_ps(second), ulp);
    }
  }
};
#endif
