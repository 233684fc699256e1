// Formats and arithmetic of sparse.py, indices.py and values.py, shared by C++ and CUDA.
#ifndef LC_SPARSE_CUH
#define LC_SPARSE_CUH
#include "numbers.cuh"

enum { LC_ELIAS_FANO, LC_FIELDS, LC_BITMAP, LC_U32 };                            // order of INDEX_CODECS
enum { LC_RAW_F32, LC_RAW_BF16, LC_MAG2, LC_SIGN1, LC_KEPT_INT8, LC_KEPT_INT4 };  // order of VALUE_CODECS

LC_FN int lc_value_bits(int value) {  // of the code of one value
  return value == LC_RAW_F32 ? 32 : value == LC_RAW_BF16 ? 16 : value == LC_MAG2 ? 2 : value == LC_SIGN1 ? 1 : value == LC_KEPT_INT8 ? 8 : 4;
}

LC_FN int lc_value_scale_bytes(int value) {  // of the scales of one row
  return value == LC_RAW_F32 || value == LC_RAW_BF16 ? 0 : value == LC_SIGN1 ? 2 : 4;
}

LC_FN float lc_sign_of(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

// Nearest bfloat16; beyond its range the largest finite one, and the flag SATURATED (codec.py).
LC_FN unsigned short lc_level_to_bf16(float x, int* flags) {
  const unsigned int u = lc_bits(x), rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  if ((rounded & 0x7FFFu) < 0x7F80u) return (unsigned short)rounded;
  *flags |= 8;
  return (unsigned short)(rounded - 1u);
}

// ---- mag2: sign and one of two levels

typedef struct {
  float small, large;
} LcTwoLevels;

// Means of the two classes from their sums and numbers; an empty class takes the level of the other, as rounding can put
// the mean of equal values below them.
LC_FN LcTwoLevels lc_two_levels(float small_sum, float large_sum, float num_small, float num_large) {
  LcTwoLevels levels;
  levels.small = small_sum / num_small, levels.large = large_sum / num_large;
  if (num_large == 0.0f) levels.large = levels.small;
  if (num_small == 0.0f) levels.small = levels.large;
  return levels;
}

LC_FN float lc_midpoint(LcTwoLevels levels) { return (levels.small + levels.large) * 0.5f; }

LC_FN unsigned int lc_mag2_code(float v, float factor, float threshold) {
  return (unsigned int)(v < 0) | (unsigned int)(lc_float(lc_magnitude(v)) * factor > threshold) << 1;
}

// ---- int8 and int4: q times the scale

LC_FN int lc_kept_int(float v, float inverse, float top) {
  const float q = LC_RINT(v * inverse);
  return (int)(q > top ? top : q < -top ? -top : q);
}

LC_FN float lc_kept_int_value(unsigned int code, int width, float scale) {
  const unsigned int sign = 1u << (width - 1);
  return (float)(int)((code ^ sign) - sign) * scale;
}

#endif
