// One pass over a buffer: is everything finite (and scaled on the way), or its 64-bit fingerprint
// (lowcomm/sync/fingerprint.py).
#include "kernels.h"

namespace {

constexpr int64_t GRAIN = 1 << 16;

// Written so that compilers vectorize it: no branch in the loop.
template <class Bits>
inline int any_from(const Bits* x, int64_t n, Bits mask, Bits least) {
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits magnitude = x[i] & mask;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest >= least;
}

int any_nonfinite32(const int32_t* x, int64_t n) { return any_from<int32_t>(x, n, 0x7FFFFFFF, 0x7F800000); }

int any_nonfinite64(const int64_t* x, int64_t n) {
  return any_from<int64_t>(x, n, 0x7FFFFFFFFFFFFFFFLL, 0x7FF0000000000000LL);
}

#ifdef LC_X86
LC_AVX2 int any_nonfinite32_avx2(const int32_t* x, int64_t n) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    a = _mm256_max_epi32(a, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i*)(x + i))));
    b = _mm256_max_epi32(b, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i*)(x + i + 8))));
    c = _mm256_max_epi32(c, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i*)(x + i + 16))));
    d = _mm256_max_epi32(d, _mm256_and_si256(mask, _mm256_loadu_si256((const __m256i*)(x + i + 24))));
  }
  a = _mm256_max_epi32(_mm256_max_epi32(a, b), _mm256_max_epi32(c, d));
  const int bad = _mm256_movemask_epi8(_mm256_cmpgt_epi32(a, _mm256_set1_epi32(0x7F7FFFFF)));
  return bad != 0 || any_nonfinite32(x + i, n - i);
}
#endif

int any_nonfinite(const void* x, int64_t begin, int64_t stop, int64_t size) {
  if (size == 8) return any_nonfinite64((const int64_t*)x + begin, stop - begin);
#ifdef LC_X86
  if (lc_active_level == LC_LEVEL_AVX2) return any_nonfinite32_avx2((const int32_t*)x + begin, stop - begin);
#endif
  return any_nonfinite32((const int32_t*)x + begin, stop - begin);
}

// x *= factor; whether anything was not finite before.
int scale_nonfinite(float* x, int64_t n, float factor) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t bits;
    memcpy(&bits, x + i, 4);
    const int32_t magnitude = bits & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
    x[i] = x[i] * factor;
  }
  return largest >= 0x7F800000;
}

#ifdef LC_X86
LC_AVX2 int scale_nonfinite_avx2(float* x, int64_t n, float factor) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256 by = _mm256_set1_ps(factor);
  __m256i a = _mm256_setzero_si256(), b = a;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 u = _mm256_loadu_ps(x + i), v = _mm256_loadu_ps(x + i + 8);
    a = _mm256_max_epi32(a, _mm256_and_si256(mask, _mm256_castps_si256(u)));
    b = _mm256_max_epi32(b, _mm256_and_si256(mask, _mm256_castps_si256(v)));
    _mm256_storeu_ps(x + i, _mm256_mul_ps(u, by));
    _mm256_storeu_ps(x + i + 8, _mm256_mul_ps(v, by));
  }
  const __m256i largest = _mm256_max_epi32(a, b);
  const int bad = _mm256_movemask_epi8(_mm256_cmpgt_epi32(largest, _mm256_set1_epi32(0x7F7FFFFF)));
  return (scale_nonfinite(x + i, n - i, factor) | bad) != 0;
}
#endif

template <class Bits>
int kinds(const Bits* x, int64_t n, Bits mask, Bits infinity) {
  int flags = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits magnitude = x[i] & mask;
    if (magnitude >= infinity) flags |= magnitude == infinity ? LC_HAS_INF : LC_HAS_NAN;
  }
  return flags;
}

inline uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

uint64_t sum_of_words(const uint8_t* bytes, int64_t begin, int64_t stop) {
  uint64_t sum = 0;
  for (int64_t i = begin; i < stop; ++i) {
    uint64_t word;
    memcpy(&word, bytes + 8 * i, 8);
    sum += mix(word + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15ull);
  }
  return sum;
}

}  // namespace

// LC_HAS_NAN | LC_HAS_INF of n floats of 4 or 8 bytes.
LC_API int32_t lc_finite(const void* x, int64_t n, int64_t size, int32_t threads) {
  const int bad = lc_parallel(n, GRAIN, threads, [&](int64_t begin, int64_t stop) {
    return any_nonfinite(x, begin, stop, size);
  });
  if (!bad) return 0;
  if (size == 8) return kinds<int64_t>((const int64_t*)x, n, 0x7FFFFFFFFFFFFFFFLL, 0x7FF0000000000000LL);
  return kinds<int32_t>((const int32_t*)x, n, 0x7FFFFFFF, 0x7F800000);
}

// x *= factor for n floats, in one pass with the check; LC_HAS_NAN | LC_HAS_INF of x before. 0 < |factor| <= 1.
LC_API int32_t lc_scale_finite(float* x, int64_t n, float factor, int32_t threads) {
  const int bad = lc_parallel(n, GRAIN, threads, [=](int64_t begin, int64_t stop) {
#ifdef LC_X86
    if (lc_active_level == LC_LEVEL_AVX2) return scale_nonfinite_avx2(x + begin, stop - begin, factor);
#endif
    return scale_nonfinite(x + begin, stop - begin, factor);
  });
  return bad ? kinds<int32_t>((const int32_t*)x, n, 0x7FFFFFFF, 0x7F800000) : 0;  // scaling keeps NaN and infinity
}

// The sum over the 64-bit words of `count` bytes, the last one padded with zeros.
LC_API int32_t lc_fingerprint(const uint8_t* bytes, int64_t count, uint64_t* sum, int32_t threads) {
  const int64_t words = count / 8, tail = count % 8;
  uint64_t total = 0;
  lc_parallel(words, GRAIN, threads, [&](int64_t begin, int64_t stop) {
    const uint64_t part = sum_of_words(bytes, begin, stop);
    __atomic_fetch_add(&total, part, __ATOMIC_RELAXED);
    return 0;
  });
  if (tail) {
    uint8_t last[8] = {};
    memcpy(last, bytes + 8 * words, tail);
    uint64_t word;
    memcpy(&word, last, 8);
    total += mix(word + (uint64_t)(words + 1) * 0x9E3779B97F4A7C15ull);
  }
  *sum = total;
  return 0;
}
