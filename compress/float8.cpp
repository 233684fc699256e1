// 8-bit floats with a scale per block (float8.py).
#include "blocks.h"

namespace {

struct Float8Format {
  struct Grid {
    float scale, inverse;
  };
  bool e5m2;

  float largest() const { return lc_float8_largest(e5m2); }

  int adjust(float*, int) const { return 0; }

  Grid grid(const float* p, int count) const {
    const float absmax = lc_absmax(p, count);
    if (!(absmax >= LC_TINY)) return {0.0f, 0.0f};
    return {lc_block_scale(absmax, largest()), largest() / absmax};
  }

  void store(uint8_t* at, const Grid& grid) const { memcpy(at, &grid.scale, 4); }

  Grid load(const uint8_t* at) const {
    Grid grid = {0.0f, 0.0f};
    memcpy(&grid.scale, at, 4);
    return grid;
  }

  uint32_t code(const Grid& grid, float x, int64_t) const {
    return lc_float8_code(x, grid.inverse, e5m2);
  }

  float value(const Grid& grid, uint32_t code) const {
    return lc_float8_value(code, e5m2) * grid.scale;
  }
};

#ifdef LC_X86

// Magnitudes of 16 codes, bytes in the lower halves of 16-bit lanes, as float16; e4m3 comes out 2^8 times too small.
template <bool e5m2>
LC_AVX2_INLINE __m256i as_float16(__m256i codes) {
  if (e5m2) return _mm256_slli_epi16(codes, 8);
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7F));
  const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7F), codes), 8);
  const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F));
  const __m256i halves = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
  return _mm256_or_si256(halves, sign);
}

template <bool e5m2>
LC_AVX2_INLINE void widen16(__m256i codes, __m256 values[2]) {
  const __m256i halves = as_float16<e5m2>(codes);
  const __m256 unit = _mm256_set1_ps(e5m2 ? 1.0f : 256.0f);
  values[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), unit);
  values[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), unit);
}

template <bool e5m2>
struct Float8Encoder {
  static constexpr int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, drop = 23 - mantissa;
  const Float8Format& portable;

  LC_AVX2 bool scale(const LcBlockTask& task, LcSegment& s, const float*) const {
    lc_scales_avx2(s, portable.largest());
    memcpy(task.body.scale_of(s.first), s.step, 4 * (size_t)s.blocks);
    return true;
  }

  // lc_narrow of eight values that are at most a rounding above the largest.
  LC_AVX2_MEMBER __m256i narrow(__m256i y) const {
    const __m256i a = _mm256_and_si256(y, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(a, drop), _mm256_set1_epi32(1));
    const __m256i half = _mm256_set1_epi32((1 << (drop - 1)) - 1 - ((127 - bias) << 23));
    const __m256i normal = _mm256_srai_epi32(_mm256_add_epi32(_mm256_add_epi32(a, half), odd), drop);
    const __m256i magic = _mm256_set1_epi32((127 + 24 - bias - mantissa) << 23);
    const __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(magic));
    const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - bias) << 23), a);
    return _mm256_blendv_epi8(normal, small, is_small);
  }

  template <bool feedback>
  LC_AVX2_MEMBER void encode(const LcBlockTask& task, LcSegment& s, const float* p, int64_t b) const {
    const __m256 inverse = _mm256_set1_ps(s.inverse[b]), scale = _mm256_set1_ps(s.step[b]);
    const __m256i signs = _mm256_set1_epi8(s.step[b] == 0.0f ? 0 : (char)0x80);
    const int64_t block = task.body.block, at = b * block, begin = s.first * block + at;
    for (int64_t i = 0; i < block; i += 32) {
      if (i % 64 == 0) lc_prefetch64(task.source, begin + s.blocks * block + i);
      __m256i y[4], c[4];
      for (int j = 0; j < 4; ++j) {
        y[j] = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(p + at + i + 8 * j), inverse));
        c[j] = narrow(y[j]);
      }
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      const __m256i sizes = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
      // saturation keeps the sign of a float taken as an integer
      const __m256i tops = _mm256_packs_epi16(_mm256_packs_epi32(y[0], y[1]), _mm256_packs_epi32(y[2], y[3]));
      const __m256i mixed = _mm256_or_si256(sizes, _mm256_and_si256(tops, signs));
      const __m256i codes = _mm256_permutevar8x32_epi32(mixed, order);
      _mm256_store_si256((__m256i*)(s.codes + at + i), codes);
      if (feedback) leave_residual(task.candidate + begin + i, p + at + i, codes, scale);
    }
  }

  LC_AVX2_MEMBER void leave_residual(float* candidate, const float* p, __m256i codes, __m256 scale) const {
    __m256 values[4];
    widen16<e5m2>(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(codes)), values);
    widen16<e5m2>(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(codes, 1)), values + 2);
    for (int j = 0; j < 4; ++j)
      _mm256_storeu_ps(candidate + 8 * j, _mm256_sub_ps(_mm256_loadu_ps(p + 8 * j), _mm256_mul_ps(values[j], scale)));
  }
};

template <bool e5m2>
struct Float8Decoder {
  static constexpr int bits = 8;
  __m256 scale;

  LC_AVX2_MEMBER void load(const uint8_t* at) {
    float s;
    memcpy(&s, at, 4);
    scale = _mm256_set1_ps(s);
  }

  LC_AVX2_MEMBER void expand(const uint8_t* codes, __m256 values[4]) const {
    for (int j = 0; j < 4; j += 2)
      widen16<e5m2>(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(codes + 8 * j))), values + j);
    for (int j = 0; j < 4; ++j) values[j] = _mm256_mul_ps(values[j], scale);
  }
};
#endif

int encode_range(const LcBlockTask& task, const Float8Format& format, int64_t first, int64_t last) {
#ifdef LC_X86
  if (lc_blocks_fit_avx2(task.body))
    return format.e5m2 ? lc_encode_blocks_avx2(task, Float8Encoder<true>{format}, format, first, last)
                       : lc_encode_blocks_avx2(task, Float8Encoder<false>{format}, format, first, last);
#endif
  return lc_encode_blocks(task, format, first, last);
}

void decode_range(const LcBlockBody& body, const Float8Format& format, int64_t first, int64_t last,
                  const LcOutput& to) {
#ifdef LC_X86
  if (lc_blocks_fit_avx2(body))
    return format.e5m2 ? lc_decode_blocks_avx2(body, Float8Decoder<true>(), format, first, last, to)
                       : lc_decode_blocks_avx2(body, Float8Decoder<false>(), format, first, last, to);
#endif
  lc_decode_blocks(body, format, first, last, to);
}

}  // namespace

// block <= 4096. residual and candidate may be null; candidate may be x or residual.
LC_API int32_t lc_float8_encode(const void* x, int32_t dtype, const float* residual, float decay, float* candidate,
                                int64_t n, int64_t block, int32_t e5m2, uint8_t* out, int32_t threads) {
  const Float8Format format = {e5m2 != 0};
  const LcBlockTask task = {{out, n, block, 8, 4}, {x, dtype, residual, decay}, candidate};
  task.body.clear_padding();
  return lc_parallel(task.body.blocks(), task.body.grain(), threads,
                     [&](int64_t first, int64_t last) { return encode_range(task, format, first, last); });
}

// Any block. add: out += weight * decoded, instead of out = decoded.
LC_API int32_t lc_float8_decode(const uint8_t* bytes, int64_t n, int64_t block, int32_t e5m2, float* out, int32_t add,
                                float weight, int32_t threads) {
  const Float8Format format = {e5m2 != 0};
  const LcBlockBody body(bytes, n, block, 8, 4);
  const LcOutput to = {out, lc_emit_mode(out, n, add, weight), weight};
  return lc_parallel(body.blocks(), body.grain(), threads, [&](int64_t first, int64_t last) {
    decode_range(body, format, first, last, to);
    return 0;
  });
}
