// E3M0, 4 bits: sign and exponent (e3m0.py).
#include "blocks.h"
#include "philox.h"

namespace {

struct E3M0Format {
  struct Grid {
    float scale, threshold;
  };
  bool pow2, stochastic;
  uint64_t seed;
  uint32_t stream, step;
  uint32_t words[4];
  int64_t words_at;

  int scale_bytes() const { return pow2 ? 1 : 4; }

  int adjust(float*, int) const { return 0; }

  Grid grid(const float* p, int count) const { return grid_of(lc_absmax(p, count)); }

  Grid grid_of(float absmax) const {
    const float scale = lc_e3m0_scale(absmax, pow2);
    return {scale, lc_e3m0_threshold(scale)};
  }

  void store(uint8_t* at, const Grid& grid) const {
    const uint32_t word = lc_bits(grid.scale);
    if (pow2)
      *at = (uint8_t)(word >> 23);
    else
      memcpy(at, &word, 4);
  }

  Grid load(const uint8_t* at) const { return {load(at, pow2), 0.0f}; }

  static float load(const uint8_t* at, bool pow2) {
    uint32_t word;
    if (pow2) return lc_float((uint32_t)*at << 23);
    memcpy(&word, at, 4);
    return lc_float(word);
  }

  uint32_t code(const Grid& grid, float x, int64_t i) {
    if (grid.scale == 0.0f) return 0;
    if (!stochastic) return lc_e3m0_code(x, grid.threshold, grid.scale);
    if (words_at != i / 4) lc_philox((uint64_t)(words_at = i / 4), stream, step, seed, words);
    return lc_e3m0_stochastic_code(x, grid.scale, lc_uniform(words[i % 4]));
  }

  float value(const Grid& grid, uint32_t code) const { return lc_e3m0_value(code) * grid.scale; }
};

#ifdef LC_X86

struct E3M0Encoder {
  const E3M0Format& portable;

  LC_AVX2 bool scale(const LcBlockTask& task, LcSegment& s, const float*) const {
    for (int64_t b = 0; b < s.blocks; ++b) {
      const E3M0Format::Grid grid = portable.grid_of(lc_float(s.absmax[b]));
      s.step[b] = grid.scale, s.low[b] = grid.threshold;
      portable.store(task.body.scale_of(s.first + b), grid);
    }
    return true;
  }

  template <bool feedback>
  LC_AVX2_MEMBER void encode(const LcBlockTask& task, LcSegment& s, const float* p, int64_t b) const {
    const int never = 0x7FFFFFFF;  // for a block of zeros
    const int scale = (int)lc_bits(s.step[b]), threshold = scale ? (int)lc_bits(s.low[b]) - (7 << 23) : never;
    const __m256i below = _mm256_set1_epi32(scale ? scale - (7 << 23) - 1 : never);
    const __m256i zero_code = _mm256_set1_epi32(threshold), value_offset = _mm256_set1_epi32(scale - (7 << 23));
    const __m256i mask = _mm256_set1_epi32(never), zero = _mm256_setzero_si256();
    const int64_t block = task.body.block, at = b * block, begin = s.first * block + at;
    for (int64_t i = 0; i < block; i += 64) {
      lc_prefetch64(task.source, begin + s.blocks * block + i);
      __m256i c[8], x[8];
      for (int j = 0; j < 8; ++j) {
        x[j] = _mm256_loadu_si256((const __m256i*)(p + at + i + 8 * j));
        const __m256i magnitude = _mm256_and_si256(x[j], mask), used = _mm256_cmpgt_epi32(magnitude, below);
        const __m256i octaves = _mm256_srai_epi32(_mm256_sub_epi32(magnitude, zero_code), 23);
        c[j] = _mm256_max_epi32(octaves, _mm256_sub_epi32(zero, used));
        if (feedback) {
          const __m256i size = _mm256_add_epi32(_mm256_slli_epi32(limit(c[j]), 23), value_offset);
          const __m256i value = _mm256_and_si256(_mm256_or_si256(size, _mm256_andnot_si256(mask, x[j])), used);
          _mm256_storeu_ps(task.candidate + begin + i + 8 * j,
                           _mm256_sub_ps(_mm256_castsi256_ps(x[j]), _mm256_castsi256_ps(value)));
        }
      }
      lc_store_codes_avx2<4>(s.codes + (at + i) / 2, with_signs(c, x), with_signs(c + 4, x + 4));
    }
  }

  // An element may be almost twice a power-of-two scale that was lowered, and never more.
  LC_AVX2_MEMBER __m256i limit(__m256i c) const { return portable.pow2 ? _mm256_min_epi32(c, _mm256_set1_epi32(7)) : c; }

  LC_AVX2_MEMBER __m256i with_signs(const __m256i c[4], const __m256i x[4]) const {
    const __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(c[0], c[1]), _mm256_packs_epi32(c[2], c[3]));
    const __m256i limited = _mm256_min_epu8(codes, _mm256_set1_epi8(7));
    // saturation keeps the sign of a float taken as an integer
    const __m256i tops = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    const __m256i signs = _mm256_srli_epi16(_mm256_and_si256(tops, _mm256_set1_epi8((char)0x80)), 4);
    const __m256i used = _mm256_cmpgt_epi8(limited, _mm256_setzero_si256());
    return _mm256_or_si256(limited, _mm256_and_si256(signs, used));
  }
};

struct E3M0Decoder {
  static constexpr int bits = 4;
  bool pow2;
  LcTable16 table;
  __m256 scale;

  LC_AVX2 explicit E3M0Decoder(const E3M0Format& format) : pow2(format.pow2), table(lc_e3m0_value) {}

  LC_AVX2_MEMBER void load(const uint8_t* at) { scale = _mm256_set1_ps(E3M0Format::load(at, pow2)); }

  LC_AVX2_MEMBER void expand(const uint8_t* codes, __m256 values[4]) const {
    table.look_up(lc_spread32_avx2<4>(codes), values);
    for (int j = 0; j < 4; ++j) values[j] = _mm256_mul_ps(values[j], scale);
  }
};
#endif

int encode_range(const LcBlockTask& task, const E3M0Format& format, int64_t first, int64_t last) {
#ifdef LC_X86
  if (lc_blocks_fit_avx2(task.body) && !format.stochastic)
    return lc_encode_blocks_avx2(task, E3M0Encoder{format}, format, first, last);
#endif
  return lc_encode_blocks(task, format, first, last);
}

void decode_range(const LcBlockBody& body, const E3M0Format& format, int64_t first, int64_t last, const LcOutput& to) {
#ifdef LC_X86
  if (lc_blocks_fit_avx2(body)) return lc_decode_blocks_avx2(body, E3M0Decoder(format), format, first, last, to);
#endif
  lc_decode_blocks(body, format, first, last, to);
}

}  // namespace

// block <= 4096. residual and candidate may be null; candidate may be x or residual.
LC_API int32_t lc_e3m0_encode(const void* x, int32_t dtype, const float* residual, float decay, float* candidate,
                              int64_t n, int64_t block, int32_t pow2, int32_t stochastic, uint64_t seed,
                              uint32_t stream, uint32_t step, uint8_t* out, int32_t threads) {
  const E3M0Format format = {pow2 != 0, stochastic != 0, seed, stream, step, {}, -1};
  const LcBlockTask task = {{out, n, block, 4, format.scale_bytes()}, {x, dtype, residual, decay}, candidate};
  task.body.clear_padding();
  return lc_parallel(task.body.blocks(), task.body.grain(), threads,
                     [&](int64_t first, int64_t last) { return encode_range(task, format, first, last); });
}

// Any block. add: out += weight * decoded, instead of out = decoded.
LC_API int32_t lc_e3m0_decode(const uint8_t* bytes, int64_t n, int64_t block, int32_t pow2, float* out, int32_t add,
                              float weight, int32_t threads) {
  const E3M0Format format = {pow2 != 0, false, 0, 0, 0, {}, -1};
  const LcBlockBody body(bytes, n, block, 4, format.scale_bytes());
  const LcOutput to = {out, lc_emit_mode(out, n, add, weight), weight};
  return lc_parallel(body.blocks(), body.grain(), threads, [&](int64_t first, int64_t last) {
    decode_range(body, format, first, last, to);
    return 0;
  });
}
