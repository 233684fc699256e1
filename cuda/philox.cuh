// Random numbers that every rank and device can regenerate: Philox4x32-10 (Random123), shared by C++ and CUDA.
// Element i of a uniform stream is word i % 4 of counter (i / 4, stream, step).
#ifndef LC_PHILOX_CUH
#define LC_PHILOX_CUH

#ifndef LC_FN
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define LC_FN __device__ __host__ static inline
#else
#define LC_FN static inline
#endif
#endif

#define LC_STREAM_NOISE 0x10000u       // + rank: private rounding noise
#define LC_STREAM_SIGNS 0x4841444Du    // Rademacher diagonal
#define LC_STREAM_INDICES 0x52414E44u  // index permutation
#define LC_STREAM_SKETCH 0x43534B48u   // count sketch

LC_FN void lc_philox(unsigned long long counter, unsigned int stream, unsigned int step, unsigned long long seed,
                     unsigned int out[4]) {
  unsigned int a = (unsigned int)counter, b = (unsigned int)(counter >> 32), c = stream, d = step;
  unsigned int k0 = (unsigned int)seed, k1 = (unsigned int)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned long long p = 0xD2511F53ull * a, q = 0xCD9E8D57ull * c;
    a = (unsigned int)(q >> 32) ^ b ^ k0;
    b = (unsigned int)q;
    c = (unsigned int)(p >> 32) ^ d ^ k1;
    d = (unsigned int)p;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

// Uniform in [0, 1), exact in float32.
LC_FN float lc_uniform(unsigned int word) { return (float)(word >> 8) * 5.9604644775390625e-8f; }

// MurmurHash3 finaliser.
LC_FN unsigned int lc_fmix32(unsigned int h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// pi(i), a random permutation of [0, n) with random access: balanced Feistel network of 2 * half_bits bits with cycle
// walking. keys: the 8 words of counters 0 and 1 of stream LC_STREAM_INDICES. half_bits: lc_permutation_bits(n).
LC_FN unsigned long long lc_permute(unsigned long long i, unsigned long long n, int half_bits,
                                    const unsigned int keys[8]) {
  const unsigned int mask = half_bits == 32 ? 0xFFFFFFFFu : (1u << half_bits) - 1u;
  do {
    unsigned int left = (unsigned int)(i >> half_bits), right = (unsigned int)i & mask;
    for (int round = 0; round < 8; ++round) {
      const unsigned int next = left ^ (lc_fmix32(right * 0x9E3779B1u + keys[round]) & mask);
      left = right;
      right = next;
    }
    i = ((unsigned long long)left << half_bits) | right;
  } while (i >= n);
  return i;
}

LC_FN int lc_permutation_bits(unsigned long long n) {
  int bits = 8;
  while (bits < 64 && ((n - 1) >> bits)) bits += 2;
  return bits / 2;
}

#endif
