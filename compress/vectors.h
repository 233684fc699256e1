// AVX2 parts that the sign, ternary and rotation kernels share: summation of blocks, bits from elements and back.
#pragma once
#include "reduce.h"

#ifdef LC_X86
#define LC_MEMBER LC_AVX2 __attribute__((always_inline)) inline
#define LC_INLINE LC_MEMBER static

constexpr int64_t LC_MAX_TREE = 65536;  // elements of the largest block
constexpr int64_t LC_AHEAD = 384;       // elements fetched early: several arrays at once outrun the hardware

struct LcQuad {  // 32 consecutive elements
  __m256 v[4];
};

LC_INLINE void lc_prefetch32(const float* p) {
  _mm_prefetch((const char*)(p + LC_AHEAD), _MM_HINT_T0);
  _mm_prefetch((const char*)(p + LC_AHEAD + 16), _MM_HINT_T0);
}

LC_INLINE LcQuad lc_load32(const float* p) {
  return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24)}};
}

LC_INLINE __m256 lc_abs(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
LC_INLINE __m256 lc_below_zero(__m256 x) { return _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ); }

// tree_sum of ROWS quads that lie `stride` elements apart, depth first, so that few partial sums are alive.
template <int ROWS, class Leaf>
LC_INLINE LcQuad lc_tree(const Leaf& leaf, int64_t i, int64_t stride) {
  if constexpr (ROWS == 1) {
    return leaf(i);
  } else {
    LcQuad sum = lc_tree<ROWS / 2>(leaf, i, 2 * stride);
    const LcQuad odd = lc_tree<ROWS / 2>(leaf, i + stride, 2 * stride);
    for (int r = 0; r < 4; ++r) sum.v[r] = _mm256_add_ps(sum.v[r], odd.v[r]);
    return sum;
  }
}

LC_INLINE float lc_fold32(const LcQuad& q) {
  return lc_fold8(_mm256_add_ps(_mm256_add_ps(q.v[0], q.v[2]), _mm256_add_ps(q.v[1], q.v[3])));
}

// tree_sum of leaf(0), leaf(32), ...: `block` elements, a power of two from 64 to LC_MAX_TREE. Calls each leaf once.
template <class Leaf>
LC_AVX2 float lc_block_sum_avx2(const Leaf& leaf, int64_t block) {
  if (block == 256) return lc_fold32(lc_tree<8>(leaf, 0, 32));
  if (block == 128) return lc_fold32(lc_tree<4>(leaf, 0, 32));
  if (block == 64) return lc_fold32(lc_tree<2>(leaf, 0, 32));
  __m256 sums[LC_MAX_TREE / 64];
  const int64_t columns = block / 256;
  if (columns < 2) __builtin_unreachable();
  for (int64_t k = 0; k < columns; ++k) {
    const LcQuad q = lc_tree<8>(leaf, 32 * k, 32 * columns);
    for (int r = 0; r < 4; ++r) sums[4 * k + r] = q.v[r];
  }
  return lc_tree_sum_avx2(sums, 4 * columns);
}

// The sign bits of 32 elements, element 0 in bit 0.
LC_INLINE uint32_t lc_sign_bits(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256i ab = _mm256_packs_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b));
  const __m256i cd = _mm256_packs_epi32(_mm256_castps_si256(c), _mm256_castps_si256(d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (uint32_t)_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
}

LC_INLINE __m256i lc_load_word(const uint8_t* bits) {
  int word;
  memcpy(&word, bits, 4);
  return _mm256_set1_epi32(word);
}

// Bit 8r + lane of `word` in the top bit of each lane, which is the one that blendv looks at.
LC_INLINE __m256 lc_top_bits(__m256i word, int r) {
  const __m256i shift = _mm256_sub_epi32(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24), _mm256_set1_epi32(8 * r));
  return _mm256_castsi256_ps(_mm256_sllv_epi32(word, shift));
}
#endif
