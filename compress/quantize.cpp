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

constexpr int highest_code(int bits, bool affine) { return (1 << (affine ? bits : bits - 1)) - 1; }

Grid symmetric_grid(const Body& body, float absmax) {
  const int highest = highest_code(body.bits, false);
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
  const int highest = highest_code(body.bits, true);
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
  float buffer[LC_MAX_BLOCK], p[LC_MAX_BLOCK];
  bool bad[LC_MAX_BLOCK];
  memcpy(p, lc_view(task.source, begin, count, buffer), count * sizeof(float));
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

// ---- AVX2: 2, 4 and 8 bits, blocks of whole 64 elements

#ifdef LC_X86

// 64 codes, eight to a vector, become 64, 32 or 16 bytes.
template <int bits, bool affine>
LC_AVX2_INLINE void store_codes(uint8_t* out, const __m256i q[8], bool clamped) {
  __m256i halves[2];
  for (int i = 0; i < 2; ++i) {
    const __m256i low = _mm256_packs_epi32(q[4 * i], q[4 * i + 1]), high = _mm256_packs_epi32(q[4 * i + 2], q[4 * i + 3]);
    halves[i] = affine ? _mm256_packus_epi16(low, high) : _mm256_packs_epi16(low, high);
    if (!clamped) continue;
    const __m256i highest = _mm256_set1_epi8((char)highest_code(bits, affine));
    const __m256i lowest = _mm256_set1_epi8((char)-highest_code(bits, affine));
    halves[i] = affine ? _mm256_min_epu8(halves[i], highest)
                       : _mm256_min_epi8(_mm256_max_epi8(halves[i], lowest), highest);
  }
  if (bits == 8) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_store_si256((__m256i*)out, _mm256_permutevar8x32_epi32(halves[0], order));
    _mm256_store_si256((__m256i*)(out + 32), _mm256_permutevar8x32_epi32(halves[1], order));
    return;
  }
  const __m256i mask = _mm256_set1_epi8((1 << bits) - 1), join = _mm256_set1_epi16((short)(1 | 1 << (bits + 8)));
  const __m256i a = _mm256_maddubs_epi16(_mm256_and_si256(halves[0], mask), join);
  const __m256i b = _mm256_maddubs_epi16(_mm256_and_si256(halves[1], mask), join);
  const __m256i bytes = _mm256_packus_epi16(a, b);  // the first halves of q[0] .. q[7], then the second halves
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

struct Segment {  // some blocks that are encoded together
  int64_t first, blocks;
  float low[LC_SEGMENT / 64 + 8], step[LC_SEGMENT / 64 + 8], inverse[LC_SEGMENT / 64 + 8];
  uint32_t absmax[LC_SEGMENT / 64 + 8];
  alignas(32) float buffer[LC_MAX_BLOCK];
  alignas(32) uint8_t codes[LC_MAX_BLOCK];
};

LC_AVX2 void symmetric_grids_avx2(const Body& body, Segment& s) {
  if (body.scale == SCALE_F32) {
    for (int64_t b = 0; b < s.blocks; b += 8)
      lc_scales8_avx2(s.absmax + b, (float)highest_code(body.bits, false), s.step + b, s.inverse + b);
    memcpy(body.scales + 4 * s.first, s.step, 4 * (size_t)s.blocks);
    return;
  }
  for (int64_t b = 0; b < s.blocks; ++b) {
    const Grid grid = symmetric_grid(body, lc_float(s.absmax[b]));
    s.step[b] = grid.step, s.inverse[b] = grid.inverse;
    store_grid(body, s.first + b, grid);
  }
}

// False where a block has elements that must be clipped.
LC_AVX2 bool affine_grids_avx2(const Body& body, Segment& s, const float* p) {
  for (int64_t b = 0; b < s.blocks; ++b, p += body.block) {
    if (s.absmax[b] > lc_bits(AFFINE_LIMIT)) return false;
    __m256 low = _mm256_loadu_ps(p), high = low;
    for (int64_t i = 8; i < body.block; i += 8) {
      low = _mm256_min_ps(low, _mm256_loadu_ps(p + i));
      high = _mm256_max_ps(high, _mm256_loadu_ps(p + i));
    }
    alignas(32) float lows[8], highs[8];
    _mm256_store_ps(lows, low);
    _mm256_store_ps(highs, high);
    for (int j = 1; j < 8; ++j) {
      lows[0] = lows[j] < lows[0] ? lows[j] : lows[0];
      highs[0] = highs[j] > highs[0] ? highs[j] : highs[0];
    }
    const Grid grid = affine_grid(body, lows[0], highs[0]);
    s.low[b] = grid.low, s.step[b] = grid.step, s.inverse[b] = grid.inverse;
    store_grid(body, s.first + b, grid);
  }
  return true;
}

template <int bits, bool affine, bool stochastic, bool feedback>
LC_AVX2_INLINE void quantize_block(const Task& task, const LcPhilox& noise, const float* p, Segment& s, int64_t b,
                                   bool clamped) {
  const __m256 low = _mm256_set1_ps(s.low[b]), step = _mm256_set1_ps(s.step[b]);
  const __m256 inverse = _mm256_set1_ps(s.inverse[b]);
  const float top = (float)highest_code(bits, affine);
  const __m256 highest = _mm256_set1_ps(top), lowest = _mm256_set1_ps(affine ? 0.0f : -top);
  const int64_t block = task.body.block, at = b * block, begin = s.first * block + at;
  for (int64_t i = 0; i < block; i += 64) {
    lc_prefetch64(task.source, begin + s.blocks * block + i);
    __m256i q[8];
    __m256 u[4];
    for (int j = 0; j < 8; ++j) {
      const __m256 x = _mm256_loadu_ps(p + at + i + 8 * j);
      __m256 y = _mm256_mul_ps(affine ? _mm256_sub_ps(x, low) : x, inverse);
      if (stochastic) {
        if (j % 4 == 0) noise.uniform32((uint64_t)(begin + i + 8 * j) / 4, u);
        y = _mm256_floor_ps(_mm256_add_ps(y, u[j % 4]));
      }
      if (feedback && clamped) y = _mm256_min_ps(_mm256_max_ps(y, lowest), highest);
      q[j] = _mm256_cvtps_epi32(y);
      if (feedback) {
        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(q[j]), step);
        _mm256_storeu_ps(task.candidate + begin + i + 8 * j, _mm256_sub_ps(x, affine ? _mm256_add_ps(low, value) : value));
      }
    }
    store_codes<bits, affine>(s.codes + (at + i) * bits / 8, q, clamped);
  }
}

template <int bits, bool affine, bool stochastic, bool feedback>
LC_AVX2 int encode_segments_avx2(const Task& task, int64_t first, int64_t last) {
  const Body& body = task.body;
  const int64_t block = body.block, per_segment = block < LC_SEGMENT ? LC_SEGMENT / block : 1;
  const bool stream = (body.n * bits + 7) / 8 >= LC_STREAM_BYTES && ((uintptr_t)body.codes & 31) == 0 &&
                      block * bits % 256 == 0;
  // the noise, or a scale in another format, can carry a code out of the range
  const bool clamped = stochastic || body.scale != SCALE_F32;
  const LcPhilox noise(task.noise.seed, task.noise.stream, task.noise.step);
  Segment s;
  memset(s.absmax, 0, sizeof(s.absmax));
  int flags = 0;
  for (s.first = first; s.first < last; s.first += s.blocks) {
    s.blocks = last - s.first < per_segment ? last - s.first : per_segment;
    const float* p = lc_prepare_avx2(task.source, s.first * block, s.blocks, block, s.buffer, s.absmax);
    if (!p || (affine && !affine_grids_avx2(body, s, p))) {
      flags |= encode_blocks(task, s.first, s.first + s.blocks);
      continue;
    }
    if (!affine) symmetric_grids_avx2(body, s);
    for (int64_t b = 0; b < s.blocks; ++b)
      quantize_block<bits, affine, stochastic, feedback>(task, noise, p, s, b, clamped);
    lc_copy_out_avx2(body.codes_of(s.first), s.codes, s.blocks * block * bits / 8, stream);
  }
  if (stream) _mm_sfence();
  return flags;
}

template <int bits, bool affine>
int encode_blocks_avx2(const Task& task, int64_t first, int64_t last) {
  const int64_t full = task.body.n / task.body.block, whole = last < full ? last : full;
  const bool noisy = task.noise.stochastic, feedback = task.candidate != nullptr;
  const int flags = noisy      ? feedback ? encode_segments_avx2<bits, affine, true, true>(task, first, whole)
                                          : encode_segments_avx2<bits, affine, true, false>(task, first, whole)
                    : feedback ? encode_segments_avx2<bits, affine, false, true>(task, first, whole)
                               : encode_segments_avx2<bits, affine, false, false>(task, first, whole);
  return whole < last ? flags | encode_blocks(task, whole > first ? whole : first, last) : flags;
}

LcTable16 code_table(int bits, bool affine) {
  LcTable16 table;
  const int sign = affine ? 0 : 1 << (bits - 1);
  for (int i = 0; i < 16; ++i) {
    const int code = bits == 4 ? i : (i | i >> 2) & 3;  // a 2-bit code stands in the lower or the upper half
    table.set(i, (float)((code ^ sign) - sign));
  }
  return table;
}

// Values of 32 codes, without the scale.
template <int bits, bool affine>
LC_AVX2_INLINE void expand32(const uint8_t* codes, __m256i upper, __m256i lower, __m256 values[4]) {
  if (bits < 8) return lc_look_up32_avx2(lc_spread32_avx2<bits < 8 ? bits : 4>(codes), upper, lower, values);
  for (int j = 0; j < 4; ++j) {
    const __m128i eight = _mm_loadl_epi64((const __m128i*)(codes + 8 * j));
    values[j] = _mm256_cvtepi32_ps(affine ? _mm256_cvtepu8_epi32(eight) : _mm256_cvtepi8_epi32(eight));
  }
}

template <int bits, bool affine, LcEmit mode>
LC_AVX2 void decode_full_avx2(const Body& body, int64_t first, int64_t last, float* out, float weight) {
  const __m256 w = _mm256_set1_ps(weight);
  const LcTable16 table = code_table(bits, affine);
  const __m256i upper = lc_table_avx2(table.upper), lower = lc_table_avx2(table.lower);
  const uint8_t* codes = body.codes_of(first);
  float* to = out + first * body.block;
  for (int64_t b = first; b < last; ++b) {
    const Grid grid = load_grid(body, b);
    const __m256 step = _mm256_set1_ps(grid.step), low = _mm256_set1_ps(grid.low);
    for (int64_t i = 0; i < body.block; i += 32, codes += 4 * bits, to += 32) {
      __m256 values[4];
      expand32<bits, affine>(codes, upper, lower, values);
      for (int j = 0; j < 4; ++j) {
        const __m256 value = _mm256_mul_ps(values[j], step);
        lc_emit8_avx2<mode>(to + 8 * j, affine ? _mm256_add_ps(low, value) : value, w);
      }
    }
  }
  if (mode == LC_STREAM) _mm_sfence();
}

template <int bits, bool affine>
void decode_blocks_avx2(const Body& body, int64_t first, int64_t last, float* out, LcEmit mode, float weight) {
  const int64_t full = body.n / body.block, whole = last < full ? last : full;
  if (mode == LC_STORE) decode_full_avx2<bits, affine, LC_STORE>(body, first, whole, out, weight);
  if (mode == LC_STREAM) decode_full_avx2<bits, affine, LC_STREAM>(body, first, whole, out, weight);
  if (mode == LC_ADD) decode_full_avx2<bits, affine, LC_ADD>(body, first, whole, out, weight);
  if (mode == LC_ADD_WEIGHTED) decode_full_avx2<bits, affine, LC_ADD_WEIGHTED>(body, first, whole, out, weight);
  if (whole < last) decode_blocks(body, whole > first ? whole : first, last, out, mode, weight);
}

// The kernels of a width and kind, or null pointers: the portable ones are used then.
struct Fast {
  int (*encode)(const Task&, int64_t, int64_t);
  void (*decode)(const Body&, int64_t, int64_t, float*, LcEmit, float);
};

template <int bits>
Fast fast_of_width(bool affine) {
  return affine ? Fast{encode_blocks_avx2<bits, true>, decode_blocks_avx2<bits, true>}
                : Fast{encode_blocks_avx2<bits, false>, decode_blocks_avx2<bits, false>};
}

Fast fast(const Body& body) {
  if (lc_active_level < LC_LEVEL_AVX2 || body.block % 64) return {};
  return body.bits == 8   ? fast_of_width<8>(body.affine)
         : body.bits == 4 ? fast_of_width<4>(body.affine)
         : body.bits == 2 ? fast_of_width<2>(body.affine)
                          : Fast{};
}
#endif

int encode_range(const Task& task, int64_t first, int64_t last) {
#ifdef LC_X86
  if (const auto encode = fast(task.body).encode) return encode(task, first, last);
#endif
  return encode_blocks(task, first, last);
}

void decode_range(const Body& body, int64_t first, int64_t last, float* out, LcEmit mode, float weight) {
#ifdef LC_X86
  if (const auto decode = fast(body).decode) return decode(body, first, last, out, mode, weight);
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
