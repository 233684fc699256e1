// The frame of the block quantizers (quantize.cpp, float8.cpp, e3m0.cpp). A format says how one block is scaled and one
// element coded; everything here is the same for all of them: reading the input, error feedback, the sections of the
// body, segments, decoded values.
//
// A portable format has
//   bits                        width of a code
//   struct Grid                 what a block's scale gives
//   int adjust(p, count)        changes finite values that it cannot code, returns flags
//   Grid grid(p, count)         from the values of a block
//   void store(at, grid)        into the scales section; Grid load(at)
//   uint32_t code(grid, x, i)   of element i of the vector
//   float value(grid, code)
// an AVX2 encoder
//   bool scale(task, segment, p)                     scales of a segment; false where the portable code must do it
//   void encode<feedback>(task, segment, p, b)       codes of block b of the segment
// and an AVX2 decoder, small enough to live in registers
//   bits
//   void load(at)                                    the scale of a block
//   void expand(codes, values)                       32 values
#pragma once
#include "bits.h"
#include "input.h"
#include "kernels.h"
#include "numbers.cuh"

enum { LC_SATURATED = 8 };  // codec.py

constexpr int LC_MAX_BLOCK = 4096;  // blocks up to this size are encoded by kernels; they stay in the first-level cache
constexpr int LC_SEGMENT = 512;     // elements encoded at a time: few, so that loading and computing overlap

struct LcBlockBody {
  int64_t n, block;
  int bits, scale_bytes;
  uint8_t *scales, *codes;

  LcBlockBody(const uint8_t* bytes, int64_t n_, int64_t block_, int bits_, int scale_bytes_)
      : n(n_), block(block_), bits(bits_), scale_bytes(scale_bytes_), scales((uint8_t*)bytes) {
    codes = scales + (blocks() * scale_bytes + 3) / 4 * 4;
  }
  int64_t blocks() const { return (n + block - 1) / block; }
  int64_t full_blocks() const { return n / block; }
  int length(int64_t b) const { return (int)(n - b * block < block ? n - b * block : block); }
  uint8_t* scale_of(int64_t b) const { return scales + b * scale_bytes; }
  uint8_t* codes_of(int64_t b) const { return codes + b * block * bits / 8; }
  void clear_padding() const {
    for (int64_t i = blocks() * scale_bytes; i % 4; ++i) scales[i] = 0;
    for (int64_t i = (n * bits + 7) / 8; i % 4; ++i) codes[i] = 0;
  }
  // A thread's share is a multiple of this many blocks: whole bytes of codes, and enough work to pay for a thread.
  int64_t grain() const { return ((16384 + block - 1) / block + 7) / 8 * 8; }
};

// What is encoded: x, or decay * residual + x where there is a residual (then x is float32).
struct LcSource {
  const void* x;
  int32_t dtype;
  const float* residual;
  float decay;
};

struct LcBlockTask {
  LcBlockBody body;
  LcSource source;
  float* candidate;  // the new residual, or null; may be x or the residual
};

// Elements [begin, begin + count) as float32: in place where they already are, else in `buffer`.
static inline const float* lc_view(const LcSource& s, int64_t begin, int64_t count, float* buffer) {
  if (!s.residual) return lc_input(s.x, s.dtype, begin, count, buffer);
  const float *x = (const float*)s.x + begin, *r = s.residual + begin;
  for (int64_t i = 0; i < count; ++i) buffer[i] = (s.decay == 1.0f ? r[i] : s.decay * r[i]) + x[i];
  return buffer;
}

// Replace NaN and infinities by zero and return the flags; bad[i] tells which ones.
static inline int lc_clean(float* p, int count, bool* bad) {
  int flags = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = lc_magnitude(p[i]);
    bad[i] = magnitude >= LC_INFINITY_BITS;
    if (bad[i]) flags |= magnitude > LC_INFINITY_BITS ? LC_HAS_NAN : LC_HAS_INF, p[i] = 0.0f;
  }
  return flags;
}

static inline float lc_absmax(const float* p, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = lc_magnitude(p[i]) > largest ? lc_magnitude(p[i]) : largest;
  return lc_float(largest);
}

template <class Format>
int lc_encode_block(const LcBlockTask& task, Format& format, int64_t b, LcBitWriter& out) {
  const int count = task.body.length(b);
  const int64_t begin = b * task.body.block;
  float buffer[LC_MAX_BLOCK], original[LC_MAX_BLOCK], p[LC_MAX_BLOCK];
  bool bad[LC_MAX_BLOCK];
  memcpy(original, lc_view(task.source, begin, count, buffer), count * sizeof(float));
  int flags = lc_clean(original, count, bad);
  memcpy(p, original, count * sizeof(float));
  flags |= format.adjust(p, count);
  const typename Format::Grid grid = format.grid(p, count);
  format.store(task.body.scale_of(b), grid);
  for (int i = 0; i < count; ++i) {
    const uint32_t code = format.code(grid, p[i], begin + i);
    out.put(code, task.body.bits);
    if (task.candidate) task.candidate[begin + i] = bad[i] ? 0.0f : original[i] - format.value(grid, code);
  }
  return flags;
}

template <class Format>
int lc_encode_blocks(const LcBlockTask& task, Format format, int64_t first, int64_t last) {
  LcBitWriter out(task.body.codes_of(first));
  int flags = 0;
  for (int64_t b = first; b < last; ++b) flags |= lc_encode_block(task, format, b, out);
  out.finish();
  return flags;
}

// How decoded values leave: overwrite, overwrite past the caches, add, add times weight.
enum LcEmit { LC_STORE, LC_STREAM, LC_ADD, LC_ADD_WEIGHTED };

static inline LcEmit lc_emit_mode(const float* out, int64_t n, int add, float weight) {
  if (add) return weight == 1.0f ? LC_ADD : LC_ADD_WEIGHTED;
  return n * 4 >= LC_STREAM_BYTES && ((uintptr_t)out & 31) == 0 ? LC_STREAM : LC_STORE;
}

struct LcOutput {
  float* out;
  LcEmit mode;
  float weight;

  void emit(int64_t i, float value) const {
    out[i] = mode <= LC_STREAM ? value : out[i] + (mode == LC_ADD ? value : weight * value);
  }
};

template <class Format>
void lc_decode_blocks(const LcBlockBody& body, const Format& format, int64_t first, int64_t last, const LcOutput& to) {
  LcBitReader in(body.codes_of(first));
  for (int64_t b = first; b < last; ++b) {
    const typename Format::Grid grid = format.load(body.scale_of(b));
    for (int i = 0; i < body.length(b); ++i) to.emit(b * body.block + i, format.value(grid, in.get(body.bits)));
  }
}

#ifdef LC_X86
#define LC_AVX2_INLINE LC_AVX2 __attribute__((always_inline)) static inline
#define LC_AVX2_MEMBER LC_AVX2 __attribute__((always_inline)) inline

constexpr int LC_SEGMENT_BLOCKS = LC_SEGMENT / 64;  // kernels take blocks of whole 64 elements

struct LcSegment {  // some whole blocks that are encoded together; arrays have room for whole vectors
  int64_t first, blocks;
  uint32_t absmax[LC_SEGMENT_BLOCKS + 8] = {};
  float low[LC_SEGMENT_BLOCKS + 8], step[LC_SEGMENT_BLOCKS + 8], inverse[LC_SEGMENT_BLOCKS + 8];
  alignas(32) float buffer[LC_MAX_BLOCK];
  alignas(32) uint8_t codes[LC_MAX_BLOCK];
};

LC_AVX2_INLINE int lc_max8_avx2(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1)));
}

// Bits of the absolute maximum; at least LC_INFINITY_BITS where something is not finite. count % 32 == 0.
LC_AVX2_INLINE uint32_t lc_absmax_bits_avx2(const float* p, int64_t count) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < count; i += 32)
    for (int j = 0; j < 4; ++j)
      m[j] = _mm256_max_epi32(m[j], _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(p + i + 8 * j)), mask));
  return (uint32_t)lc_max8_avx2(_mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
}

// out = decay * residual + x, and the bits of its absolute maximum, in one pass. count % 32 == 0.
template <bool decays>
LC_AVX2_INLINE uint32_t lc_add_absmax_avx2(const float* x, const float* residual, float decay, int64_t count,
                                           float* out) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)), d = _mm256_set1_ps(decay);
  __m256i m[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < count; i += 32)
    for (int j = 0; j < 4; ++j) {
      __m256 r = _mm256_loadu_ps(residual + i + 8 * j);
      if (decays) r = _mm256_mul_ps(d, r);
      const __m256 p = _mm256_add_ps(r, _mm256_loadu_ps(x + i + 8 * j));
      _mm256_storeu_ps(out + i + 8 * j, p);
      m[j] = _mm256_max_epi32(m[j], _mm256_castps_si256(_mm256_and_ps(p, mask)));
    }
  return (uint32_t)lc_max8_avx2(_mm256_max_epi32(_mm256_max_epi32(m[0], m[1]), _mm256_max_epi32(m[2], m[3])));
}

// A segment as float32, in place or in its buffer, and the bits of its absolute maxima. Null where something is not
// finite: that is rare, and the portable code deals with it.
LC_AVX2 static inline const float* lc_prepare_avx2(const LcBlockTask& task, LcSegment& s) {
  const LcSource& source = task.source;
  const int64_t block = task.body.block, begin = s.first * block;
  const float* p = s.buffer;
  uint32_t largest = 0;
  if (!source.residual) p = lc_input(source.x, source.dtype, begin, s.blocks * block, s.buffer);
  for (int64_t b = 0, at = 0; b < s.blocks; ++b, at += block) {
    const float *x = (const float*)source.x + begin + at, *r = source.residual + begin + at;
    s.absmax[b] = !source.residual       ? lc_absmax_bits_avx2(p + at, block)
                  : source.decay == 1.0f ? lc_add_absmax_avx2<false>(x, r, 1.0f, block, s.buffer + at)
                                         : lc_add_absmax_avx2<true>(x, r, source.decay, block, s.buffer + at);
    largest = s.absmax[b] > largest ? s.absmax[b] : largest;
  }
  return largest < LC_INFINITY_BITS ? p : nullptr;
}

// Fetches 64 inputs that come next while others are computed; measured 1.2 times as fast.
LC_AVX2_INLINE void lc_prefetch64(const LcSource& s, int64_t i) {
  for (int j = 0; j < 64; j += 16) {
    if (s.dtype == LC_F32) _mm_prefetch((const char*)((const float*)s.x + i + j), _MM_HINT_T0);
    if (s.residual) _mm_prefetch((const char*)(s.residual + i + j), _MM_HINT_T0);
  }
}

// lc_block_scale and levels / absmax for the blocks of a segment; both 0 for tiny blocks.
LC_AVX2 static inline void lc_scales_avx2(LcSegment& s, float levels) {
  const __m256 q = _mm256_set1_ps(levels), infinity = _mm256_castsi256_ps(_mm256_set1_epi32(LC_INFINITY_BITS));
  for (int64_t b = 0; b < s.blocks; b += 8) {
    const __m256 a = _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i*)(s.absmax + b)));
    const __m256 used = _mm256_cmp_ps(a, _mm256_set1_ps(LC_TINY), _CMP_GE_OQ);
    const __m256 scale = _mm256_div_ps(a, q), overflows = _mm256_cmp_ps(_mm256_mul_ps(scale, q), infinity, _CMP_EQ_OQ);
    const __m256i lowered = _mm256_add_epi32(_mm256_castps_si256(scale), _mm256_castps_si256(overflows));  // + -1
    _mm256_storeu_ps(s.step + b, _mm256_and_ps(_mm256_castsi256_ps(lowered), used));
    _mm256_storeu_ps(s.inverse + b, _mm256_and_ps(_mm256_div_ps(q, a), used));
  }
}

// 64 codes, as two vectors whose 4-byte groups alternate between their halves: what packs_epi32 and packs_epi16 make of
// eight vectors. They become 64 bytes, 32 or 16.
template <int bits>
LC_AVX2_INLINE void lc_store_codes_avx2(uint8_t* out, __m256i a, __m256i b) {
  if (bits == 8) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_store_si256((__m256i*)out, _mm256_permutevar8x32_epi32(a, order));
    _mm256_store_si256((__m256i*)(out + 32), _mm256_permutevar8x32_epi32(b, order));
    return;
  }
  const __m256i mask = _mm256_set1_epi8((1 << bits) - 1), join = _mm256_set1_epi16((short)(1 | 1 << (bits + 8)));
  a = _mm256_maddubs_epi16(_mm256_and_si256(a, mask), join);
  b = _mm256_maddubs_epi16(_mm256_and_si256(b, mask), join);
  const __m256i bytes = _mm256_packus_epi16(a, b);
  if (bits == 4) {
    const __m256i zip = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                         0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    _mm256_store_si256((__m256i*)out, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0xD8), zip));
    return;
  }
  const __m256i joined = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(1 | 1 << 12));
  const __m256i quads = _mm256_packus_epi16(joined, joined);
  _mm_store_si128((__m128i*)out,
                  _mm_unpacklo_epi8(_mm256_castsi256_si128(quads), _mm256_extracti128_si256(quads, 1)));
}

// Codes made in the cache go out past it where the body is large.
LC_AVX2_INLINE void lc_copy_out_avx2(uint8_t* out, const uint8_t* codes, int64_t bytes, bool stream) {
  if (!stream) {
    memcpy(out, codes, (size_t)bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256((__m256i*)(out + i), _mm256_load_si256((const __m256i*)(codes + i)));
}

template <bool feedback, class Fast, class Portable>
LC_AVX2 int lc_encode_segments_avx2(const LcBlockTask& task, const Fast& fast, const Portable& portable, int64_t first,
                                    int64_t last) {
  const LcBlockBody& body = task.body;
  const int64_t per_segment = body.block < LC_SEGMENT ? LC_SEGMENT / body.block : 1;
  const bool stream = (body.n * body.bits + 7) / 8 >= LC_STREAM_BYTES && ((uintptr_t)body.codes & 31) == 0 &&
                      body.block * body.bits % 256 == 0;
  LcSegment s;
  int flags = 0;
  for (s.first = first; s.first < last; s.first += s.blocks) {
    s.blocks = last - s.first < per_segment ? last - s.first : per_segment;
    const float* p = lc_prepare_avx2(task, s);
    if (!p || !fast.scale(task, s, p)) {
      flags |= lc_encode_blocks(task, portable, s.first, s.first + s.blocks);
      continue;
    }
    for (int64_t b = 0; b < s.blocks; ++b) fast.template encode<feedback>(task, s, p, b);
    lc_copy_out_avx2(body.codes_of(s.first), s.codes, s.blocks * body.block * body.bits / 8, stream);
  }
  if (stream) _mm_sfence();
  return flags;
}

// Blocks [first, last): whole ones by the AVX2 format, a partial one at the end by the portable format.
template <class Fast, class Portable>
int lc_encode_blocks_avx2(const LcBlockTask& task, const Fast& fast, const Portable& portable, int64_t first,
                          int64_t last) {
  const int64_t full = task.body.full_blocks(), whole = last < full ? last : full;
  const int flags = task.candidate ? lc_encode_segments_avx2<true>(task, fast, portable, first, whole)
                                   : lc_encode_segments_avx2<false>(task, fast, portable, first, whole);
  return whole < last ? flags | lc_encode_blocks(task, portable, whole > first ? whole : first, last) : flags;
}

// ---- decoding

// 16 or 8 bytes of 32 codes of 4 or 2 bits become one byte each; the halves of the result hold elements 0-3, 8-11,
// 16-19, 24-27 and the others. A 2-bit code stands in bits 0-1 or 2-3 of its byte.
template <int bits>
LC_AVX2_INLINE __m256i lc_spread32_avx2(const uint8_t* codes) {
  if (bits == 4) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13,  //
                                            2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15);
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes));
    const __m256i pairs = _mm256_shuffle_epi8(all, spread), upper = _mm256_srli_epi16(pairs, 4);
    return _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi16(0x000F)),
                           _mm256_and_si256(upper, _mm256_set1_epi16(0x0F00)));
  }
  const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6,  //
                                          1, 1, 1, 1, 3, 3, 3, 3, 5, 5, 5, 5, 7, 7, 7, 7);
  const __m256i all = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)codes));
  const __m256i quads = _mm256_shuffle_epi8(all, spread), upper = _mm256_srli_epi16(quads, 4);
  return _mm256_or_si256(_mm256_and_si256(quads, _mm256_set1_epi32(0x00000C03)),
                         _mm256_and_si256(upper, _mm256_set1_epi32(0x0C030000)));
}

// A table of 16 floats whose lower 16 bits are 0, looked up 32 codes at a time.
struct LcTable16 {
  __m256i upper, lower;

  template <class Value>
  LC_AVX2 explicit LcTable16(const Value& value_of) {
    alignas(32) uint8_t high[32], low[32];
    for (int i = 0; i < 32; ++i) {
      const uint32_t word = lc_bits(value_of(i % 16));
      high[i] = (uint8_t)(word >> 24), low[i] = (uint8_t)(word >> 16);
    }
    upper = _mm256_load_si256((const __m256i*)high), lower = _mm256_load_si256((const __m256i*)low);
  }
  LC_AVX2_MEMBER void look_up(__m256i spread, __m256 values[4]) const {
    const __m256i high = _mm256_shuffle_epi8(upper, spread), low = _mm256_shuffle_epi8(lower, spread);
    const __m256i zero = _mm256_setzero_si256();
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    values[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, a));
    values[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, a));
    values[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, b));
    values[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, b));
  }
};

template <LcEmit mode>
LC_AVX2_INLINE void lc_emit8_avx2(float* out, __m256 value, __m256 weight) {
  if (mode == LC_STORE) _mm256_storeu_ps(out, value);
  if (mode == LC_STREAM) _mm256_stream_ps(out, value);
  if (mode == LC_ADD) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), value));
  if (mode == LC_ADD_WEIGHTED) _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_mul_ps(weight, value)));
}

template <LcEmit mode, class Decoder>
LC_AVX2 void lc_decode_full_avx2(const LcBlockBody& body, const Decoder& decoder, int64_t first, int64_t last,
                                 const LcOutput& to) {
  const __m256 weight = _mm256_set1_ps(to.weight);
  const int64_t block = body.block;
  const uint8_t* codes = body.codes_of(first);
  float* out = to.out + first * block;
  Decoder local = decoder;  // in registers: stores through `out` may alias everything else
  for (int64_t b = first; b < last; ++b) {
    local.load(body.scale_of(b));
    for (int64_t i = 0; i < block; i += 32, codes += 4 * Decoder::bits, out += 32) {
      __m256 values[4];
      local.expand(codes, values);
      for (int j = 0; j < 4; ++j) lc_emit8_avx2<mode>(out + 8 * j, values[j], weight);
    }
  }
  if (mode == LC_STREAM) _mm_sfence();
}

template <class Decoder, class Portable>
void lc_decode_blocks_avx2(const LcBlockBody& body, const Decoder& decoder, const Portable& portable, int64_t first,
                           int64_t last, const LcOutput& to) {
  const int64_t full = body.full_blocks(), whole = last < full ? last : full;
  if (to.mode == LC_STORE) lc_decode_full_avx2<LC_STORE>(body, decoder, first, whole, to);
  if (to.mode == LC_STREAM) lc_decode_full_avx2<LC_STREAM>(body, decoder, first, whole, to);
  if (to.mode == LC_ADD) lc_decode_full_avx2<LC_ADD>(body, decoder, first, whole, to);
  if (to.mode == LC_ADD_WEIGHTED) lc_decode_full_avx2<LC_ADD_WEIGHTED>(body, decoder, first, whole, to);
  if (whole < last) lc_decode_blocks(body, portable, whole > first ? whole : first, last, to);
}

static inline bool lc_blocks_fit_avx2(const LcBlockBody& body) {
  return lc_active_level >= LC_LEVEL_AVX2 && body.block % 64 == 0;
}
#endif
