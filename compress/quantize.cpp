// Block integer quantizers (quantize.py): symmetric and affine, nearest and stochastic, 2 to 16 bits.
#include "bits.h"
#include "blocks.h"
#include "philox.h"

#include <cmath>

namespace {

enum { SCALE_F32 = 0, SCALE_BF16 = 1, SCALE_POW2 = 2 };

struct Body {  // sections and settings
  int64_t n, block;
  int bits, affine, scale;
  uint8_t *scales, *codes;

  int scale_bytes() const { return affine ? 8 : scale == SCALE_F32 ? 4 : scale == SCALE_BF16 ? 2 : 1; }
  int64_t blocks() const { return (n + block - 1) / block; }
  int length(int64_t b) const { return (int)(n - b * block < block ? n - b * block : block); }
  uint8_t* codes_of(int64_t b) const { return codes + b * block * bits / 8; }
};

struct Noise {
  int stochastic;
  uint64_t seed;
  uint32_t stream, step;
};

struct Task {
  Body body;
  LcSource source;
  float* candidate;
  Noise noise;
};

Body make_body(const uint8_t* bytes, int64_t n, int64_t block, int bits, int affine, int scale) {
  Body body = {n, block, bits, affine, scale, (uint8_t*)bytes, nullptr};
  body.codes = body.scales + (body.blocks() * body.scale_bytes() + 3) / 4 * 4;
  return body;
}

void clear_padding(const Body& body) {
  const int64_t scales = body.blocks() * body.scale_bytes(), codes = (body.n * body.bits + 7) / 8;
  for (int64_t i = scales; i % 4; ++i) body.scales[i] = 0;
  for (int64_t i = codes; i % 4; ++i) body.codes[i] = 0;
}

// code = round((x - low) * inverse) within [lowest, highest]; value = low + code * step.
struct Grid {
  float low, step, inverse;
  int lowest, highest;
};

Grid symmetric_grid(const Body& body, float absmax) {
  const int highest = (1 << (body.bits - 1)) - 1;
  Grid grid = {0.0f, 0.0f, 0.0f, -highest, highest};
  if (!(absmax >= LC_TINY)) return grid;
  const float levels = (float)highest;
  grid.step = lc_block_scale(absmax, levels);
  grid.inverse = levels / absmax;
  if (body.scale == SCALE_F32) return grid;
  // the next representable scale up, unless the largest code would then overflow
  if (body.scale == SCALE_BF16) {
    const uint32_t code = lc_bf16_up(grid.step);
    grid.step = lc_bf16_to_f32((uint16_t)(lc_finite(lc_bf16_to_f32((uint16_t)code) * levels) ? code : code - 1));
  } else {
    const uint32_t code = lc_pow2_up(grid.step);
    grid.step = lc_float((lc_finite(lc_float(code << 23) * levels) ? code : code - 1) << 23);
  }
  grid.inverse = 1.0f / grid.step;
  return grid;
}

Grid affine_grid(const Body& body, float low, float high) {
  const int highest = (1 << body.bits) - 1;
  Grid grid = {low + 0.0f, 0.0f, 0.0f, 0, highest};  // + 0 turns -0 into +0
  const float range = high - low;
  if (!(range >= LC_TINY)) return grid;
  grid.step = range / (float)highest;
  grid.inverse = (float)highest / range;
  return grid;
}

void store_grid(const Body& body, int64_t b, const Grid& grid) {
  uint8_t* at = body.scales + b * body.scale_bytes();
  const uint32_t bits = lc_bits(grid.step);
  if (body.affine) {
    memcpy(at, &grid.low, 4);
    memcpy(at + 4, &grid.step, 4);
  } else if (body.scale == SCALE_F32) {
    memcpy(at, &grid.step, 4);
  } else if (body.scale == SCALE_BF16) {
    const uint16_t half = (uint16_t)(bits >> 16);
    memcpy(at, &half, 2);
  } else {
    *at = (uint8_t)(bits >> 23);
  }
}

Grid load_grid(const Body& body, int64_t b) {
  const uint8_t* at = body.scales + b * body.scale_bytes();
  Grid grid = {0.0f, 0.0f, 0.0f, 0, 0};
  if (body.affine) {
    memcpy(&grid.low, at, 4);
    memcpy(&grid.step, at + 4, 4);
  } else if (body.scale == SCALE_F32) {
    memcpy(&grid.step, at, 4);
  } else if (body.scale == SCALE_BF16) {
    uint16_t half;
    memcpy(&half, at, 2);
    grid.step = lc_bf16_to_f32(half);
  } else {
    grid.step = lc_float((uint32_t)*at << 23);
  }
  return grid;
}

// ---- portable

constexpr float AFFINE_LIMIT = 8.507059173023462e37f;  // 2^126: the range of a block must not overflow

int clip(float* p, int count) {
  int flags = 0;
  for (int i = 0; i < count; ++i)
    if (!(fabsf(p[i]) <= AFFINE_LIMIT)) p[i] = p[i] < 0 ? -AFFINE_LIMIT : AFFINE_LIMIT, flags = LC_SATURATED;
  return flags;
}

Grid grid_of(const Body& body, const float* p, int count) {
  if (!body.affine) return symmetric_grid(body, lc_absmax(p, count));
  float low = AFFINE_LIMIT, high = -AFFINE_LIMIT;
  for (int i = 0; i < count; ++i) low = p[i] < low ? p[i] : low, high = p[i] > high ? p[i] : high;
  return affine_grid(body, low, high);
}

struct NoiseReader {  // uniforms of consecutive elements
  const Noise& noise;
  uint32_t words[4];
  float at(int64_t i, bool first) {
    if (first || i % 4 == 0) lc_philox((uint64_t)i / 4, noise.stream, noise.step, noise.seed, words);
    return lc_uniform(words[i % 4]);
  }
};

int code_of(const Grid& grid, float x, bool affine, const float* uniform) {
  const float y = (affine ? x - grid.low : x) * grid.inverse;
  const float rounded = uniform ? floorf(y + *uniform) : nearbyintf(y);
  return rounded < (float)grid.lowest ? grid.lowest : rounded > (float)grid.highest ? grid.highest : (int)rounded;
}

float value_of(const Grid& grid, int code, bool affine) {
  const float value = (float)code * grid.step;
  return affine ? grid.low + value : value;
}

int encode_block(const Task& task, int64_t b, LcBitWriter& out) {
  const Body& body = task.body;
  const int count = body.length(b);
  const int64_t begin = b * body.block;
  float p[LC_MAX_BLOCK];
  bool bad[LC_MAX_BLOCK];
  for (int i = 0; i < count; ++i) p[i] = lc_input(task.source, begin + i);
  int flags = lc_clean(p, count, bad);
  float original[LC_MAX_BLOCK];
  if (task.candidate) memcpy(original, p, count * sizeof(float));
  if (body.affine) flags |= clip(p, count);
  const Grid grid = grid_of(body, p, count);
  store_grid(body, b, grid);
  NoiseReader noise = {task.noise, {}};
  for (int i = 0; i < count; ++i) {
    const float u = task.noise.stochastic ? noise.at(begin + i, i == 0) : 0.0f;
    const int code = code_of(grid, p[i], body.affine, task.noise.stochastic ? &u : nullptr);
    out.put((uint32_t)code, body.bits);
    if (task.candidate) task.candidate[begin + i] = bad[i] ? 0.0f : original[i] - value_of(grid, code, body.affine);
  }
  return flags;
}

int encode_blocks(const Task& task, int64_t first, int64_t last) {
  LcBitWriter out(task.body.codes_of(first));
  int flags = 0;
  for (int64_t b = first; b < last; ++b) flags |= encode_block(task, b, out);
  out.finish();
  return flags;
}

void decode_blocks(const Body& body, int64_t first, int64_t last, float* out, LcEmit mode, float weight) {
  LcBitReader in(body.codes_of(first));
  const int unused = 32 - body.bits;
  for (int64_t b = first; b < last; ++b) {
    const Grid grid = load_grid(body, b);
    float* to = out + b * body.block;
    for (int i = 0; i < body.length(b); ++i) {
      const uint32_t code = in.get(body.bits);
      const int value = body.affine ? (int)code : (int)(code << unused) >> unused;
      lc_emit(to + i, value_of(grid, value, body.affine), mode, weight);
    }
  }
}

// ---- AVX2: symmetric 2, 4 and 8 bits, blocks of whole 64 elements

#ifdef LC_X86

// Codes of 32 elements as signed bytes, in order.
LC_AVX2_INLINE __m256i pack_bytes(const __m256i q[4]) {
  const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  return _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// 64 codes as signed bytes become 64, 32 or 16 bytes.
template <int bits>
LC_AVX2_INLINE void store_codes(uint8_t* out, __m256i a, __m256i b) {
  if (bits == 8) {
    _mm256_storeu_si256((__m256i*)out, a);
    _mm256_storeu_si256((__m256i*)(out + 32), b);
    return;
  }
  const __m256i mask = _mm256_set1_epi8((1 << bits) - 1), join = _mm256_set1_epi16((short)(1 | 1 << (bits + 8)));
  a = _mm256_maddubs_epi16(_mm256_and_si256(a, mask), join);
  b = _mm256_maddubs_epi16(_mm256_and_si256(b, mask), join);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xD8);
  if (bits == 4) {
    _mm256_storeu_si256((__m256i*)out, bytes);
    return;
  }
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(1 | 1 << 12));
  const __m256i quads = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0xD8);
  _mm_storeu_si128((__m128i*)out, _mm256_castsi256_si128(quads));
}

template <int bits, bool stochastic, bool clamped>
LC_AVX2_INLINE void quantize_block(const Task& task, const float* p, int64_t begin, const Grid& grid) {
  const Body& body = task.body;
  const __m256 inverse = _mm256_set1_ps(grid.inverse), step = _mm256_set1_ps(grid.step);
  const __m256 highest = _mm256_set1_ps((float)grid.highest), lowest = _mm256_set1_ps((float)grid.lowest);
  uint8_t* out = body.codes + begin * bits / 8;
  for (int i = 0; i < body.block; i += 64, out += 8 * bits) {
    __m256i q[8];
    __m256 u[2];
    for (int j = 0; j < 8; ++j) {
      __m256 y = _mm256_mul_ps(_mm256_loadu_ps(p + i + 8 * j), inverse);
      if (stochastic) {
        if (j % 2 == 0)
          lc_uniform16_avx2((uint64_t)(begin + i + 8 * j) / 4, task.noise.stream, task.noise.step, task.noise.seed, u);
        y = _mm256_floor_ps(_mm256_add_ps(y, u[j % 2]));
      }
      if (clamped) y = _mm256_min_ps(_mm256_max_ps(y, lowest), highest);
      q[j] = _mm256_cvtps_epi32(y);
      if (task.candidate) {
        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(q[j]), step);
        _mm256_storeu_ps(task.candidate + begin + i + 8 * j, _mm256_sub_ps(_mm256_loadu_ps(p + i + 8 * j), value));
      }
    }
    store_codes<bits>(out, pack_bytes(q), pack_bytes(q + 4));
  }
}

// clamped = false where no code can leave the range by itself: rounding to nearest with a float32 scale.
template <int bits, bool stochastic, bool clamped>
LC_AVX2 int encode_segments_avx2(const Task& task, int64_t first, int64_t last) {
  const Body& body = task.body;
  const int64_t per_segment = body.block < LC_SEGMENT ? LC_SEGMENT / body.block : 1;
  const int block = (int)body.block;
  alignas(32) float buffer[LC_MAX_BLOCK], clean[LC_MAX_BLOCK];
  int flags = 0;
  for (int64_t b = first; b < last;) {
    const int64_t end = b + per_segment < last ? b + per_segment : last;
    const float* p = lc_view_avx2(task.source, b * block, (int)((end - b) * block), buffer);
    for (; b < end; ++b, p += block) {
      const float* values = p;
      uint32_t absmax = lc_absmax_bits_avx2(p, block);
      if (absmax >= LC_INFINITY_BITS) {
        memcpy(clean, p, block * sizeof(float));
        flags |= lc_clean(clean, block, nullptr);
        absmax = lc_absmax_bits_avx2(values = clean, block);
      }
      const Grid grid = symmetric_grid(body, lc_float(absmax));
      store_grid(body, b, grid);
      quantize_block<bits, stochastic, clamped>(task, values, b * block, grid);
    }
  }
  return flags;
}

template <int bits>
int encode_blocks_avx2(const Task& task, int64_t first, int64_t last) {
  const int64_t full = task.body.n / task.body.block, whole = last < full ? last : full;
  int flags = task.noise.stochastic             ? encode_segments_avx2<bits, true, true>(task, first, whole)
              : task.body.scale == SCALE_F32 ? encode_segments_avx2<bits, false, false>(task, first, whole)
                                             : encode_segments_avx2<bits, false, true>(task, first, whole);
  return whole < last ? flags | encode_blocks(task, whole > first ? whole : first, last) : flags;
}

// Eight codes that follow one another become eight floats. Reads at most 8 bytes.
template <int bits>
LC_AVX2_INLINE __m256 expand8(const uint8_t* codes) {
  if (bits == 8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)codes)));
  int32_t word;
  memcpy(&word, codes, bits == 4 ? 4 : 2);
  const __m256i top = bits == 4 ? _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0)
                                : _mm256_setr_epi32(30, 28, 26, 24, 22, 20, 18, 16);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(word), top), 32 - bits));
}

template <int bits, LcEmit mode>
LC_AVX2 void decode_full_avx2(const Body& body, int64_t first, int64_t last, float* out, float weight) {
  const __m256 w = _mm256_set1_ps(weight);
  for (int64_t b = first; b < last; ++b) {
    const __m256 step = _mm256_set1_ps(load_grid(body, b).step);
    const uint8_t* codes = body.codes_of(b);
    float* to = out + b * body.block;
    for (int i = 0; i < body.block; i += 8)
      lc_emit8_avx2<mode>(to + i, _mm256_mul_ps(expand8<bits>(codes + i * bits / 8), step), w);
  }
  if (mode == LC_STREAM) _mm_sfence();
}

template <int bits>
void decode_blocks_avx2(const Body& body, int64_t first, int64_t last, float* out, LcEmit mode, float weight) {
  const int64_t full = body.n / body.block, whole = last < full ? last : full;
  if (mode == LC_STORE) decode_full_avx2<bits, LC_STORE>(body, first, whole, out, weight);
  if (mode == LC_STREAM) decode_full_avx2<bits, LC_STREAM>(body, first, whole, out, weight);
  if (mode == LC_ADD) decode_full_avx2<bits, LC_ADD>(body, first, whole, out, weight);
  if (mode == LC_ADD_WEIGHTED) decode_full_avx2<bits, LC_ADD_WEIGHTED>(body, first, whole, out, weight);
  if (whole < last) decode_blocks(body, whole > first ? whole : first, last, out, mode, weight);
}

bool has_avx2(const Body& body) {
  return lc_active_level >= LC_LEVEL_AVX2 && !body.affine && body.block % 64 == 0 &&
         (body.bits == 8 || body.bits == 4 || body.bits == 2);
}
#endif

int encode_range(const Task& task, int64_t first, int64_t last) {
#ifdef LC_X86
  if (has_avx2(task.body))
    return task.body.bits == 8   ? encode_blocks_avx2<8>(task, first, last)
           : task.body.bits == 4 ? encode_blocks_avx2<4>(task, first, last)
                                 : encode_blocks_avx2<2>(task, first, last);
#endif
  return encode_blocks(task, first, last);
}

void decode_range(const Body& body, int64_t first, int64_t last, float* out, LcEmit mode, float weight) {
#ifdef LC_X86
  if (has_avx2(body)) {
    if (body.bits == 8) return decode_blocks_avx2<8>(body, first, last, out, mode, weight);
    if (body.bits == 4) return decode_blocks_avx2<4>(body, first, last, out, mode, weight);
    return decode_blocks_avx2<2>(body, first, last, out, mode, weight);
  }
#endif
  decode_blocks(body, first, last, out, mode, weight);
}

}  // namespace

// block <= 4096. residual and candidate may be null; candidate may be x or residual.
LC_API int32_t lc_int_encode(const void* x, int32_t dtype, const float* residual, float decay, float* candidate,
                             int64_t n, int64_t block, int32_t bits, int32_t affine, int32_t scale, int32_t stochastic,
                             uint64_t seed, uint32_t stream, uint32_t step, uint8_t* out, int32_t threads) {
  const Task task = {make_body(out, n, block, bits, affine, scale),
                     {x, dtype, residual, decay},
                     candidate,
                     {stochastic, seed, stream, step}};
  clear_padding(task.body);
  return lc_parallel(task.body.blocks(), lc_block_grain(block), threads,
                     [&](int64_t first, int64_t last) { return encode_range(task, first, last); });
}

// Any block. add: out += weight * decoded, instead of out = decoded.
LC_API int32_t lc_int_decode(const uint8_t* bytes, int64_t n, int64_t block, int32_t bits, int32_t affine,
                             int32_t scale, float* out, int32_t add, float weight, int32_t threads) {
  const Body body = make_body(bytes, n, block, bits, affine, scale);
  const LcEmit mode = lc_emit_mode(out, n, add, weight);
  return lc_parallel(body.blocks(), lc_block_grain(block), threads, [&](int64_t first, int64_t last) {
    decode_range(body, first, last, out, mode, weight);
    return 0;
  });
}
