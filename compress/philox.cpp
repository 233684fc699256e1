// Kernels of philox.py: random numbers for codecs that draw them as whole vectors.
#include "philox.h"

namespace {

constexpr int64_t GRAIN = 16384;  // draws that one thread should at least make; a multiple of 128

void uniform_portable(int64_t i, int64_t end, uint32_t stream, uint32_t step, uint64_t seed, float* out) {
  uint32_t words[4];
  for (; i < end; i += 4) {
    lc_philox((uint64_t)i / 4, stream, step, seed, words);
    for (int64_t j = i; j < end && j < i + 4; ++j) out[j] = lc_uniform(words[j - i]);
  }
}

#ifdef LC_X86
LC_AVX2 int64_t uniform_avx2(int64_t i, int64_t end, uint32_t stream, uint32_t step, uint64_t seed, float* out) {
  const LcPhilox philox(seed, stream, step);
  for (; i + 32 <= end; i += 32) {
    __m256 u[4];
    philox.uniform32((uint64_t)i / 4, u);
    for (int j = 0; j < 4; ++j) _mm256_storeu_ps(out + i + 8 * j, u[j]);
  }
  return i;
}
#endif

}  // namespace

// Elements 0 .. n-1 of a stream as uniforms in [0, 1).
LC_API int32_t lc_uniform_fill(float* out, int64_t n, uint32_t stream, uint32_t step, uint64_t seed, int32_t threads) {
  return lc_parallel(n, GRAIN, threads, [=](int64_t begin, int64_t end) {
#ifdef LC_X86
    if (lc_active_level >= LC_LEVEL_AVX2) begin = uniform_avx2(begin, end, stream, step, seed, out);
#endif
    uniform_portable(begin, end, stream, step, seed, out);
    return 0;
  });
}

// Random signs of elements 0 .. n-1.
LC_API int32_t lc_sign_fill(float* out, int64_t n, uint32_t step, uint64_t seed, int32_t threads) {
  return lc_parallel(n, GRAIN, threads, [=](int64_t begin, int64_t end) {
    uint32_t words[4];
    for (int64_t i = begin; i < end; ++i) {
      if (i % 128 == 0) lc_philox((uint64_t)i / 128, LC_STREAM_SIGNS, step, seed, words);
      out[i] = words[i / 32 % 4] >> (i % 32) & 1 ? -1.0f : 1.0f;
    }
    return 0;
  });
}

// out[i] = pi(at[i]), pi a random permutation of [0, n).
LC_API int32_t lc_permutation(const int64_t* at, int64_t* out, int64_t count, int64_t n, uint32_t step, uint64_t seed,
                              int32_t threads) {
  uint32_t keys[8];
  for (uint32_t q = 0; q < 2; ++q) lc_philox(q, LC_STREAM_INDICES, step, seed, keys + 4 * q);
  const int half = lc_permutation_bits((unsigned long long)n);
  return lc_parallel(count, GRAIN / 8, threads, [=, &keys](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      out[i] = (int64_t)lc_permute((unsigned long long)at[i], (unsigned long long)n, half, keys);
    return 0;
  });
}
