// Block integer quantizers (quantize.py): symmetric and affine, nearest and stochastic, 2 to 16 bits.
#include "blocks.h"
#include "integers.cuh"
#include "philox.h"

#include <cmath>

namespace {

struct IntFormat {
  using Grid = LcIntGrid;
  int bits;
  bool affine;
  int scale;
  bool stochastic;
  uint64_t seed;
  uint32_t stream, step;
  uint32_t words[4];
  int64_t words_at;

  int scale_bytes() const { return affine ? 8 : scale == LC_SCALE_F32 ? 4 : scale == LC_SCALE_BF16 ? 2 : 1; }

  int adjust(float* p, int count) const {
    if (!affine) return 0;
    int flags = 0;
    for (int i = 0; i < count; ++i)
      if (!(fabsf(p[i]) <= LC_AFFINE_LIMIT)) p[i] = lc_int_clip(p[i]), flags = LC_SATURATED;
    return flags;
  }

  Grid grid(const float* p, int count) const {
    if (!affine) return symmetric_grid(lc_absmax(p, count));
    float low = LC_AFFINE_LIMIT, high = -LC_AFFINE_LIMIT;
    for (int i = 0; i < count; ++i) low = p[i] < low ? p[i] : low, high = p[i] > high ? p[i] : high;
    return affine_grid(low, high);
  }

  Grid symmetric_grid(float absmax) const { return lc_int_symmetric_grid(absmax, bits, scale); }
  Grid affine_grid(float low, float high) const { return lc_int_affine_grid(low, high, bits); }

  void store(uint8_t* at, const Grid& grid) const {
    const uint32_t word = lc_bits(grid.step);
    const uint16_t half = (uint16_t)(word >> 16);
    if (affine) memcpy(at, &grid, 8);
    if (!affine && scale == LC_SCALE_F32) memcpy(at, &word, 4);
    if (!affine && scale == LC_SCALE_BF16) memcpy(at, &half, 2);
    if (!affine && scale == LC_SCALE_POW2) *at = (uint8_t)(word >> 23);
  }

  Grid load(const uint8_t* at) const { return load(at, affine, scale); }

  static Grid load(const uint8_t* at, bool affine, int scale) {
    Grid grid = {0.0f, 0.0f, 0.0f};
    uint16_t half;
    if (affine) memcpy(&grid, at, 8);
    if (!affine && scale == LC_SCALE_F32) memcpy(&grid.step, at, 4);
    if (!affine && scale == LC_SCALE_BF16) memcpy(&half, at, 2), grid.step = lc_bf16_to_f32(half);
    if (!affine && scale == LC_SCALE_POW2) grid.step = lc_float((uint32_t)*at << 23);
    return grid;
  }

  uint32_t code(const Grid& grid, float x, int64_t i) {
    const float y = lc_int_scaled(grid, x, affine);
    return lc_int_code(stochastic ? floorf(y + uniform(i)) : nearbyintf(y), bits, affine);
  }

  float uniform(int64_t i) {
    if (words_at != i / 4) lc_philox((uint64_t)(words_at = i / 4), stream, step, seed, words);
    return lc_uniform(words[i % 4]);
  }

  float value(const Grid& grid, uint32_t code) const { return lc_int_value(grid, code, bits, affine); }
};

#ifdef LC_X86

template <int width, bool affine, bool stochastic>
struct IntEncoder {
  static constexpr int bits = width;
  const IntFormat& portable;
  bool clamped;
  LcPhilox noise;

  // The noise, or a scale in another format, can carry a code out of the range.
  LC_AVX2 explicit IntEncoder(const IntFormat& format)
      : portable(format), clamped(stochastic || format.scale != LC_SCALE_F32), noise(format.seed, format.stream, format.step) {}

  LC_AVX2 bool scale(const LcBlockTask& task, LcSegment& s, const float* p) const {
    if (affine) return affine_scale(task, s, p);
    if (portable.scale == LC_SCALE_F32) {
      lc_scales_avx2(s, (float)lc_int_highest(bits, false));
      memcpy(task.body.scale_of(s.first), s.step, 4 * (size_t)s.blocks);
      return true;
    }
    for (int64_t b = 0; b < s.blocks; ++b) put(task, s, b, portable.symmetric_grid(lc_float(s.absmax[b])));
    return true;
  }

  LC_AVX2 bool affine_scale(const LcBlockTask& task, LcSegment& s, const float* p) const {
    for (int64_t b = 0; b < s.blocks; ++b, p += task.body.block) {
      if (s.absmax[b] > lc_bits(LC_AFFINE_LIMIT)) return false;
      __m256 lows = _mm256_loadu_ps(p), highs = lows;
      for (int64_t i = 8; i < task.body.block; i += 8) {
        lows = _mm256_min_ps(lows, _mm256_loadu_ps(p + i));
        highs = _mm256_max_ps(highs, _mm256_loadu_ps(p + i));
      }
      float least = lows[0], most = highs[0];
      for (int j = 1; j < 8; ++j) least = lows[j] < least ? lows[j] : least, most = highs[j] > most ? highs[j] : most;
      put(task, s, b, portable.affine_grid(least, most));
    }
    return true;
  }

  void put(const LcBlockTask& task, LcSegment& s, int64_t b, const IntFormat::Grid& grid) const {
    s.low[b] = grid.low, s.step[b] = grid.step, s.inverse[b] = grid.inverse;
    portable.store(task.body.scale_of(s.first + b), grid);
  }

  template <bool feedback>
  LC_AVX2_MEMBER void encode(const LcBlockTask& task, LcSegment& s, const float* p, int64_t b) const {
    const __m256 lowest_value = _mm256_set1_ps(s.low[b]), scale = _mm256_set1_ps(s.step[b]);
    const __m256 inverse = _mm256_set1_ps(s.inverse[b]);
    const float top = (float)lc_int_highest(bits, affine);
    const __m256 highest = _mm256_set1_ps(top), lowest = _mm256_set1_ps(affine ? 0.0f : -top);
    const int64_t block = task.body.block, at = b * block, begin = s.first * block + at;
    for (int64_t i = 0; i < block; i += 64) {
      lc_prefetch64(task.source, begin + s.blocks * block + i);
      __m256i q[8];
      __m256 u[4];
      for (int j = 0; j < 8; ++j) {
        const __m256 x = _mm256_loadu_ps(p + at + i + 8 * j);
        __m256 y = _mm256_mul_ps(affine ? _mm256_sub_ps(x, lowest_value) : x, inverse);
        if (stochastic) {
          if (j % 4 == 0) noise.uniform32((uint64_t)(begin + i + 8 * j) / 4, u);
          y = _mm256_floor_ps(_mm256_add_ps(y, u[j % 4]));
        }
        if (feedback && clamped) y = _mm256_min_ps(_mm256_max_ps(y, lowest), highest);
        q[j] = _mm256_cvtps_epi32(y);
        if (feedback) {
          const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(q[j]), scale);
          const __m256 value = affine ? _mm256_add_ps(lowest_value, scaled) : scaled;
          _mm256_storeu_ps(task.candidate + begin + i + 8 * j, _mm256_sub_ps(x, value));
        }
      }
      lc_store_codes_avx2<bits>(s.codes + (at + i) * bits / 8, pack(q), pack(q + 4));
    }
  }

  LC_AVX2_MEMBER __m256i pack(const __m256i q[4]) const {
    const __m256i a = _mm256_packs_epi32(q[0], q[1]), b = _mm256_packs_epi32(q[2], q[3]);
    const __m256i bytes = affine ? _mm256_packus_epi16(a, b) : _mm256_packs_epi16(a, b);
    const __m256i highest = _mm256_set1_epi8((char)lc_int_highest(bits, affine));
    if (!clamped) return bytes;
    if (affine) return _mm256_min_epu8(bytes, highest);
    return _mm256_min_epi8(_mm256_max_epi8(bytes, _mm256_set1_epi8((char)-lc_int_highest(bits, false))), highest);
  }
};

template <int width, bool affine>
struct IntDecoder {
  static constexpr int bits = width;
  int scale;
  LcTable16 table;
  __m256 low, step;

  LC_AVX2 explicit IntDecoder(const IntFormat& format) : scale(format.scale), table(number) {}

  static float number(int index) {
    const int sign = affine ? 0 : 1 << (bits - 1);
    const int code = bits == 2 ? (index | index >> 2) & 3 : index;  // 2 bits stand in the lower or the upper half
    return (float)((code ^ sign) - sign);
  }

  LC_AVX2_MEMBER void load(const uint8_t* at) {
    const IntFormat::Grid grid = IntFormat::load(at, affine, scale);
    low = _mm256_set1_ps(grid.low), step = _mm256_set1_ps(grid.step);
  }

  LC_AVX2_MEMBER void expand(const uint8_t* codes, __m256 values[4]) const {
    if (bits < 8) table.look_up(lc_spread32_avx2<bits < 8 ? bits : 4>(codes), values);
    for (int j = 0; j < 4; ++j) {
      if (bits == 8) {
        const __m128i eight = _mm_loadl_epi64((const __m128i*)(codes + 8 * j));
        values[j] = _mm256_cvtepi32_ps(affine ? _mm256_cvtepu8_epi32(eight) : _mm256_cvtepi8_epi32(eight));
      }
      values[j] = _mm256_mul_ps(values[j], step);
      if (affine) values[j] = _mm256_add_ps(low, values[j]);
    }
  }
};

bool has_avx2(const LcBlockBody& body) {
  return lc_blocks_fit_avx2(body) && (body.bits == 2 || body.bits == 4 || body.bits == 8);
}

template <int bits, bool affine>
int encode_avx2(const LcBlockTask& task, const IntFormat& format, int64_t first, int64_t last) {
  if (format.stochastic)
    return lc_encode_blocks_avx2(task, IntEncoder<bits, affine, true>(format), format, first, last);
  return lc_encode_blocks_avx2(task, IntEncoder<bits, affine, false>(format), format, first, last);
}

template <int bits>
int encode_avx2(const LcBlockTask& task, const IntFormat& format, int64_t first, int64_t last) {
  return format.affine ? encode_avx2<bits, true>(task, format, first, last)
                       : encode_avx2<bits, false>(task, format, first, last);
}

template <int bits>
void decode_avx2(const LcBlockBody& body, const IntFormat& format, int64_t first, int64_t last, const LcOutput& to) {
  if (format.affine)
    lc_decode_blocks_avx2(body, IntDecoder<bits, true>(format), format, first, last, to);
  else
    lc_decode_blocks_avx2(body, IntDecoder<bits, false>(format), format, first, last, to);
}
#endif

int encode_range(const LcBlockTask& task, const IntFormat& format, int64_t first, int64_t last) {
#ifdef LC_X86
  if (has_avx2(task.body))
    return format.bits == 8   ? encode_avx2<8>(task, format, first, last)
           : format.bits == 4 ? encode_avx2<4>(task, format, first, last)
                              : encode_avx2<2>(task, format, first, last);
#endif
  return lc_encode_blocks(task, format, first, last);
}

void decode_range(const LcBlockBody& body, const IntFormat& format, int64_t first, int64_t last, const LcOutput& to) {
#ifdef LC_X86
  if (has_avx2(body)) {
    if (format.bits == 8) return decode_avx2<8>(body, format, first, last, to);
    if (format.bits == 4) return decode_avx2<4>(body, format, first, last, to);
    return decode_avx2<2>(body, format, first, last, to);
  }
#endif
  lc_decode_blocks(body, format, first, last, to);
}

}  // namespace

// block <= 4096. residual and candidate may be null; candidate may be x or residual.
LC_API int32_t lc_int_encode(const void* x, int32_t dtype, const float* residual, float decay, float* candidate,
                             int64_t n, int64_t block, int32_t bits, int32_t affine, int32_t scale, int32_t stochastic,
                             uint64_t seed, uint32_t stream, uint32_t step, uint8_t* out, int32_t threads) {
  const IntFormat format = {bits, affine != 0, scale, stochastic != 0, seed, stream, step, {}, -1};
  const LcBlockTask task = {{out, n, block, bits, format.scale_bytes()}, {x, dtype, residual, decay}, candidate};
  task.body.clear_padding();
  return lc_parallel(task.body.blocks(), task.body.grain(), threads,
                     [&](int64_t first, int64_t last) { return encode_range(task, format, first, last); });
}

// Any block. add: out += weight * decoded, instead of out = decoded.
LC_API int32_t lc_int_decode(const uint8_t* bytes, int64_t n, int64_t block, int32_t bits, int32_t affine,
                             int32_t scale, float* out, int32_t add, float weight, int32_t threads) {
  const IntFormat format = {bits, affine != 0, scale, false, 0, 0, 0, {}, -1};
  const LcBlockBody body(bytes, n, block, bits, format.scale_bytes());
  const LcOutput to = {out, lc_emit_mode(out, n, add, weight), weight};
  return lc_parallel(body.blocks(), body.grain(), threads, [&](int64_t first, int64_t last) {
    decode_range(body, format, first, last, to);
    return 0;
  });
}
