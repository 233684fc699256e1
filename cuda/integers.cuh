// Arithmetic of quantize.py for one block and one element, shared by C++ and CUDA.
#ifndef LC_INTEGERS_CUH
#define LC_INTEGERS_CUH
#include "numbers.cuh"

#define LC_AFFINE_LIMIT 8.507059173023462e37f  // 2^126: the range of a block must not overflow

enum { LC_SCALE_F32 = 0, LC_SCALE_BF16 = 1, LC_SCALE_POW2 = 2 };  // formats of scales (quantize._SCALE_CODES)

// code = round((x - low) * inverse); value = low + code * step. low: affine codes only.
struct LcIntGrid {
  float low, step, inverse;
};

LC_FN int lc_int_highest(int bits, int affine) { return (1 << (affine ? bits : bits - 1)) - 1; }

LC_FN LcIntGrid lc_int_symmetric_grid(float absmax, int bits, int scale) {
  LcIntGrid grid = {0.0f, 0.0f, 0.0f};
  if (!(absmax >= LC_TINY)) return grid;
  const float levels = (float)lc_int_highest(bits, 0);
  grid.step = lc_block_scale(absmax, levels), grid.inverse = levels / absmax;
  if (scale == LC_SCALE_F32) return grid;
  // the next representable scale up, unless the largest code would then overflow
  const int shift = scale == LC_SCALE_BF16 ? 16 : 23;
  const unsigned int code = scale == LC_SCALE_BF16 ? lc_bf16_up(grid.step) : lc_pow2_up(grid.step);
  grid.step = lc_float((lc_finite(lc_float(code << shift) * levels) ? code : code - 1) << shift);
  grid.inverse = 1.0f / grid.step;
  return grid;
}

LC_FN LcIntGrid lc_int_affine_grid(float low, float high, int bits) {
  const float levels = (float)lc_int_highest(bits, 1), range = high - low;
  LcIntGrid grid = {low + 0.0f, 0.0f, 0.0f};  // turns -0 into +0
  if (range >= LC_TINY) grid.step = range / levels, grid.inverse = levels / range;
  return grid;
}

// Clips what could overflow an affine grid; any finite x.
LC_FN float lc_int_clip(float x) {
  return x > LC_AFFINE_LIMIT ? LC_AFFINE_LIMIT : x < -LC_AFFINE_LIMIT ? -LC_AFFINE_LIMIT : x;
}

LC_FN float lc_int_scaled(LcIntGrid grid, float x, int affine) { return (affine ? x - grid.low : x) * grid.inverse; }

// rounded: an integer near the range of codes. In two's complement, with bits above the width of a code.
LC_FN unsigned int lc_int_code(float rounded, int bits, int affine) {
  const float highest = (float)lc_int_highest(bits, affine), lowest = affine ? 0.0f : -highest;
  return (unsigned int)(int)(rounded < lowest ? lowest : rounded > highest ? highest : rounded);
}

LC_FN float lc_int_value(LcIntGrid grid, unsigned int code, int bits, int affine) {
  const int number = affine ? (int)code : (int)(code << (32 - bits)) >> (32 - bits);
  const float scaled = (float)number * grid.step;
  return affine ? grid.low + scaled : scaled;
}

#endif
