// Kernels of ternary.py. A block is first turned into two bit arrays, which elements are kept and which of those are
// negative; five blocks, a group, fill whole bytes of either packing.
#include <cmath>

#include "input.h"
#include "philox.h"
#include "ranges.h"
#include "ternary.cuh"
#include "vectors.h"

namespace {

constexpr int64_t MAX_BLOCK = 16384;  // sign.MAX_BLOCK
constexpr int64_t GROUP_BLOCKS = 5;
constexpr int64_t BIT_BYTES = GROUP_BLOCKS * MAX_BLOCK / 8 + 32;  // and what vector loads read past the end
constexpr int POWERS[5] = {1, 3, 9, 27, 81};

struct Layout {
  uint8_t* scales;
  uint8_t* codes;
  int64_t n, block;
  bool two_bit;

  int64_t group() const { return GROUP_BLOCKS * block; }
  int64_t groups() const { return (n + group() - 1) / group(); }
  int64_t code_bytes(int64_t elements) const { return two_bit ? (elements + 3) / 4 : (elements + 4) / 5; }
  uint8_t* codes_at(int64_t first) const { return codes + code_bytes(first); }  // first: of a group
  uint8_t* scale_at(int64_t element) const { return scales + (element >> __builtin_ctzll((uint64_t)block)) * 4; }
  int64_t size(int64_t first, int64_t most) const { return n - first < most ? n - first : most; }
};

// How the kept elements are chosen.
struct Rule {
  bool stochastic = false;
  float clip = 0, shared_scale = 0;  // 0: none
  uint64_t seed = 0;
  uint32_t stream = 0, step = 0;
};

struct Bits {
  alignas(32) uint8_t kept[BIT_BYTES];
  alignas(32) uint8_t negative[BIT_BYTES];
};

bool bit_at(const uint8_t* bits, int64_t i) { return bits[i / 8] >> (i % 8) & 1; }
void set_bit(uint8_t* bits, int64_t i) { bits[i / 8] |= (uint8_t)(1u << (i % 8)); }

void set_trit(Bits& bits, int64_t i, bool negative) {
  set_bit(bits.kept, i);
  if (negative) set_bit(bits.negative, i);
}

// ---- encoding one block: its bits begin at bit `at` and are 0 before; returns the scale.

float choose_deterministic(const float* q, int64_t m, Bits& bits, int64_t at) {
  float scratch[MAX_BLOCK / 2];
  const float total = lc_tree_sum([q](int64_t i) { return std::fabs(q[i]); }, m, scratch);
  const float threshold = lc_ternary_threshold(total, (float)m);
  int64_t kept = 0;
  for (int64_t i = 0; i < m; ++i)
    if (std::fabs(q[i]) > threshold) set_trit(bits, at + i, q[i] < 0), ++kept;
  const auto kept_only = [=](int64_t i) { return std::fabs(q[i]) > threshold ? std::fabs(q[i]) : 0.0f; };
  return lc_ternary_mean(lc_tree_sum(kept_only, m, scratch), (uint32_t)kept);
}

// Clamp to +-clip standard deviations.
void clip_block(const float* p, int64_t m, float clip, float absmax, float* out) {
  float scratch[MAX_BLOCK / 2];
  const float factor = lc_range_factor(absmax);
  const float mean = lc_tree_sum([=](int64_t i) { return factor * p[i]; }, m, scratch) / (float)m;
  const auto square = [=](int64_t i) { return (factor * p[i] - mean) * (factor * p[i] - mean); };
  const float limit = lc_ternary_limit(clip, lc_tree_sum(square, m, scratch), (float)m, factor);
  for (int64_t i = 0; i < m; ++i) out[i] = lc_ternary_clip(p[i], limit);
}

void choose_stochastic(const float* p, int64_t m, int64_t first, float scale, const Rule& rule, Bits& bits,
                       int64_t at) {
  const float inverse = 1.0f / scale;
  uint32_t words[4];
  for (int64_t i = 0; i < m; ++i) {
    if (i % 4 == 0) lc_philox((uint64_t)(first + i) / 4, rule.stream, rule.step, rule.seed, words);
    if (lc_uniform(words[i % 4]) < std::fabs(p[i]) * inverse) set_trit(bits, at + i, p[i] < 0);
  }
}

#ifdef LC_X86
struct Magnitudes {
  const float* p;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    lc_prefetch32(p + i);
    LcQuad x = lc_load32(p + i);
    for (int r = 0; r < 4; ++r) x.v[r] = lc_abs(x.v[r]);
    return x;
  }
};

// |p| where p = decay * residual + x is kept for the passes to come. Decay 1.0 multiplies too: that is exact.
struct CorrectedMagnitudes {
  const float *x, *residual;
  float decay;
  float* p;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    lc_prefetch32(x + i);  // the residual's next elements are fetched by subtract_avx2
    LcQuad sum = lc_load32(residual + i);
    for (int r = 0; r < 4; ++r) {
      const __m256 decayed = _mm256_mul_ps(_mm256_set1_ps(decay), sum.v[r]);
      const __m256 v = _mm256_add_ps(decayed, _mm256_loadu_ps(x + i + 8 * r));
      _mm256_store_ps(p + i + 8 * r, v);
      sum.v[r] = lc_abs(v);
    }
    return sum;
  }
};

// Kept magnitudes; the bits of 32 elements are stored. A kept element is not zero, so its sign bit says negative.
struct Kept {
  const float* p;
  float threshold;
  uint8_t *kept, *negative;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    const LcQuad x = lc_load32(p + i);
    LcQuad mask, magnitude;
    for (int r = 0; r < 4; ++r) {
      magnitude.v[r] = lc_abs(x.v[r]);
      mask.v[r] = _mm256_cmp_ps(magnitude.v[r], _mm256_set1_ps(threshold), _CMP_GT_OQ);
      magnitude.v[r] = _mm256_and_ps(mask.v[r], magnitude.v[r]);
    }
    const uint32_t chosen = lc_sign_bits(mask.v[0], mask.v[1], mask.v[2], mask.v[3]);
    const uint32_t minus = chosen & lc_sign_bits(x.v[0], x.v[1], x.v[2], x.v[3]);
    memcpy(kept + i / 8, &chosen, 4);
    memcpy(negative + i / 8, &minus, 4);
    return magnitude;
  }
};

LC_AVX2 int64_t popcount(const uint8_t* bits, int64_t block) {
  int64_t count = 0;
  for (int64_t i = 0; i < block / 8; i += 8) {
    uint64_t word;
    memcpy(&word, bits + i, 8);
    count += __builtin_popcountll(word);
  }
  return count;
}

// Mean of the kept magnitudes of a block whose magnitudes sum to `total`.
LC_AVX2 float keep_avx2(const float* q, int64_t block, float total, Bits& bits, int64_t at, float* threshold) {
  *threshold = lc_ternary_threshold(total, (float)block);
  uint8_t *kept = bits.kept + at / 8, *negative = bits.negative + at / 8;
  const float sum = lc_block_sum_avx2(Kept{q, *threshold, kept, negative}, block);
  const int64_t count = popcount(kept, block);
  return lc_ternary_mean(sum, (uint32_t)count);
}

LC_AVX2 float sum_avx2(const float* p, int64_t block) { return lc_block_sum_avx2(Magnitudes{p}, block); }

LC_AVX2 float correct_and_sum_avx2(const float* x, const float* residual, float decay, float* p, int64_t block) {
  return lc_block_sum_avx2(CorrectedMagnitudes{x, residual, decay, p}, block);
}

// Whether the sum proves that every element is finite and the block needs no range factor.
bool proves_ordinary(float total, int64_t block) { return total >= 0x1p-39f * (float)block && total < 0x1p39f; }

// out = p - decoded, for a block whose elements above the threshold were kept.
template <bool STREAM>
LC_AVX2 void subtract_avx2(const float* p, int64_t block, float threshold, float scale, const float* next, float* out) {
  const __m256 sign = _mm256_set1_ps(-0.0f), s = _mm256_set1_ps(scale), limit = _mm256_set1_ps(threshold);
  for (int64_t i = 0; i < block; i += 8) {
    if (i % 32 == 0) lc_prefetch32(next + i);
    const __m256 v = _mm256_load_ps(p + i), kept = _mm256_cmp_ps(lc_abs(v), limit, _CMP_GT_OQ);
    const __m256 decoded = _mm256_and_ps(kept, _mm256_or_ps(_mm256_and_ps(v, sign), s));
    STREAM ? _mm256_stream_ps(out + i, _mm256_sub_ps(v, decoded)) : _mm256_storeu_ps(out + i, _mm256_sub_ps(v, decoded));
  }
}

LC_AVX2 void choose_stochastic_avx2(const float* p, int64_t block, int64_t first, float scale, const Rule& rule,
                                    Bits& bits, int64_t at) {
  const __m256 inverse = _mm256_set1_ps(1.0f / scale);
  for (int64_t i = 0; i < block; i += 32) {
    __m256 u[4], mask[4];
    LcQuad x = lc_load32(p + i);
    for (int h = 0; h < 2; ++h)
      lc_uniform16_avx2((uint64_t)(first + i + 16 * h) / 4, rule.stream, rule.step, rule.seed, u + 2 * h);
    for (int r = 0; r < 4; ++r) {
      mask[r] = _mm256_cmp_ps(u[r], _mm256_mul_ps(lc_abs(x.v[r]), inverse), _CMP_LT_OQ);
      x.v[r] = _mm256_and_ps(mask[r], x.v[r]);
    }
    const uint32_t words[2] = {lc_sign_bits(mask[0], mask[1], mask[2], mask[3]),
                               lc_sign_bits(x.v[0], x.v[1], x.v[2], x.v[3])};
    memcpy(bits.kept + (at + i) / 8, &words[0], 4);
    memcpy(bits.negative + (at + i) / 8, &words[1], 4);
  }
}
#endif

bool fast(int64_t m, int64_t block) { return lc_active_level >= LC_LEVEL_AVX2 && m == block && block >= 64; }

// ---- one block, any length

int encode_stochastic(const float* p, int64_t m, int64_t block, int64_t first, const Rule& rule, float absmax,
                      Bits& bits, int64_t at, float* scale) {
  alignas(32) float clipped[MAX_BLOCK];
  if (rule.clip > 0) {
    clip_block(p, m, rule.clip, absmax, clipped);
    lc_survey(clipped, m, &absmax);
    p = clipped;
  }
  *scale = lc_ternary_scale(absmax, rule.shared_scale);
  if (*scale == 0) return 0;
#ifdef LC_X86
  if (fast(m, block))
    choose_stochastic_avx2(p, block, first, *scale, rule, bits, at);
  else
#endif
    choose_stochastic(p, m, first, *scale, rule, bits, at);
  return absmax > *scale ? LC_SATURATED : 0;
}

// A block of any content. `first` is its place in the vector and `at` its place in the bits, which are 0 before.
int encode_any(const float* p, int64_t m, int64_t block, int64_t first, const Rule& rule, Bits& bits, int64_t at,
               float* scale) {
  float absmax;
  alignas(32) float clean[MAX_BLOCK];
  const int flags = lc_survey(p, m, &absmax);
  const float factor = rule.stochastic ? 1.0f : lc_range_factor(absmax);
  if (flags || factor != 1) lc_clean(p, m, factor, clean), p = clean;
  if (rule.stochastic) return flags | encode_stochastic(p, m, block, first, rule, absmax, bits, at, scale);
  *scale = 0;
  if (!(absmax >= LC_TINY)) return flags;
#ifdef LC_X86
  float threshold;
  if (fast(m, block))
    *scale = keep_avx2(p, block, sum_avx2(p, block), bits, at, &threshold) / factor;
  else
#endif
    *scale = choose_deterministic(p, m, bits, at) / factor;
  return flags;
}

int encode_block(const float* p, int64_t m, int64_t block, int64_t first, const Rule& rule, Bits& bits, int64_t at,
                 float* scale) {
#ifdef LC_X86
  if (fast(m, block) && !rule.stochastic) {
    float threshold;
    const float total = sum_avx2(p, block);
    if (proves_ordinary(total, block)) {
      *scale = keep_avx2(p, block, total, bits, at, &threshold);
      return 0;
    }
  }
#endif
  return encode_any(p, m, block, first, rule, bits, at, scale);
}

// ---- from bits to codes

int trit_at(const Bits& bits, int64_t i) { return bit_at(bits.kept, i) ? 1 + bit_at(bits.negative, i) : 0; }

// Elements first .. m-1; `first` begins a byte of codes.
void pack_portable(const Bits& bits, int64_t first, int64_t m, bool two_bit, uint8_t* codes) {
  const int64_t per_byte = two_bit ? 4 : 5;
  for (int64_t i = first; i < m; i += per_byte) {
    int byte = 0;
    for (int64_t j = 0; j < per_byte && i + j < m; ++j)
      byte += trit_at(bits, i + j) * (two_bit ? 1 << (2 * j) : POWERS[j]);
    codes[i / per_byte] = (uint8_t)byte;
  }
}

#ifdef LC_X86
// Five bits from bit 40 * lane + 5 * j on, for j = 0..7 from byte `skip` of each lane on, in word j; `v` holds 10 bytes
// of bits in each 128-bit lane.
LC_INLINE __m256i five_bits(__m256i v, int skip) {
  const __m256i bytes = _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 3,
                                         4, 3, 4, 4, 5);
  const __m256i to_top = _mm256_setr_epi16(1 << 11, 1 << 6, 1 << 9, 1 << 4, 1 << 7, 1 << 10, 1 << 5, 1 << 8, 1 << 11,
                                           1 << 6, 1 << 9, 1 << 4, 1 << 7, 1 << 10, 1 << 5, 1 << 8);
  const __m256i words = _mm256_shuffle_epi8(v, _mm256_add_epi8(bytes, _mm256_set1_epi8((char)skip)));
  return _mm256_srli_epi16(_mm256_mullo_epi16(words, to_top), 11);
}

LC_INLINE __m256i load_lanes(const uint8_t* low, const uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low)),
                                 _mm_loadu_si128((const __m128i*)high), 1);
}

// Base-3 bytes, one in each word, from five kept bits and five negative bits: sum of 3^k over both, as a kept negative
// counts twice. The table has the lower four bits; the fifth counts 81.
LC_INLINE __m256i base3_words(__m256i kept, __m256i negative) {
  const __m256i table = _mm256_setr_epi8(0, 1, 3, 4, 9, 10, 12, 13, 27, 28, 30, 31, 36, 37, 39, 40, 0, 1, 3, 4, 9, 10, 12,
                                         13, 27, 28, 30, 31, 36, 37, 39, 40);
  const __m256i both = _mm256_or_si256(kept, _mm256_slli_epi16(negative, 8));
  const __m256i low = _mm256_maddubs_epi16(_mm256_shuffle_epi8(table, both), _mm256_set1_epi8(1));
  const __m256i fifth = _mm256_and_si256(both, _mm256_set1_epi8(16));
  return _mm256_add_epi16(low, _mm256_srli_epi16(_mm256_maddubs_epi16(fifth, _mm256_set1_epi8(81)), 4));
}

// 32 bytes of codes from 160 elements. Lanes are chosen so that packus leaves the bytes in order.
LC_AVX2 void pack_base3_avx2(const Bits& bits, int64_t m, uint8_t* codes) {
  for (int64_t i = 0; i + 160 <= m; i += 160, codes += 32) {
    const uint8_t *k = bits.kept + i / 8, *n = bits.negative + i / 8;
    const __m256i kept = load_lanes(k, k + 10), negative = load_lanes(n, n + 10);
    const __m256i a = base3_words(five_bits(kept, 0), five_bits(negative, 0));
    const __m256i b = base3_words(five_bits(kept, 5), five_bits(negative, 5));
    _mm256_storeu_si256((__m256i*)codes, _mm256_packus_epi16(a, b));
  }
}

// Every bit of 16 bytes doubled in place: 32 bytes, bit j of the input at bit 2j.
LC_INLINE __m256i spread_bits(const uint8_t* bits) {
  const __m256i table = _mm256_setr_epi8(0, 1, 4, 5, 16, 17, 20, 21, 64, 65, 68, 69, 80, 81, 84, 85, 0, 1, 4, 5, 16, 17, 20,
                                         21, 64, 65, 68, 69, 80, 81, 84, 85);
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)bits));
  const __m256i nibbles = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

// 32 bytes of codes from 128 elements: bit 0 of a code is kept and positive, bit 1 kept and negative.
LC_AVX2 void pack_2bit_avx2(const Bits& bits, int64_t m, uint8_t* codes) {
  for (int64_t i = 0; i + 128 <= m; i += 128, codes += 32) {
    const __m256i kept = spread_bits(bits.kept + i / 8), negative = spread_bits(bits.negative + i / 8);
    const __m256i positive = _mm256_xor_si256(kept, negative);
    _mm256_storeu_si256((__m256i*)codes, _mm256_or_si256(positive, _mm256_add_epi8(negative, negative)));
  }
}
#endif

void pack(const Bits& bits, int64_t m, bool two_bit, uint8_t* codes) {
  int64_t done = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) {
    (two_bit ? pack_2bit_avx2 : pack_base3_avx2)(bits, m, codes);
    done = two_bit ? m / 128 * 128 : m / 160 * 160;
  }
#endif
  pack_portable(bits, done, m, two_bit, codes);
}

// ---- whole vectors

void clear(Bits& bits, int64_t elements) {
  memset(bits.kept, 0, (size_t)(elements + 7) / 8);
  memset(bits.negative, 0, (size_t)(elements + 7) / 8);
}

int encode_group(const void* x, int dtype, const Layout& to, int64_t group, const Rule& rule, Bits& bits,
                 float* scratch) {
  int flags = 0;
  clear(bits, to.size(group, to.group()));
  for (int64_t first = group; first < group + to.group() && first < to.n; first += to.block) {
    const int64_t m = to.size(first, to.block);
    float scale;
    const float* p = lc_input(x, dtype, first, m, scratch);
    flags |= encode_block(p, m, to.block, first, rule, bits, first - group, &scale);
    lc_store_float(to.scale_at(first), scale);
  }
  pack(bits, to.size(group, to.group()), to.two_bit, to.codes_at(group));
  return flags;
}

int encode_all(const void* x, int dtype, const Layout& to, const Rule& rule, int threads) {
  lc_zero_padding(to.codes, to.code_bytes(to.n));
  return lc_parallel(to.groups(), lc_thread_grain(to.group()), threads, [&](int64_t begin, int64_t end) {
    alignas(32) float scratch[MAX_BLOCK];
    Bits bits;
    int flags = 0;
    for (int64_t g = begin; g < end; ++g) flags |= encode_group(x, dtype, to, g * to.group(), rule, bits, scratch);
    return flags;
  });
}

struct Feedback {
  const float *x, *residual;
  float* candidate;
  float decay;
  bool stream;
};

#ifdef LC_X86
// False, with only `p` written, where the block needs the general path.
bool feedback_fast(const Feedback& f, int64_t block, int64_t first, Bits& bits, int64_t at, float* p, float* scale) {
  float threshold;
  const float total = correct_and_sum_avx2(f.x + first, f.residual + first, f.decay, p, block);
  if (!proves_ordinary(total, block)) return false;
  *scale = keep_avx2(p, block, total, bits, at, &threshold);
  (f.stream ? subtract_avx2<true> : subtract_avx2<false>)(p, block, threshold, *scale, f.residual + first,
                                                         f.candidate + first);
  return true;
}
#endif

int feedback_block(const Feedback& f, int64_t m, int64_t block, int64_t first, const Rule& rule, Bits& bits, int64_t at,
                   float* p, float* scale) {
#ifdef LC_X86
  if (fast(m, block) && !rule.stochastic && feedback_fast(f, block, first, bits, at, p, scale)) return 0;
#endif
  lc_correct(f.x + first, f.residual + first, f.decay, m, p);
  const int flags = encode_any(p, m, block, first, rule, bits, at, scale);
  const float values[3] = {0.0f, *scale, -*scale};
  for (int64_t i = 0; i < m; ++i)
    f.candidate[first + i] = lc_finite(p[i]) ? p[i] - values[trit_at(bits, at + i)] : 0.0f;
  return flags;
}

int feedback_all(const Feedback& f, const Layout& to, const Rule& rule, int threads) {
  lc_zero_padding(to.codes, to.code_bytes(to.n));
  return lc_parallel(to.groups(), lc_thread_grain(to.group()), threads, [&](int64_t begin, int64_t end) {
    alignas(32) float p[MAX_BLOCK];
    Bits bits;
    int flags = 0;
    for (int64_t group = begin * to.group(); group < end * to.group() && group < to.n; group += to.group()) {
      const int64_t elements = to.size(group, to.group());
      clear(bits, elements);
      for (int64_t first = group; first < group + elements; first += to.block) {
        float scale;
        const int64_t m = to.size(first, to.block);
        flags |= feedback_block(f, m, to.block, first, rule, bits, first - group, p, &scale);
        lc_store_float(to.scale_at(first), scale);
      }
      pack(bits, elements, to.two_bit, to.codes_at(group));
    }
    lc_stream_fence();
    return flags;
  });
}

// ---- decoding

bool damaged(const Layout& from, int64_t begin, int64_t end) {
  const uint8_t* codes = from.codes_at(begin);
  const int64_t m = end - begin, whole = from.two_bit ? m / 4 : from.code_bytes(m);
  uint8_t worst = 0;
  if (!from.two_bit) {
    for (int64_t i = 0; i < whole; ++i) worst = codes[i] > worst ? codes[i] : worst;
    return worst > 242;
  }
  for (int64_t i = 0; i < whole; ++i) worst |= codes[i] & codes[i] >> 1;
  if (m % 4) worst |= codes[whole] & codes[whole] >> 1 & ((1 << 2 * (m % 4)) - 1);
  return worst & 0x55;
}

enum Use { WRITE, STREAM, ADD };

// The five digits of every base-3 byte, and what a vector needs to find them: element j of a block that begins with
// digit `phase` of a byte is digit k = (phase + j) % 5 of byte (phase + j) / 5. With u the low 16 bits of
// byte * ceil(2^16 / 3^(k+1)), digit k is 3u >> 16. Sixteen elements are looked up at once, in 16-bit lanes: element j
// in the low half of 32-bit lane j, element 8 + j in its high half.
struct Base3Tables {
  uint8_t digits[256][5];
  alignas(32) uint8_t bytes[5][5][32];        // phase, which 16 of 80 elements: byte counted from `offset`
  alignas(32) uint16_t multipliers[5][5][16];
  int offset[5][5];

  Base3Tables() {
    for (int byte = 0; byte < 256; ++byte)
      for (int k = 0; k < 5; ++k) digits[byte][k] = (uint8_t)(byte / POWERS[k] % 3);
    for (int phase = 0; phase < 5; ++phase)
      for (int r = 0; r < 5; ++r) fill(phase, r);
  }

  void fill(int phase, int r) {
    offset[phase][r] = (phase + 16 * r) / 5;
    for (int j = 0; j < 16; ++j) {
      const int place = phase + 16 * r + j, word = j % 8 * 2 + j / 8;
      bytes[phase][r][2 * word] = (uint8_t)(place / 5 - offset[phase][r]);
      bytes[phase][r][2 * word + 1] = 0x80;  // zero
      multipliers[phase][r][word] = (uint16_t)((65536 + 3 * POWERS[place % 5] - 1) / (3 * POWERS[place % 5]));
    }
  }
};
const Base3Tables base3;

void decode_portable(const Layout& from, int64_t begin, int64_t end, float weight, Use use, float* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int trit = from.two_bit ? from.codes[i / 4] >> (2 * (i % 4)) & 3 : base3.digits[from.codes[i / 5]][i % 5];
    const float s = lc_load_float(from.scale_at(i));
    float v = lc_ternary_value((uint32_t)trit, s);
    if (weight != 1) v *= weight;
    out[i] = use == ADD ? out[i] + v : v;
  }
}

#ifdef LC_X86
// The values of trits 0, 1, 2 in every 128-bit lane, for permutevar.
LC_INLINE __m256 trit_values(const uint8_t* scale, float weight) {
  const float s = weight == 1 ? lc_load_float(scale) : weight * lc_load_float(scale);
  return _mm256_setr_ps(0, s, -s, 0, 0, s, -s, 0);
}

template <int USE>
LC_INLINE void emit8(float* out, __m256 v) {
  if (USE == STREAM)
    _mm256_stream_ps(out, v);
  else
    _mm256_storeu_ps(out, USE == ADD ? _mm256_add_ps(_mm256_loadu_ps(out), v) : v);
}

// Sixteen elements from a trit in the low two bits of each lane, which are all that permutevar looks at.
template <int USE>
LC_INLINE void emit16(float* out, __m256 values, __m256i first, __m256i second) {
  if (USE == ADD) _mm_prefetch((const char*)(out + LC_AHEAD), _MM_HINT_T0);
  emit8<USE>(out, _mm256_permutevar_ps(values, first));
  emit8<USE>(out + 8, _mm256_permutevar_ps(values, second));
}

// `count` elements, a multiple of 16, the first of them digit `phase` of codes[0]. Reads 8 bytes at a time.
template <int USE>
LC_AVX2 void decode_base3_avx2(const uint8_t* codes, int phase, int64_t count, __m256 values, float* out) {
  const __m256i three = _mm256_set1_epi16(3);
  __m256i bytes[5], multipliers[5];
  for (int r = 0; r < 5; ++r) {
    bytes[r] = _mm256_load_si256((const __m256i*)base3.bytes[phase][r]);
    multipliers[r] = _mm256_load_si256((const __m256i*)base3.multipliers[phase][r]);
  }
  const int* offset = base3.offset[phase];
  for (int64_t i = 0; i < count; i += 80, codes += 16)
    for (int r = 0; r < 5 && i + 16 * r < count; ++r) {
      long long eight;
      memcpy(&eight, codes + offset[r], 8);
      const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), bytes[r]);
      const __m256i trits = _mm256_mulhi_epu16(_mm256_mullo_epi16(spread, multipliers[r]), three);
      emit16<USE>(out + i + 16 * r, values, trits, _mm256_srli_epi32(trits, 16));
    }
}

template <int USE>
LC_AVX2 void decode_2bit_avx2(const uint8_t* codes, int64_t count, __m256 values, float* out) {
  const __m256i shift = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  for (int64_t i = 0; i < count; i += 16) {
    const __m256i word = _mm256_srlv_epi32(lc_load_word(codes + i / 4), shift);
    emit16<USE>(out + i, values, word, _mm256_srli_epi32(word, 16));
  }
}

// Whole blocks; returns where it stopped.
template <int USE>
LC_AVX2 int64_t decode_blocks_avx2(const Layout& from, int64_t begin, int64_t end, float weight, float* out) {
  uint8_t last[MAX_BLOCK / 5 + 16];
  const uint8_t* stop = from.codes + from.code_bytes(from.n);
  for (; begin + from.block <= end; begin += from.block) {
    const __m256 values = trit_values(from.scale_at(begin), weight);
    if (from.two_bit) {
      decode_2bit_avx2<USE>(from.codes + begin / 4, from.block, values, out + begin);
      continue;
    }
    const uint8_t* codes = from.codes + begin / 5;
    if (stop - codes < from.block / 5 + 16) codes = (const uint8_t*)memcpy(last, codes, (size_t)(stop - codes));
    decode_base3_avx2<USE>(codes, (int)(begin % 5), from.block, values, out + begin);
  }
  return begin;
}
#endif

// Elements begin .. end-1, where `begin` begins a group.
void decode_range(const Layout& from, int64_t begin, int64_t end, float weight, Use use, float* out) {
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2 && from.block >= 64) {
    const auto run = use == ADD      ? decode_blocks_avx2<ADD>
                     : use == STREAM ? decode_blocks_avx2<STREAM>
                                     : decode_blocks_avx2<WRITE>;
    begin = run(from, begin, end, weight, out);
  }
#endif
  decode_portable(from, begin, end, weight, use, out);
}

// 1 where a code is damaged; then nothing was written.
int decode_all(const Layout& from, float weight, bool add, float* out, int threads) {
  const Use use = add ? ADD : lc_streams(out, from.n) ? STREAM : WRITE;
  const auto each = [&](const auto& run) {
    return lc_parallel(from.groups(), lc_thread_grain(from.group()), threads, [&](int64_t begin, int64_t end) {
      return run(begin * from.group(), end * from.group() < from.n ? end * from.group() : from.n);
    });
  };
  if (each([&](int64_t begin, int64_t end) { return (int)damaged(from, begin, end); })) return 1;
  return each([&](int64_t begin, int64_t end) {
    decode_range(from, begin, end, weight, use, out);
    lc_stream_fence();
    return 0;
  });
}

Rule stochastic(float clip, float shared_scale, uint64_t seed, uint32_t stream, uint32_t step) {
  Rule rule;
  rule.stochastic = true;
  rule.clip = clip, rule.shared_scale = shared_scale, rule.seed = seed, rule.stream = stream, rule.step = step;
  return rule;
}

}  // namespace

LC_API int32_t lc_ternary_encode(const void* x, int32_t dtype, uint8_t* scales, uint8_t* codes, int64_t n, int64_t block,
                                 int32_t two_bit, int32_t threads) {
  return encode_all(x, dtype, {scales, codes, n, block, two_bit != 0}, Rule(), threads);
}

LC_API int32_t lc_ternary_stochastic(const void* x, int32_t dtype, uint8_t* scales, uint8_t* codes, int64_t n,
                                     int64_t block, int32_t two_bit, int32_t threads, float clip, float shared_scale,
                                     uint64_t seed, uint32_t stream, uint32_t step) {
  const Rule rule = stochastic(clip, shared_scale, seed, stream, step);
  return encode_all(x, dtype, {scales, codes, n, block, two_bit != 0}, rule, threads);
}

LC_API int32_t lc_ternary_feedback(const float* x, const float* residual, float* candidate, float decay, uint8_t* scales,
                                   uint8_t* codes, int64_t n, int64_t block, int32_t two_bit, int32_t threads) {
  const bool stream = candidate != x && candidate != residual && lc_streams(candidate, n);
  return feedback_all({x, residual, candidate, decay, stream}, {scales, codes, n, block, two_bit != 0}, Rule(), threads);
}

LC_API int32_t lc_ternary_stochastic_feedback(const float* x, const float* residual, float* candidate, float decay,
                                              uint8_t* scales, uint8_t* codes, int64_t n, int64_t block, int32_t two_bit,
                                              int32_t threads, float clip, float shared_scale, uint64_t seed,
                                              uint32_t stream, uint32_t step) {
  const Rule rule = stochastic(clip, shared_scale, seed, stream, step);
  return feedback_all({x, residual, candidate, decay, false}, {scales, codes, n, block, two_bit != 0}, rule, threads);
}

LC_API int32_t lc_ternary_decode(uint8_t* scales, uint8_t* codes, float* out, int64_t n, int64_t block, int32_t two_bit,
                                 int32_t threads) {
  return decode_all({scales, codes, n, block, two_bit != 0}, 1.0f, false, out, threads);
}

LC_API int32_t lc_ternary_decode_add(uint8_t* scales, uint8_t* codes, float* acc, float weight, int64_t n, int64_t block,
                                     int32_t two_bit, int32_t threads) {
  return decode_all({scales, codes, n, block, two_bit != 0}, weight, true, acc, threads);
}
