// Kernels of sign.py: one bit per element and a scale per block.
#include <cmath>

#include "input.h"
#include "philox.h"
#include "ranges.h"
#include "sign.cuh"
#include "vectors.h"

namespace {

enum { L1 = LC_SIGN_L1, L2 = LC_SIGN_L2, TWO_MEANS = LC_SIGN_TWO_MEANS, NONE = LC_SIGN_NONE };
constexpr int64_t MAX_BLOCK = 16384;  // sign.MAX_BLOCK

// A unit is what one call encodes: a block, or as many small blocks as fill a byte of bits.
struct Layout {
  uint8_t* scales;
  uint8_t* bits;
  int64_t n, block;
  int kind;

  int64_t unit() const { return block < 8 ? 8 : block; }
  int64_t units() const { return (n + unit() - 1) / unit(); }
  int64_t scale_bytes() const { return kind == NONE ? 0 : kind == TWO_MEANS ? 8 : 4; }
  uint8_t* scale_at(int64_t element) const {
    return scales + (element >> __builtin_ctzll((uint64_t)block)) * scale_bytes();
  }
  int64_t size(int64_t first) const { return n - first < unit() ? n - first : unit(); }
};

// Sums of one block: of |x| or x^2 in `a`; for two means of the elements >= 0 in `a` and of those < 0 in `b`.
struct Sums {
  float a, b;
};

bool bit_at(const uint8_t* bits, int64_t i) { return bits[i / 8] >> (i % 8) & 1; }

void write_bits(const float* p, int64_t m, uint8_t* bits, int64_t offset) {
  for (int64_t i = 0; i < m; ++i) {
    const uint8_t mask = (uint8_t)(1u << ((offset + i) % 8));
    uint8_t& byte = bits[(offset + i) / 8];
    byte = (uint8_t)(lc_finite(p[i]) && p[i] < 0 ? byte | mask : byte & ~mask);
  }
}

void clear_bits(int64_t m, uint8_t* bits, int64_t offset) {
  for (int64_t i = 0; i < m; ++i) bits[(offset + i) / 8] &= (uint8_t)~(1u << ((offset + i) % 8));
}

Sums sums_portable(const float* q, int64_t m, int kind) {
  float scratch[MAX_BLOCK / 2];
  if (kind == L1) return {lc_tree_sum([q](int64_t i) { return std::fabs(q[i]); }, m, scratch), 0};
  if (kind == L2) return {lc_tree_sum([q](int64_t i) { return q[i] * q[i]; }, m, scratch), 0};
  if (kind == NONE) return {0, 0};
  const float plus = lc_tree_sum([q](int64_t i) { return q[i] < 0 ? 0.0f : q[i]; }, m, scratch);
  return {plus, lc_tree_sum([q](int64_t i) { return q[i] < 0 ? q[i] : 0.0f; }, m, scratch)};
}

// Scales of a block of m elements from its sums and the number of its negative elements.
void write_scales(Sums sums, int64_t m, int64_t negative, float factor, int kind, uint8_t* scale) {
  if (kind == NONE) return;
  if (kind == TWO_MEANS) {
    lc_store_float(scale, lc_sign_mean_plus(sums.a, (uint32_t)(m - negative), factor));
    lc_store_float(scale + 4, lc_sign_mean_minus(sums.b, (uint32_t)negative, factor));
    return;
  }
  lc_store_float(scale, lc_sign_scale(sums.a, (float)m, factor, kind));
}

int64_t count_bits(const uint8_t* bits, int64_t offset, int64_t m) {
  int64_t count = 0;
  for (int64_t i = offset; i < offset + m; ++i) count += bit_at(bits, i);
  return count;
}

void write_zero_block(int64_t m, int kind, uint8_t* scale, uint8_t* bits, int64_t offset) {
  clear_bits(m, bits, offset);
  memset(scale, 0, kind == TWO_MEANS ? 8 : 4);
}

int encode_block_portable(const float* p, int64_t m, int kind, uint8_t* scale, uint8_t* bits, int64_t offset) {
  float absmax, clean[MAX_BLOCK];
  const int flags = lc_survey(p, m, &absmax);
  if (kind != NONE && !(absmax >= LC_TINY)) {
    write_zero_block(m, kind, scale, bits, offset);
    return flags;
  }
  const float factor = lc_range_factor(absmax);
  const float* q = p;
  if (flags || factor != 1) lc_clean(p, m, factor, clean), q = clean;
  write_bits(p, m, bits, offset);
  write_scales(sums_portable(q, m, kind), m, count_bits(bits, offset, m), factor, kind, scale);
  return flags;
}

int encode_unit_portable(const float* p, int64_t m, int64_t block, int kind, uint8_t* scale, uint8_t* bits) {
  const int64_t step = kind == TWO_MEANS ? 8 : 4;
  int flags = 0;
  bits[(m - 1) / 8] = 0;  // unused bits of the last byte
  for (int64_t i = 0; i < m; i += block, scale += step)
    flags |= encode_block_portable(p + i, m - i < block ? m - i : block, kind, scale, bits, i);
  return flags;
}

void block_values(const uint8_t* scale, int kind, float value[2]) {
  value[0] = kind == NONE ? 1.0f : lc_load_float(scale);
  value[1] = kind == TWO_MEANS ? lc_load_float(scale + 4) : -value[0];
}

#ifdef LC_X86
// The leaves of a summation tree: the bits of 32 elements are stored, what is to be summed is returned.
template <int KIND>
LC_INLINE LcQuad terms(const LcQuad& x, uint8_t* bits) {
  LcQuad negative, sum;
  for (int r = 0; r < 4; ++r) {
    negative.v[r] = lc_below_zero(x.v[r]);
    sum.v[r] = KIND == L1          ? lc_abs(x.v[r])
               : KIND == L2        ? _mm256_mul_ps(x.v[r], x.v[r])
               : KIND == TWO_MEANS ? _mm256_andnot_ps(negative.v[r], x.v[r])
                                   : _mm256_sub_ps(x.v[r], x.v[r]);  // 0, or NaN where x is not finite
  }
  const uint32_t word = lc_sign_bits(negative.v[0], negative.v[1], negative.v[2], negative.v[3]);
  memcpy(bits, &word, 4);
  return sum;
}

template <int KIND>
struct Direct {
  const float* p;
  uint8_t* bits;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    lc_prefetch32(p + i);
    return terms<KIND>(lc_load32(p + i), bits + i / 8);
  }
};

// p = decay * residual + x, kept in `p` for the residual to come. Decay 1.0 multiplies too: that is exact.
template <int KIND>
struct Corrected {
  const float *x, *residual;
  float decay;
  float* p;
  uint8_t* bits;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    lc_prefetch32(x + i);  // the residual's next elements are fetched by subtract_avx2
    LcQuad sum = lc_load32(residual + i);
    for (int r = 0; r < 4; ++r) {
      const __m256 decayed = _mm256_mul_ps(_mm256_set1_ps(decay), sum.v[r]);
      sum.v[r] = _mm256_add_ps(decayed, _mm256_loadu_ps(x + i + 8 * r));
      _mm256_store_ps(p + i + 8 * r, sum.v[r]);
    }
    return terms<KIND>(sum, bits + i / 8);
  }
};

struct NegativePart {
  const float* p;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    LcQuad x = lc_load32(p + i);
    for (int r = 0; r < 4; ++r) x.v[r] = _mm256_and_ps(lc_below_zero(x.v[r]), x.v[r]);
    return x;
  }
};

// `p`: the elements of the leaves in memory, valid once those have been visited.
template <int KIND, class Leaf>
LC_INLINE Sums sums_avx2(const Leaf& leaf, const float* p, int64_t block) {
  const float a = lc_block_sum_avx2(leaf, block);
  return {a, KIND == TWO_MEANS ? lc_block_sum_avx2(NegativePart{p}, block) : 0.0f};
}

// Whether these sums prove that every element is finite and the block needs no range factor.
template <int KIND>
bool proves_ordinary(Sums s, int64_t block) {
  if (KIND == NONE) return s.a == 0;
  if (KIND == TWO_MEANS) s.a -= s.b;
  const float low = KIND == L2 ? 0x1p-79f : 0x1p-39f, high = KIND == L2 ? 0x1p80f : 0x1p39f;
  return s.a >= low * (float)block && s.a < high;
}

LC_AVX2 int64_t popcount(const uint8_t* bits, int64_t block) {
  int64_t count = 0;
  for (int64_t i = 0; i < block / 64; ++i) {
    uint64_t word;
    memcpy(&word, bits + 8 * i, 8);
    count += __builtin_popcountll(word);
  }
  return count;
}

template <int KIND>
LC_AVX2 __attribute__((noinline)) int encode_odd_block_avx2(const float* p, int64_t block, uint8_t* scale,
                                                             uint8_t* bits) {
  float absmax, clean[MAX_BLOCK];
  const int flags = lc_survey(p, block, &absmax);
  if (KIND != NONE && !(absmax >= LC_TINY)) {
    write_zero_block(block, KIND, scale, bits, 0);
    return flags;
  }
  const float factor = lc_range_factor(absmax);
  lc_clean(p, block, factor, clean);
  const Sums sums = sums_avx2<KIND>(Direct<KIND>{clean, bits}, clean, block);
  if (factor < 1) write_bits(p, block, bits, 0);  // scaled elements may have become 0
  write_scales(sums, block, KIND == TWO_MEANS ? popcount(bits, block) : 0, factor, KIND, scale);
  return flags;
}

template <int KIND, class Leaf>
LC_INLINE int encode_block_avx2(const Leaf& leaf, const float* p, int64_t block, uint8_t* scale, uint8_t* bits) {
  const Sums sums = sums_avx2<KIND>(leaf, p, block);
  if (!proves_ordinary<KIND>(sums, block)) return encode_odd_block_avx2<KIND>(p, block, scale, bits);
  write_scales(sums, block, KIND == TWO_MEANS ? popcount(bits, block) : 0, 1.0f, KIND, scale);
  return 0;
}

template <int KIND>
LC_AVX2 int encode_direct_avx2(const float* p, int64_t block, uint8_t* scale, uint8_t* bits) {
  return encode_block_avx2<KIND>(Direct<KIND>{p, bits}, p, block, scale, bits);
}

template <int KIND>
LC_AVX2 int encode_corrected_avx2(const float* x, const float* residual, float decay, float* p, int64_t block,
                                  uint8_t* scale, uint8_t* bits) {
  return encode_block_avx2<KIND>(Corrected<KIND>{x, residual, decay, p, bits}, p, block, scale, bits);
}

// out = p - decoded.
template <bool STREAM>
LC_AVX2 void subtract_avx2(const float* p, int64_t m, const float value[2], const float* next, float* out) {
  const __m256 plus = _mm256_set1_ps(value[0]), minus = _mm256_set1_ps(value[1]);
  for (int64_t i = 0; i < m; i += 8) {
    if (i % 32 == 0) lc_prefetch32(next + i);
    const __m256 v = _mm256_load_ps(p + i), decoded = _mm256_blendv_ps(plus, minus, lc_below_zero(v));
    STREAM ? _mm256_stream_ps(out + i, _mm256_sub_ps(v, decoded)) : _mm256_storeu_ps(out + i, _mm256_sub_ps(v, decoded));
  }
}

enum Use { WRITE, STREAM, ADD };

// out = decoded, or out += decoded; m is a multiple of 32.
template <int USE>
LC_AVX2 void decode_avx2(const uint8_t* bits, int64_t m, const float value[2], float* out) {
  const __m256 plus = _mm256_set1_ps(value[0]), minus = _mm256_set1_ps(value[1]);
  for (int64_t i = 0; i < m; i += 32) {
    const __m256i word = lc_load_word(bits + i / 8);
    if (USE == ADD) lc_prefetch32(out + i);
    for (int r = 0; r < 4; ++r) {
      float* at = out + i + 8 * r;
      __m256 v = _mm256_blendv_ps(plus, minus, lc_top_bits(word, r));
      if (USE == ADD) v = _mm256_add_ps(_mm256_loadu_ps(at), v);
      if (USE == STREAM)
        _mm256_stream_ps(at, v);
      else
        _mm256_storeu_ps(at, v);
    }
  }
}
#endif

bool fast(int64_t m, int64_t block) { return lc_active_level >= LC_LEVEL_AVX2 && m == block && block >= 64; }

int encode_unit(const float* p, int64_t m, const Layout& to, int64_t first) {
  uint8_t* scale = to.scale_at(first);
  uint8_t* bits = to.bits + first / 8;
#ifdef LC_X86
  if (fast(m, to.block)) {
    const auto run = to.kind == L1          ? encode_direct_avx2<L1>
                     : to.kind == L2        ? encode_direct_avx2<L2>
                     : to.kind == TWO_MEANS ? encode_direct_avx2<TWO_MEANS>
                                            : encode_direct_avx2<NONE>;
    return run(p, m, scale, bits);
  }
#endif
  return encode_unit_portable(p, m, to.block, to.kind, scale, bits);
}

// out = weight * decoded (add: out += that) for `units` of the layout.
void decode_unit(const Layout& from, int64_t first, float weight, bool add, bool stream, float* out) {
  const int64_t m = from.size(first);
  float value[2];
#ifdef LC_X86
  if (fast(m, from.block)) {
    block_values(from.scale_at(first), from.kind, value);
    if (weight != 1) value[0] *= weight, value[1] *= weight;
    const uint8_t* bits = from.bits + first / 8;
    if (add) return decode_avx2<ADD>(bits, m, value, out + first);
    return stream ? decode_avx2<STREAM>(bits, m, value, out + first)
                  : decode_avx2<WRITE>(bits, m, value, out + first);
  }
#endif
  for (int64_t i = first; i < first + m; ++i) {
    if (i == first || i % from.block == 0) {
      block_values(from.scale_at(i), from.kind, value);
      if (weight != 1) value[0] *= weight, value[1] *= weight;
    }
    const float v = value[bit_at(from.bits, i)];
    out[i] = add ? out[i] + v : v;
  }
}

void decode_all(const Layout& from, float weight, bool add, float* out, int threads) {
  const bool stream = lc_streams(out, from.n);
  lc_parallel(from.units(), lc_thread_grain(from.unit()), threads, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) decode_unit(from, u * from.unit(), weight, add, stream, out);
    lc_stream_fence();
    return 0;
  });
}

int feedback_unit(const float* x, const float* residual, float decay, const Layout& to, int64_t first, bool stream,
                  float* p, float* candidate) {
  const int64_t m = to.size(first);
  float value[2];
  int flags;
#ifdef LC_X86
  if (fast(m, to.block)) {
    uint8_t* scale = to.scale_at(first);
    const auto run = to.kind == L1          ? encode_corrected_avx2<L1>
                     : to.kind == L2        ? encode_corrected_avx2<L2>
                     : to.kind == TWO_MEANS ? encode_corrected_avx2<TWO_MEANS>
                                            : encode_corrected_avx2<NONE>;
    flags = run(x + first, residual + first, decay, p, m, scale, to.bits + first / 8);
    block_values(scale, to.kind, value);
    (stream && !flags ? subtract_avx2<true> : subtract_avx2<false>)(p, m, value, residual + first, candidate + first);
  } else
#endif
  {
    lc_correct(x + first, residual + first, decay, m, p);
    flags = encode_unit_portable(p, m, to.block, to.kind, to.scale_at(first), to.bits + first / 8);
    for (int64_t i = 0; i < m; ++i) {
      if (i % to.block == 0) block_values(to.scale_at(first + i), to.kind, value);
      candidate[first + i] = p[i] - value[bit_at(to.bits, first + i)];
    }
  }
  for (int64_t i = 0; flags && i < m; ++i)
    if (!lc_finite(p[i])) candidate[first + i] = 0.0f;
  return flags;
}

}  // namespace

LC_API int32_t lc_sign_encode(const void* x, int32_t dtype, uint8_t* scales, uint8_t* bits, int64_t n, int64_t block,
                              int32_t kind, int32_t threads) {
  const Layout to{scales, bits, n, block, kind};
  lc_zero_padding(bits, (n + 7) / 8);
  return lc_parallel(to.units(), lc_thread_grain(to.unit()), threads, [&](int64_t begin, int64_t end) {
    float scratch[MAX_BLOCK];
    int flags = 0;
    for (int64_t u = begin; u < end; ++u) {
      const int64_t first = u * to.unit(), m = to.size(first);
      flags |= encode_unit(lc_input(x, dtype, first, m, scratch), m, to, first);
    }
    return flags;
  });
}

LC_API int32_t lc_sign_feedback(const float* x, const float* residual, float* candidate, float decay, uint8_t* scales,
                                uint8_t* bits, int64_t n, int64_t block, int32_t kind, int32_t threads) {
  const Layout to{scales, bits, n, block, kind};
  const bool stream = candidate != x && candidate != residual && lc_streams(candidate, n);
  lc_zero_padding(bits, (n + 7) / 8);
  return lc_parallel(to.units(), lc_thread_grain(to.unit()), threads, [&](int64_t begin, int64_t end) {
    alignas(32) float p[MAX_BLOCK];
    int flags = 0;
    for (int64_t u = begin; u < end; ++u)
      flags |= feedback_unit(x, residual, decay, to, u * to.unit(), stream, p, candidate);
    lc_stream_fence();
    return flags;
  });
}

LC_API int32_t lc_sign_decode(uint8_t* scales, uint8_t* bits, float* out, int64_t n, int64_t block, int32_t kind,
                              int32_t threads) {
  decode_all({scales, bits, n, block, kind}, 1.0f, false, out, threads);
  return 0;
}

LC_API int32_t lc_sign_decode_add(uint8_t* scales, uint8_t* bits, float* acc, float weight, int64_t n, int64_t block,
                                  int32_t kind, int32_t threads) {
  decode_all({scales, bits, n, block, kind}, weight, true, acc, threads);
  return 0;
}

// ---- StoSign: the sign of x plus noise of size G. bound: G, one number or one for each element.

namespace {

struct Noise {
  const float* bound;
  int64_t bounds;
  uint64_t seed;
  uint32_t stream, step;

  float at(int64_t i) const { return bounds == 1 ? bound[0] : bound[i]; }
};

// Elements first .. first+m-1, m <= 8, first % 8 == 0: one byte of bits.
int stosign8(const float* p, int64_t m, const Noise& noise, int64_t first, uint8_t* byte) {
  uint32_t words[8];
  lc_philox((uint64_t)first / 4, noise.stream, noise.step, noise.seed, words);
  lc_philox((uint64_t)first / 4 + 1, noise.stream, noise.step, noise.seed, words + 4);
  int bits = 0, flags = 0;
  for (int64_t i = 0; i < m; ++i) {
    const uint32_t magnitude = lc_bits(p[i]) & 0x7FFFFFFFu;
    if (magnitude >= 0x7F800000u) flags |= magnitude > 0x7F800000u ? LC_HAS_NAN : LC_HAS_INF;
    const float v = magnitude >= 0x7F800000u ? 0.0f : p[i], bound = noise.at(first + i);
    if (std::fabs(v) > bound) flags |= LC_SATURATED;
    bits |= (int)(v + bound * (2.0f * lc_uniform(words[i]) - 1.0f) < 0) << i;
  }
  *byte = (uint8_t)bits;
  return flags;
}

#ifdef LC_X86
// 16 elements; false where one of them is not finite.
LC_INLINE bool stosign16_avx2(const float* p, const Noise& noise, int64_t first, uint8_t* bytes, __m256* saturated) {
  __m256 u[2];
  lc_uniform16_avx2((uint64_t)first / 4, noise.stream, noise.step, noise.seed, u);
  __m256 odd = _mm256_setzero_ps();
  for (int r = 0; r < 2; ++r) {
    const __m256 x = _mm256_loadu_ps(p + 8 * r), two = _mm256_set1_ps(2.0f), zero = _mm256_setzero_ps();
    const __m256 bound =
        noise.bounds == 1 ? _mm256_set1_ps(noise.bound[0]) : _mm256_loadu_ps(noise.bound + first + 8 * r);
    const __m256 n = _mm256_sub_ps(_mm256_mul_ps(two, u[r]), _mm256_set1_ps(1.0f));
    const __m256 shifted = _mm256_add_ps(x, _mm256_mul_ps(bound, n));
    bytes[r] = (uint8_t)_mm256_movemask_ps(_mm256_cmp_ps(shifted, zero, _CMP_LT_OQ));
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    *saturated = _mm256_or_ps(*saturated, _mm256_cmp_ps(magnitude, bound, _CMP_GT_OQ));
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(_mm256_sub_ps(x, x), zero, _CMP_NEQ_UQ));
  }
  return _mm256_movemask_ps(odd) == 0;
}

LC_AVX2 int stosign_avx2(const float* p, int64_t m, const Noise& noise, int64_t first, uint8_t* bytes, int64_t* done) {
  __m256 saturated = _mm256_setzero_ps();
  int flags = 0;
  int64_t i = 0;
  for (; i + 16 <= m; i += 16) {
    const __m256 before = saturated;
    if (stosign16_avx2(p + i, noise, first + i, bytes + i / 8, &saturated)) continue;
    saturated = before;
    for (int r = 0; r < 16; r += 8) flags |= stosign8(p + i + r, 8, noise, first + i + r, bytes + (i + r) / 8);
  }
  *done = i;
  return flags | (_mm256_movemask_ps(saturated) ? LC_SATURATED : 0);
}
#endif

constexpr int64_t STOSIGN_UNIT = 4096;

int stosign_unit(const float* p, int64_t m, const Noise& noise, int64_t first, uint8_t* bytes) {
  int64_t i = 0;
  int flags = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) flags = stosign_avx2(p, m, noise, first, bytes, &i);
#endif
  for (; i < m; i += 8) flags |= stosign8(p + i, m - i < 8 ? m - i : 8, noise, first + i, bytes + i / 8);
  return flags;
}

#ifdef LC_X86
template <bool ADD, bool WEIGHTED>
LC_AVX2 int64_t stosign_decode_avx2(const uint8_t* bits, const float* bound, int64_t bounds, float weight, int64_t begin,
                                    int64_t end, float* out) {
  const __m256 w = _mm256_set1_ps(weight), one = _mm256_set1_ps(bound[0]), sign = _mm256_set1_ps(-0.0f);
  int64_t i = begin;
  for (; i + 32 <= end; i += 32) {
    const __m256i word = lc_load_word(bits + i / 8);
    for (int r = 0; r < 4; ++r) {
      const __m256 g = bounds == 1 ? one : _mm256_loadu_ps(bound + i + 8 * r);
      __m256 v = _mm256_blendv_ps(g, _mm256_xor_ps(g, sign), lc_top_bits(word, r));
      if (WEIGHTED) v = _mm256_mul_ps(w, v);
      if (ADD) v = _mm256_add_ps(_mm256_loadu_ps(out + i + 8 * r), v);
      _mm256_storeu_ps(out + i + 8 * r, v);
    }
  }
  return i;
}
#endif

int stosign_decode_all(const uint8_t* bits, const float* bound, int64_t bounds, float weight, bool add, float* out,
                       int64_t n, int threads) {
  return lc_parallel(n, LC_THREAD_ELEMENTS, threads, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
#ifdef LC_X86
    if (lc_active_level >= LC_LEVEL_AVX2) {
      const auto run = !add          ? stosign_decode_avx2<false, false>
                       : weight == 1 ? stosign_decode_avx2<true, false>
                                     : stosign_decode_avx2<true, true>;
      i = run(bits, bound, bounds, weight, begin, end, out);
    }
#endif
    for (; i < end; ++i) {
      const float g = bounds == 1 ? bound[0] : bound[i], v = bit_at(bits, i) ? -g : g;
      out[i] = !add ? v : out[i] + (weight == 1 ? v : weight * v);
    }
    return 0;
  });
}

}  // namespace

LC_API int32_t lc_stosign_encode(const void* x, int32_t dtype, const float* bound, int64_t bounds, uint8_t* bits,
                                 int64_t n, uint64_t seed, uint32_t stream, uint32_t step, int32_t threads) {
  const Noise noise{bound, bounds, seed, stream, step};
  const int64_t used = (n + 7) / 8, units = (n + STOSIGN_UNIT - 1) / STOSIGN_UNIT;
  lc_zero_padding(bits, used);
  return lc_parallel(units, lc_thread_grain(STOSIGN_UNIT), threads, [&](int64_t begin, int64_t end) {
    float scratch[STOSIGN_UNIT];
    int flags = 0;
    for (int64_t first = begin * STOSIGN_UNIT; first < end * STOSIGN_UNIT && first < n; first += STOSIGN_UNIT) {
      const int64_t m = n - first < STOSIGN_UNIT ? n - first : STOSIGN_UNIT;
      flags |= stosign_unit(lc_input(x, dtype, first, m, scratch), m, noise, first, bits + first / 8);
    }
    return flags;
  });
}

LC_API int32_t lc_stosign_decode(const uint8_t* bits, const float* bound, int64_t bounds, float* out, int64_t n,
                                 int32_t threads) {
  return stosign_decode_all(bits, bound, bounds, 1.0f, false, out, n, threads);
}

LC_API int32_t lc_stosign_decode_add(const uint8_t* bits, const float* bound, int64_t bounds, float* acc, float weight,
                                     int64_t n, int32_t threads) {
  return stosign_decode_all(bits, bound, bounds, weight, true, acc, n, threads);
}
