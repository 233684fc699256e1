// Kernels of eden.py: random rotation of blocks and 1 to 4 bits for each coordinate.
#include <cmath>

#include "eden.cuh"
#include "input.h"
#include "philox.h"
#include "ranges.h"
#include "vectors.h"

namespace {

constexpr int64_t MAX_BLOCK = 65536;
struct Layout {
  uint8_t* scales;
  uint8_t* codes;
  int64_t n, block;
  int bits;
  uint64_t seed;
  uint32_t step;

  int64_t blocks() const { return (n + block - 1) / block; }
  int64_t elements(int64_t first) const { return n - first < block ? n - first : block; }
  int64_t coordinates(int64_t first) const { return lc_next_pow2(elements(first)); }
  uint8_t* scale_at(int64_t first) const { return scales + first / block * 4; }
  uint8_t* codes_at(int64_t first) const { return codes + first * bits / 8; }
  int64_t code_bytes() const {
    const int64_t last = n == 0 ? 0 : (n - 1) / block * block;
    return n == 0 ? 0 : ((last + coordinates(last)) * bits + 7) / 8;
  }
};

// 1/sqrt(P), applied to the scale where that is exact (P a power of 4), otherwise to the elements.
struct Factor {
  float on_elements, on_scale;

  explicit Factor(int64_t size) {
    const int log2_size = __builtin_ctzll((uint64_t)size);
    on_elements = lc_eden_on_elements(log2_size), on_scale = lc_eden_on_scale(log2_size);
  }
};

// Working memory of one thread.
struct Memory {
  alignas(64) float y[MAX_BLOCK];      // the rotated block
  alignas(64) float p[MAX_BLOCK];      // the block itself where it is not in the caller's memory as it is needed
  alignas(64) float clean[MAX_BLOCK];  // levels, or a block without non-finite elements
  alignas(32) uint32_t signs[MAX_BLOCK / 32 + 16];
  alignas(32) uint8_t codes[MAX_BLOCK / 2 + 32];
};

// ---- random signs: bit i of `words` belongs to element first / 128 * 128 + i; a set bit is -1

void draw_signs_portable(const Layout& job, int64_t first, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count + first % 128; i += 128, words += 4)
    lc_philox((uint64_t)(first + i) / 128, LC_STREAM_SIGNS, job.step, job.seed, words);
}

#ifdef LC_X86
LC_AVX2 void draw_signs_avx2(const Layout& job, int64_t first, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count + first % 128; i += 512, words += 16) {
    __m256i drawn[2];
    lc_random_words16_avx2((uint64_t)(first + i) / 128, LC_STREAM_SIGNS, job.step, job.seed, drawn);
    _mm256_store_si256((__m256i*)words, drawn[0]);
    _mm256_store_si256((__m256i*)(words + 8), drawn[1]);
  }
}
#endif

void draw_signs(const Layout& job, int64_t first, int64_t count, uint32_t* words) {
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) return draw_signs_avx2(job, first, count, words);
#endif
  draw_signs_portable(job, first, count, words);
}

bool sign_bit(const uint32_t* words, int64_t i) { return words[i / 32] >> (i % 32) & 1; }

// ---- Walsh-Hadamard transform in place, butterflies over strides `from`, 2 from, ..., size / 2

void hadamard_portable(float* y, int64_t size, int64_t from) {
  for (int64_t stride = from; stride < size; stride *= 2)
    for (int64_t i = 0; i < size; i += 2 * stride)
      for (int64_t k = i; k < i + stride; ++k) {
        const float a = y[k], b = y[k + stride];
        y[k] = a + b;
        y[k + stride] = a - b;
      }
}

#ifdef LC_X86
// a - b as a fused a - 1 b, which rounds once too: additions and products have units of their own.
LC_INLINE void butterfly(__m256& a, __m256& b) {
  const __m256 sum = _mm256_add_ps(a, b);
  b = _mm256_fnmadd_ps(b, _mm256_set1_ps(1.0f), a);
  a = sum;
}

// Strides 1, 2 and 4 between eight vectors. Written out: as loops it leaves the registers.
LC_INLINE void butterflies8(__m256 v[8]) {
  butterfly(v[0], v[1]), butterfly(v[2], v[3]), butterfly(v[4], v[5]), butterfly(v[6], v[7]);
  butterfly(v[0], v[2]), butterfly(v[1], v[3]), butterfly(v[4], v[6]), butterfly(v[5], v[7]);
  butterfly(v[0], v[4]), butterfly(v[1], v[5]), butterfly(v[2], v[6]), butterfly(v[3], v[7]);
}

// Strides 1, 2 and 4 inside a vector: its own lanes, every other one negated, plus their partners. The product with
// +-1 is exact, so the fused operation rounds once, as a sum does.
LC_INLINE __m256 butterflies_inside(__m256 v) {
  v = _mm256_fmadd_ps(v, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(v, 0xB1));
  v = _mm256_fmadd_ps(v, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(v, 0x4E));
  const __m256 swapped = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), 0x4E));  // cheap on every CPU
  return _mm256_fmadd_ps(v, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), swapped);
}

template <int COUNT>
LC_INLINE void pass(float* y, int64_t size, int64_t stride) {
  for (int64_t i = 0; i < size; i += COUNT * stride)
    for (int64_t k = i; k < i + stride; k += 8) {
      __m256 v[8];
      for (int r = 0; r < COUNT; ++r) v[r] = _mm256_load_ps(y + k + r * stride);
      if (COUNT == 8) butterflies8(v);
      if (COUNT == 4) butterfly(v[0], v[1]), butterfly(v[2], v[3]), butterfly(v[0], v[2]), butterfly(v[1], v[3]);
      if (COUNT == 2) butterfly(v[0], v[1]);
      for (int r = 0; r < COUNT; ++r) _mm256_store_ps(y + k + r * stride, v[r]);
    }
}

LC_AVX2 void hadamard_from_64_avx2(float* y, int64_t size) {
  int64_t stride = 64;
  for (; size / stride >= 8; stride *= 8) pass<8>(y, size, stride);
  if (size / stride == 4) pass<4>(y, size, stride);
  if (size / stride == 2) pass<2>(y, size, stride);
}

LC_INLINE void store64(__m256 v[8], float* y) {
  butterflies8(v);
  for (int r = 0; r < 8; ++r) _mm256_store_ps(y + 8 * r, v[r]);
}

// The sign bits that eight bits of random signs flip; cheaper than making them from the bits.
struct FlipMasks {
  alignas(32) uint32_t rows[256][8];

  FlipMasks() {
    for (int byte = 0; byte < 256; ++byte)
      for (int i = 0; i < 8; ++i) rows[byte][i] = (uint32_t)(byte >> i & 1) << 31;
  }
};
const FlipMasks flip_masks;

// D v for elements i .. i+7 of a block; i is a multiple of 8.
LC_INLINE __m256 flip(__m256 v, const uint32_t* signs, int64_t i) {
  const uint8_t byte = ((const uint8_t*)signs)[i / 8];
  return _mm256_xor_ps(v, _mm256_load_ps((const float*)flip_masks.rows[byte]));
}

struct Direct {
  const float* x;

  LC_MEMBER __m256 operator()(int64_t i) const {
    if (i % 32 == 0) lc_prefetch32(x + i);
    return _mm256_loadu_ps(x + i);
  }
};

struct Corrected {  // decay * residual + x, kept in `p`. Decay 1.0 multiplies too: that is exact.
  const float *x, *residual;
  __m256 decay;
  float* p;

  LC_MEMBER __m256 operator()(int64_t i) const {
    if (i % 32 == 0) lc_prefetch32(x + i), lc_prefetch32(residual + i);
    const __m256 decayed = _mm256_mul_ps(decay, _mm256_loadu_ps(residual + i));
    const __m256 v = _mm256_add_ps(decayed, _mm256_loadu_ps(x + i));
    _mm256_store_ps(p + i, v);
    return v;
  }
};

// y = H(D x) over the strides below 64. Copies what the stores might change in the eyes of the compiler.
template <class Source>
LC_INLINE void rotate_below_64_avx2(const Source source, const uint32_t* signs, int64_t size, float* y) {
  for (int64_t i = 0; i < size; i += 64) {
    __m256 v[8];
    for (int r = 0; r < 8; ++r) v[r] = butterflies_inside(flip(source(i + 8 * r), signs, i + 8 * r));
    store64(v, y + i);
  }
}

LC_AVX2 void rotate_avx2(const float* x, const uint32_t* signs, int64_t size, float* y) {
  rotate_below_64_avx2(Direct{x}, signs, size, y);
  hadamard_from_64_avx2(y, size);
}

// The last three strides of a block of 8 * stride elements, whose results are only needed as sign bits and as the sum
// of their magnitudes: tree_sum joins the same eight vectors.
LC_AVX2 float signs_of_last_pass_avx2(const float* y, int64_t stride, uint8_t* codes) {
  __m256 sums[LC_MAX_TREE / 64];
  for (int64_t k = 0; k < stride; k += 8) {
    __m256 v[8];
    for (int r = 0; r < 8; ++r) v[r] = _mm256_load_ps(y + k + r * stride);
    butterflies8(v);
    for (int r = 0; r < 8; ++r) {
      codes[(k + r * stride) / 8] = (uint8_t)_mm256_movemask_ps(lc_below_zero(v[r]));
      v[r] = lc_abs(v[r]);
    }
    const __m256 even = _mm256_add_ps(_mm256_add_ps(v[0], v[4]), _mm256_add_ps(v[2], v[6]));
    const __m256 odd = _mm256_add_ps(_mm256_add_ps(v[1], v[5]), _mm256_add_ps(v[3], v[7]));
    sums[k / 8] = _mm256_add_ps(even, odd);
  }
  return lc_tree_sum_avx2(sums, stride / 8);
}

LC_AVX2 void scale_avx2(float* y, int64_t size, float factor) {
  for (int64_t i = 0; i < size; i += 8)
    _mm256_store_ps(y + i, _mm256_mul_ps(_mm256_load_ps(y + i), _mm256_set1_ps(factor)));
}
#endif

bool fast(int64_t size) { return lc_active_level >= LC_LEVEL_AVX2 && size >= 64; }

// y = H(D x) on_elements for a block of `size` elements.
void rotate(const float* x, const uint32_t* signs, int64_t first, int64_t size, float* y) {
  const Factor factor(size);
#ifdef LC_X86
  if (fast(size) && first % 128 == 0) {
    rotate_avx2(x, signs, size, y);
    if (factor.on_elements != 1) scale_avx2(y, size, factor.on_elements);
    return;
  }
#endif
  for (int64_t i = 0; i < size; ++i) y[i] = sign_bit(signs, first % 128 + i) ? -x[i] : x[i];
  hadamard_portable(y, size, 1);
  for (int64_t i = 0; factor.on_elements != 1 && i < size; ++i) y[i] *= factor.on_elements;
}

// ---- sums over a rotated block, and codes

struct Sums {
  float magnitude, energy;
};

#ifdef LC_X86
struct SignsOf {  // stores the bits y < 0, sums |y|
  const float* y;
  uint8_t* codes;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    LcQuad v = lc_load32(y + i), negative;
    for (int r = 0; r < 4; ++r) negative.v[r] = lc_below_zero(v.v[r]), v.v[r] = lc_abs(v.v[r]);
    const uint32_t word = lc_sign_bits(negative.v[0], negative.v[1], negative.v[2], negative.v[3]);
    memcpy(codes + i / 8, &word, 4);
    return v;
  }
};

struct ProductOf {
  const float *a, *b;

  LC_MEMBER LcQuad operator()(int64_t i) const {
    LcQuad v = lc_load32(a + i);
    const LcQuad w = lc_load32(b + i);
    for (int r = 0; r < 4; ++r) v.v[r] = _mm256_mul_ps(v.v[r], w.v[r]);
    return v;
  }
};

LC_AVX2 float signs_avx2(const float* y, int64_t size, uint8_t* codes) {
  return lc_block_sum_avx2(SignsOf{y, codes}, size);
}

LC_AVX2 float product_avx2(const float* a, const float* b, int64_t size) {
  return lc_block_sum_avx2(ProductOf{a, b}, size);
}
#endif

float product(const float* a, const float* b, int64_t size) {
#ifdef LC_X86
  if (fast(size)) return product_avx2(a, b, size);
#endif
  float scratch[MAX_BLOCK / 2];
  return lc_tree_sum([=](int64_t i) { return a[i] * b[i]; }, size, scratch);
}

float take_signs(const float* y, int64_t size, uint8_t* codes) {
#ifdef LC_X86
  if (fast(size)) return signs_avx2(y, size, codes);
#endif
  float scratch[MAX_BLOCK / 2];
  memset(codes, 0, (size_t)(size + 7) / 8);
  for (int64_t i = 0; i < size; ++i) codes[i / 8] = (uint8_t)(codes[i / 8] | (y[i] < 0) << (i % 8));
  return lc_tree_sum([=](int64_t i) { return std::fabs(y[i]); }, size, scratch);
}

void put_code(uint8_t* codes, int64_t i, int bits, int code) {
  const int64_t bit = i * bits;
  codes[bit / 8] = (uint8_t)(codes[bit / 8] | code << (bit % 8));
  if (bit % 8 + bits > 8) codes[bit / 8 + 1] = (uint8_t)(code >> (8 - bit % 8));
}

int get_code(const uint8_t* codes, int64_t i, int bits) {
  const int64_t bit = i * bits;
  int word = codes[bit / 8] >> (bit % 8);
  if (bit % 8 + bits > 8) word |= codes[bit / 8 + 1] << (8 - bit % 8);
  return word & ((1 << bits) - 1);
}

void quantize_portable(const float* y, int64_t size, int bits, float stretch, uint8_t* codes, float* c) {
  memset(codes, 0, (size_t)(size * bits + 7) / 8);
  for (int64_t i = 0; i < size; ++i) {
    const int code = lc_eden_code(y[i] * stretch, bits);
    put_code(codes, i, bits, code);
    c[i] = lc_eden_level(code, bits);
  }
}

#ifdef LC_X86
// Eight levels by number, for permutevar8x32, repeated where there are fewer.
LC_INLINE __m256 level_table(int bits, int from) {
  alignas(32) float table[8];
  for (int i = 0; i < 8; ++i) table[i] = lc_eden_level((from + i) % (1 << bits), bits);
  return _mm256_load_ps(table);
}

template <int BITS>
LC_INLINE __m256 look_up(__m256i code, __m256 low, __m256 high) {
  const __m256 found = _mm256_permutevar8x32_ps(low, code);
  if (BITS < 4) return found;
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
  return _mm256_blendv_ps(found, _mm256_permutevar8x32_ps(high, code), upper);
}

// As nearest_level. Magnitudes are compared as integers; one less for positive z makes >= of > .
template <int BITS>
LC_INLINE __m256i nearest8(__m256 z, const __m256i* below) {
  constexpr int half = 1 << (BITS - 1);
  const __m256i positive = _mm256_castps_si256(_mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ));
  const __m256i a = _mm256_add_epi32(_mm256_castps_si256(lc_abs(z)), positive);
  __m256i k = _mm256_setzero_si256();
  for (int b = 0; b + 1 < half; ++b) k = _mm256_sub_epi32(k, _mm256_cmpgt_epi32(a, below[b]));
  const __m256i mirrored = _mm256_sub_epi32(_mm256_set1_epi32(half - 1), k);
  return _mm256_blendv_epi8(mirrored, _mm256_add_epi32(_mm256_set1_epi32(half), k), positive);
}

// 4 BITS bytes of codes from four vectors of them.
template <int BITS>
LC_INLINE void pack32(const __m256i code[4], uint8_t* out) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i halves = _mm256_packus_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(halves, order);
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(1 | 1 << (8 + BITS)));
  alignas(32) uint32_t quads[8];
  _mm256_store_si256((__m256i*)quads, _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 1 << (16 + 2 * BITS))));
  for (int i = 0; i < 4; ++i) {
    const uint32_t eight = quads[2 * i] | quads[2 * i + 1] << (4 * BITS);
    memcpy(out + i * BITS, &eight, BITS);
  }
}

template <int BITS>
LC_AVX2 void quantize_avx2(const float* y, int64_t size, float stretch, uint8_t* codes, float* c) {
  __m256i below[7];
  for (int b = 0; b + 1 < 1 << (BITS - 1); ++b)
    below[b] = _mm256_set1_epi32((int)lc_bits(lc_eden_boundary(BITS, b)) - 1);
  const __m256 low = level_table(BITS, 0), high = level_table(BITS, 8);
  for (int64_t i = 0; i < size; i += 32, codes += 4 * BITS) {
    __m256i code[4];
    for (int r = 0; r < 4; ++r) {
      code[r] = nearest8<BITS>(_mm256_mul_ps(_mm256_load_ps(y + i + 8 * r), _mm256_set1_ps(stretch)), below);
      _mm256_store_ps(c + i + 8 * r, look_up<BITS>(code[r], low, high));
    }
    pack32<BITS>(code, codes);
  }
}
#endif

// Codes of a rotated block and their levels c.
void quantize(const float* y, int64_t size, int bits, float stretch, uint8_t* codes, float* c) {
#ifdef LC_X86
  if (fast(size)) {
    const auto run = bits == 2 ? quantize_avx2<2> : bits == 3 ? quantize_avx2<3> : quantize_avx2<4>;
    return run(y, size, stretch, codes, c);
  }
#endif
  quantize_portable(y, size, bits, stretch, codes, c);
}

// ---- encoding a block

// Whether an l1 sum (or energy) of the rotated block proves its elements finite and between 2^-40 and 2^40.
bool proves_ordinary(float l1, float energy, int64_t size, int bits) {
  if (bits == 1) return l1 >= 0x1p-39f * (float)size && l1 < 0x1p39f;
  return energy >= 0x1p-78f * (float)size && energy < 0x1p78f;
}

// Writes the codes of a rotated block; returns the scale. False in *ordinary means that both are void.
float encode_rotated(const float* y, int64_t size, int bits, int mode, uint8_t* codes, float* c, bool* ordinary) {
  const float on_scale = Factor(size).on_scale;
  float l1 = 0, energy = 0;
  if (bits == 1) l1 = take_signs(y, size, codes) * on_scale;
  if (bits > 1 || mode != LC_EDEN_BIASED) energy = product(y, y, size) * (on_scale * on_scale);
  if (*ordinary && !proves_ordinary(l1, energy, size, bits)) {
    *ordinary = false;
    return 0;
  }
  if (bits == 1) return lc_eden_scale_of_signs(l1, energy, (float)size, mode);
  const float stretch = lc_eden_root(__builtin_ctzll((uint64_t)size)) / std::sqrt(energy) * on_scale;
  quantize(y, size, bits, stretch, codes, c);
  const float dot = mode == LC_EDEN_MATCHED ? 0 : product(c, y, size) * on_scale;
  return lc_eden_scale_of_levels(dot, energy, mode == LC_EDEN_UNBIASED ? 0 : product(c, c, size), mode);
}

int finish_block(float scale, int flags, const Layout& job, int64_t first) {
  if (scale > LC_EDEN_MAX_SCALE) scale = LC_EDEN_MAX_SCALE, flags |= LC_SATURATED;
  lc_store_float(job.scale_at(first), scale);
  return flags;
}

// Encode `size` coordinates, of which the first m are elements at `p` and the rest zeros behind them.
int encode_block(const float* p, int64_t m, int64_t size, const Layout& job, int mode, int64_t first,
                 Memory& w) {
  bool ordinary = true;
  uint8_t* codes = job.codes_at(first);
  rotate(p, w.signs, first, size, w.y);
  float scale = encode_rotated(w.y, size, job.bits, mode, codes, w.clean, &ordinary);
  if (ordinary) return finish_block(scale, 0, job, first);
  float absmax;
  const int flags = lc_survey(p, m, &absmax);
  const float factor = lc_eden_range_factor(absmax);
  lc_clean(p, size, factor, w.clean);
  rotate(w.clean, w.signs, first, size, w.y);
  scale = encode_rotated(w.y, size, job.bits, mode, codes, w.clean, &ordinary) / factor;
  if (!(absmax >= LC_TINY)) scale = 0, memset(codes, 0, (size_t)(size * job.bits + 7) / 8);
  return finish_block(scale, flags, job, first);
}

#ifdef LC_X86
constexpr int64_t USUAL_BLOCK = 4096;  // 64 * 8 * 8, and a power of 4: the last pass is of eight, without a factor

bool usual(int64_t size, const Layout& job, int mode) {
  return fast(size) && size == USUAL_BLOCK && job.bits == 1 && mode == LC_EDEN_BIASED;
}

// One bit, the usual size. False where the block needs encode_block.
template <class Source>
LC_INLINE bool encode_usual_avx2(const Source source, const Layout& job, int64_t first, Memory& w) {
  rotate_below_64_avx2(source, w.signs, USUAL_BLOCK, w.y);
  pass<8>(w.y, USUAL_BLOCK, 64);
  const float sum = signs_of_last_pass_avx2(w.y, USUAL_BLOCK / 8, job.codes_at(first));
  const float l1 = sum * Factor(USUAL_BLOCK).on_scale;
  if (!proves_ordinary(l1, 0, USUAL_BLOCK, 1)) return false;
  lc_store_float(job.scale_at(first), l1 / (float)USUAL_BLOCK);
  return true;
}

LC_AVX2 bool encode_direct_usual_avx2(const float* x, const Layout& job, int64_t first, Memory& w) {
  return encode_usual_avx2(Direct{x}, job, first, w);
}

LC_AVX2 bool correct_and_encode_usual_avx2(const float* x, const float* residual, float decay, const Layout& job,
                                           int64_t first, Memory& w) {
  return encode_usual_avx2(Corrected{x, residual, _mm256_set1_ps(decay), w.p}, job, first, w);
}
#endif

// ---- decoding a block: w.y = H(S c), without the signs and, where it is exact, with 1/sqrt(P) in S

void fill_levels_portable(const uint8_t* codes, int64_t size, int bits, float scale, float* y) {
  for (int64_t i = 0; i < size; ++i) {
    const int code = get_code(codes, i, bits);
    y[i] = scale * (bits == 1 ? 1.0f - 2.0f * (float)code : lc_eden_level(code, bits));
  }
}

#ifdef LC_X86
// Hadamard transforms of the eight signs that a byte of bits stands for.
struct ByteTransforms {
  alignas(32) float rows[256][8];

  ByteTransforms() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int i = 0; i < 8; ++i) rows[byte][i] = byte >> i & 1 ? -1.0f : 1.0f;
      hadamard_portable(rows[byte], 8, 1);
    }
  }
};
const ByteTransforms byte_transforms;

// Strides 1, 2 and 4 of S times the signs: whole multiples of S up to 8, so that one rounding gives what three give.
LC_AVX2 void inverse_signs_avx2(const uint8_t* codes, int64_t size, float scale, float* y) {
  const __m256 s = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < size; i += 64) {
    __m256 v[8];
    for (int r = 0; r < 8; ++r) v[r] = _mm256_mul_ps(s, _mm256_load_ps(byte_transforms.rows[codes[i / 8 + r]]));
    store64(v, y + i);
  }
  hadamard_from_64_avx2(y, size);
}

template <int BITS>
LC_AVX2 void inverse_levels_avx2(const uint8_t* codes, int64_t size, float scale, float* y) {
  const __m256i shift = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(BITS));
  const __m256 s = _mm256_set1_ps(scale), low = level_table(BITS, 0), high = level_table(BITS, 8);
  for (int64_t i = 0; i < size; i += 64) {
    __m256 v[8];
    for (int r = 0; r < 8; ++r) {
      const __m256i word = _mm256_srlv_epi32(lc_load_word(codes + (i / 8 + r) * BITS), shift);
      const __m256i code = _mm256_and_si256(word, _mm256_set1_epi32((1 << BITS) - 1));
      v[r] = butterflies_inside(_mm256_mul_ps(s, look_up<BITS>(code, low, high)));
    }
    store64(v, y + i);
  }
  hadamard_from_64_avx2(y, size);
}
#endif

// `codes` may be read up to 3 bytes past their end.
void unrotate(const uint8_t* codes, int64_t size, int bits, float scale, float* y) {
  const Factor factor(size);
  scale *= factor.on_scale;
#ifdef LC_X86
  const bool multiples_exact = std::fabs(scale) <= 0x1p120f;
  if (fast(size) && (bits > 1 || multiples_exact)) {
    const auto run = bits == 1   ? inverse_signs_avx2
                     : bits == 2 ? inverse_levels_avx2<2>
                     : bits == 3 ? inverse_levels_avx2<3>
                                 : inverse_levels_avx2<4>;
    run(codes, size, scale, y);
    if (factor.on_elements != 1) scale_avx2(y, size, factor.on_elements);
    return;
  }
#endif
  fill_levels_portable(codes, size, bits, scale, y);
  hadamard_portable(y, size, 1);
  for (int64_t i = 0; factor.on_elements != 1 && i < size; ++i) y[i] *= factor.on_elements;
}

enum Use { WRITE, STREAM, ADD, SUBTRACT, STREAM_DIFFERENCE };

#ifdef LC_X86
// How a decoded block leaves, the signs D applied: out = y, out += weight y, or out = p - y.
template <int USE>
LC_AVX2 void emit_avx2(const float* y, const uint32_t* signs, int64_t m, float weight, const float* p, float* out) {
  const __m256 w = _mm256_set1_ps(weight);
  for (int64_t i = 0; i < m; i += 32) {
    if (USE == ADD) lc_prefetch32(out + i);
    for (int r = 0; r < 4; ++r) {
      const int64_t k = i + 8 * r;
      __m256 v = flip(_mm256_load_ps(y + k), signs, k);
      if (USE == ADD) v = _mm256_add_ps(_mm256_loadu_ps(out + k), weight == 1 ? v : _mm256_mul_ps(w, v));
      if (USE == SUBTRACT || USE == STREAM_DIFFERENCE) v = _mm256_sub_ps(_mm256_loadu_ps(p + k), v);
      if (USE == STREAM || USE == STREAM_DIFFERENCE)
        _mm256_stream_ps(out + k, v);
      else
        _mm256_storeu_ps(out + k, v);
    }
  }
}
#endif

void emit(const float* y, const uint32_t* signs, int64_t first, int64_t m, Use use, float weight, const float* p,
          float* out) {
  int64_t i = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2 && first % 128 == 0) {
    const auto run = use == WRITE      ? emit_avx2<WRITE>
                     : use == STREAM   ? emit_avx2<STREAM>
                     : use == ADD      ? emit_avx2<ADD>
                     : use == SUBTRACT ? emit_avx2<SUBTRACT>
                                       : emit_avx2<STREAM_DIFFERENCE>;
    i = m / 32 * 32;
    run(y, signs, i, weight, p, out);
  }
#endif
  for (; i < m; ++i) {
    const float v = sign_bit(signs, first % 128 + i) ? -y[i] : y[i];
    out[i] = use == ADD ? out[i] + (weight == 1 ? v : weight * v) : use >= SUBTRACT ? p[i] - v : v;
  }
}

// w.y and w.signs of one block of a body.
void decode_block(const Layout& job, int64_t first, Memory& w) {
  const int64_t size = job.coordinates(first), bytes = (size * job.bits + 7) / 8;
  const uint8_t* codes = job.codes_at(first);
  const float scale = lc_load_float(job.scale_at(first));
  if (scale == 0) {
    memset(w.y, 0, (size_t)size * 4);
    memset(w.signs, 0, (size_t)(size / 32 + 4) * 4);
    return;
  }
  if (codes + bytes + 3 > job.codes + job.code_bytes()) codes = (const uint8_t*)memcpy(w.codes, codes, (size_t)bytes);
  unrotate(codes, size, job.bits, scale, w.y);
}

int decode_all(const Layout& job, bool add, float weight, float* out, int threads) {
  const Use use = add ? ADD : lc_streams(out, job.n) && job.block % 8 == 0 ? STREAM : WRITE;
  return lc_parallel(job.blocks(), lc_thread_grain(job.block), threads, [&](int64_t begin, int64_t end) {
    Memory w;
    for (int64_t first = begin * job.block; first < end * job.block && first < job.n; first += job.block) {
      draw_signs(job, first, job.elements(first), w.signs);
      decode_block(job, first, w);
      emit(w.y, w.signs, first, job.elements(first), use, weight, nullptr, out + first);
    }
    lc_stream_fence();
    return 0;
  });
}

// The elements of a block as float32 with zeros behind them up to `size`.
const float* whole_block(const void* x, int dtype, int64_t first, int64_t m, int64_t size, float* buffer) {
  const float* p = lc_input(x, dtype, first, m, buffer);
  if (m == size) return p;
  if (p != buffer) memcpy(buffer, p, (size_t)m * 4);
  memset(buffer + m, 0, (size_t)(size - m) * 4);
  return buffer;
}

struct Feedback {  // at the first element of a block
  const float *x, *residual;
  float decay;
  float* candidate;
  bool stream;
};

int encode_corrected(const Feedback& f, const Layout& job, int mode, int64_t first, Memory& w) {
  const int64_t m = job.elements(first), size = job.coordinates(first);
#ifdef LC_X86
  if (usual(size, job, mode)) {
    if (correct_and_encode_usual_avx2(f.x, f.residual, f.decay, job, first, w)) return 0;
  } else
#endif
    lc_correct(f.x, f.residual, f.decay, m, w.p);
  memset(w.p + m, 0, (size_t)(size - m) * 4);
  return encode_block(w.p, m, size, job, mode, first, w);
}

int feedback_block(const Feedback& f, const Layout& job, int mode, int64_t first, Memory& w) {
  const int64_t m = job.elements(first);
  draw_signs(job, first, job.coordinates(first), w.signs);
  const int flags = encode_corrected(f, job, mode, first, w);
  decode_block(job, first, w);
  const Use use = f.stream && !flags ? STREAM_DIFFERENCE : SUBTRACT;
  emit(w.y, w.signs, first, m, use, 1.0f, w.p, f.candidate);
  for (int64_t i = 0; flags && i < m; ++i)
    if (!lc_finite(w.p[i])) f.candidate[i] = 0.0f;
  return flags;
}

}  // namespace

LC_API int32_t lc_eden_encode(const void* x, int32_t dtype, uint8_t* scales, uint8_t* codes, int64_t n, int64_t block,
                              int32_t bits, int32_t mode, uint64_t seed, uint32_t step, int32_t threads) {
  const Layout job{scales, codes, n, block, bits, seed, step};
  lc_zero_padding(codes, job.code_bytes());
  return lc_parallel(job.blocks(), lc_thread_grain(block), threads, [&](int64_t begin, int64_t end) {
    Memory w;
    int flags = 0;
    for (int64_t first = begin * block; first < end * block && first < n; first += block) {
      const int64_t m = job.elements(first), size = job.coordinates(first);
      const float* p = whole_block(x, dtype, first, m, size, w.p);
      draw_signs(job, first, size, w.signs);
#ifdef LC_X86
      if (usual(size, job, mode) && encode_direct_usual_avx2(p, job, first, w)) continue;
#endif
      flags |= encode_block(p, m, size, job, mode, first, w);
    }
    return flags;
  });
}

LC_API int32_t lc_eden_feedback(const float* x, const float* residual, float* candidate, float decay, uint8_t* scales,
                                uint8_t* codes, int64_t n, int64_t block, int32_t bits, int32_t mode, uint64_t seed,
                                uint32_t step, int32_t threads) {
  const Layout job{scales, codes, n, block, bits, seed, step};
  const bool stream = candidate != x && candidate != residual && lc_streams(candidate, n);
  lc_zero_padding(codes, job.code_bytes());
  return lc_parallel(job.blocks(), lc_thread_grain(block), threads, [&](int64_t begin, int64_t end) {
    Memory w;
    int flags = 0;
    for (int64_t first = begin * block; first < end * block && first < n; first += block) {
      flags |= feedback_block({x + first, residual + first, decay, candidate + first, stream}, job, mode, first, w);
    }
    lc_stream_fence();
    return flags;
  });
}

LC_API int32_t lc_eden_decode(uint8_t* scales, uint8_t* codes, float* out, int64_t n, int64_t block, int32_t bits,
                              uint64_t seed, uint32_t step, int32_t threads) {
  return decode_all({scales, codes, n, block, bits, seed, step}, false, 1.0f, out, threads);
}

LC_API int32_t lc_eden_decode_add(uint8_t* scales, uint8_t* codes, float* acc, float weight, int64_t n, int64_t block,
                                  int32_t bits, uint64_t seed, uint32_t step, int32_t threads) {
  return decode_all({scales, codes, n, block, bits, seed, step}, true, weight, acc, threads);
}

// H of every row in place; size is a power of two.
LC_API int32_t lc_hadamard(float* rows, int64_t count, int64_t size, int32_t threads) {
  return lc_parallel(count, MAX_BLOCK / size + 1, threads, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* y = rows + r * size;
#ifdef LC_X86
      static const uint32_t no_signs[MAX_BLOCK / 32 + 16] = {};
      if (fast(size) && size <= MAX_BLOCK && (uintptr_t)y % 32 == 0) {
        rotate_avx2(y, no_signs, size, y);
        continue;
      }
#endif
      hadamard_portable(y, size, 1);
    }
    return 0;
  });
}
