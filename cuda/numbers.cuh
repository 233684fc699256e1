// Numbers as bits, and conversions between float32 and the narrow formats on the wire, bit-exact on every device; for C++
// and CUDA. Narrow numbers travel as 16-bit words. Arguments are finite unless a comment says otherwise; conversions to a
// narrow format round to nearest even.
#ifndef LC_NUMBERS_CUH
#define LC_NUMBERS_CUH

#ifndef LC_FN
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define LC_FN __device__ __host__ static inline
#else
#define LC_FN static inline
#endif
#endif

// Correctly rounded, and rounding to nearest even, in both languages.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define LC_SQRT sqrtf
#define LC_RINT rintf
#define LC_FLOOR floorf
#else
#define LC_SQRT __builtin_sqrtf
#define LC_RINT __builtin_rintf
#define LC_FLOOR __builtin_floorf
#endif

#define LC_TINY 7.888609052210118e-31f  // 2^-100: a block whose absolute maximum is below is encoded as zeros
#define LC_INFINITY_BITS 0x7F800000u

LC_FN unsigned int lc_bits(float x) {
  union {
    unsigned int u;
    float f;
  } value;
  value.f = x;
  return value.u;
}

LC_FN float lc_float(unsigned int bits) {
  union {
    unsigned int u;
    float f;
  } value;
  value.u = bits;
  return value.f;
}

LC_FN unsigned int lc_magnitude(float x) { return lc_bits(x) & 0x7FFFFFFFu; }  // orders as |x| does; any x

LC_FN bool lc_finite(float x) { return lc_magnitude(x) < LC_INFINITY_BITS; }

// By what the elements of a block with this absolute maximum are multiplied before they are summed (ranges.py).
LC_FN float lc_range_factor(float absmax) {
  return absmax >= 1099511627776.0f ? 8.271806125530277e-25f : absmax < 9.094947017729282e-13f ? 1.2089258196146292e24f : 1.0f;
}

// ---- sign | exponent with this bias | mantissa bits, with subnormals. Saturates at max_code.

LC_FN unsigned int lc_narrow(float x, int mantissa, int bias, unsigned int max_code) {
  const unsigned int a = lc_magnitude(x);
  const int drop = 23 - mantissa;
  unsigned int code;
  if (a < (unsigned int)(128 - bias) << 23) {  // below the smallest normal: adding 2^23 steps rounds to a whole step
    const unsigned int magic = (unsigned int)(127 + 24 - bias - mantissa) << 23;
    code = lc_bits(lc_float(a) + lc_float(magic)) - magic;
  } else {
    const unsigned int half = (1u << (drop - 1)) - 1u + ((a >> drop) & 1u);
    code = (a + half - ((unsigned int)(127 - bias) << 23)) >> drop;
  }
  return code < max_code ? code : max_code;
}

// The magnitude of a code without its sign; exponents that mean Inf or NaN are the caller's business.
LC_FN float lc_widen(unsigned int code, int mantissa, int bias) {
  if (code >> mantissa == 0) return (float)code * lc_float((unsigned int)(128 - bias - mantissa) << 23);
  return lc_float((code << (23 - mantissa)) + ((unsigned int)(127 - bias) << 23));
}

// ---- bfloat16

LC_FN float lc_bf16_to_f32(unsigned short h) { return lc_float((unsigned int)h << 16); }  // any h

LC_FN unsigned short lc_f32_to_bf16(float x) {  // finite stays finite
  const unsigned int u = lc_bits(x), rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return (unsigned short)((rounded & 0x7FFFu) < 0x7F80u ? rounded : rounded - 1u);
}

// ---- float16

LC_FN float lc_f16_to_f32(unsigned short h) {  // any h
  const unsigned int sign = (unsigned int)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  if (magnitude >= 0x7C00) return lc_float(sign | 0x7F800000u | (magnitude & 0x3FF) << 13);
  if (magnitude < 0x400)  // zero or subnormal: a multiple of 2^-24
    return lc_float(sign | lc_bits((float)magnitude * 5.9604644775390625e-8f));
  return lc_float(sign | ((magnitude << 13) + (112u << 23)));
}

LC_FN unsigned short lc_f32_to_f16(float x) {  // finite stays finite
  return (unsigned short)((lc_bits(x) >> 16 & 0x8000u) | lc_narrow(x, 10, 15, 0x7BFFu));
}

// ---- float8: e4m3fn (no infinity, NaN 0x7F, maximum 448) and e5m2 (as the upper half of float16, maximum 57344)

LC_FN unsigned char lc_f32_to_e4m3(float x) {
  return (unsigned char)((lc_bits(x) >> 24 & 0x80u) | lc_narrow(x, 3, 7, 0x7Eu));
}

LC_FN float lc_e4m3_to_f32(unsigned char code) {  // any code
  const unsigned int sign = (code & 0x80u) << 24, magnitude = code & 0x7Fu;
  return lc_float(sign | (magnitude == 0x7Fu ? 0x7FC00000u : lc_bits(lc_widen(magnitude, 3, 7))));
}

LC_FN unsigned char lc_f32_to_e5m2(float x) {
  return (unsigned char)((lc_bits(x) >> 24 & 0x80u) | lc_narrow(x, 2, 15, 0x7Bu));
}

LC_FN float lc_e5m2_to_f32(unsigned char code) { return lc_f16_to_f32((unsigned short)(code << 8)); }  // any code

// ---- block scales

// a / levels, or the next number below where levels * scale would overflow although the block is finite.
LC_FN float lc_block_scale(float absmax, float levels) {
  const float scale = absmax / levels;
  return lc_finite(scale * levels) ? scale : lc_float(lc_bits(scale) - 1u);
}

LC_FN unsigned short lc_bf16_up(float scale) {  // smallest bfloat16 that is not below a positive scale
  return (unsigned short)((lc_bits(scale) + 0xFFFFu) >> 16);
}

LC_FN unsigned char lc_pow2_up(float scale) {  // exponent byte (bias 127) of the smallest power of two not below it
  return (unsigned char)((lc_bits(scale) + 0x7FFFFFu) >> 23);
}

// ---- float8 with the largest number `largest` of a format

LC_FN float lc_float8_largest(int e5m2) { return e5m2 ? 57344.0f : 448.0f; }

// inverse: largest / absmax, or 0 in a block of zeros, whose codes are 0 also for -0.
LC_FN unsigned int lc_float8_code(float x, float inverse, int e5m2) {
  if (inverse == 0.0f) return 0;
  return e5m2 ? lc_f32_to_e5m2(x * inverse) : lc_f32_to_e4m3(x * inverse);
}

LC_FN float lc_float8_value(unsigned int code, int e5m2) {
  return e5m2 ? lc_e5m2_to_f32((unsigned char)code) : lc_e4m3_to_f32((unsigned char)code);
}

// ---- E3M0: sign | code c; magnitude 2^(c-7) times the scale s, or 0 for c = 0

LC_FN float lc_e3m0_scale(float absmax, int pow2) {
  if (!(absmax >= LC_TINY)) return 0.0f;
  const unsigned int up = lc_pow2_up(absmax);
  return pow2 ? lc_float((up < 255 ? up : 254u) << 23) : absmax;
}

// Smallest |x| for which fl(|x| / s) >= 0.75. Above it times 2^-k the code is at least 7 - k, for k up to 5; so codes
// can be found without a division.
LC_FN float lc_e3m0_threshold(float scale) {
  const float near = 0.75f * scale, below = lc_float(lc_bits(near) - 1u);
  if (below / scale >= 0.75f) return below;
  return near / scale >= 0.75f ? near : lc_float(lc_bits(near) + 1u);
}

LC_FN unsigned int lc_e3m0_code(float x, float threshold, float scale) {
  const int magnitude = (int)lc_magnitude(x), smallest = (int)lc_bits(scale * 0.0078125f);
  int code = (magnitude - (int)lc_bits(threshold) + (7 << 23)) >> 23;  // floor of the number of octaves above
  if (magnitude < smallest) return 0;
  code = code < 1 ? 1 : code > 7 ? 7 : code;
  return (unsigned int)code | (lc_bits(x) >> 28 & 8u);
}

// With noise u: up to the next power of two with probability (y - 2^k) / 2^k, below 2^-6 with probability 2^6 y.
LC_FN unsigned int lc_e3m0_stochastic_code(float x, float scale, float u) {
  const float y = lc_float(lc_magnitude(x)) / scale;
  unsigned int code;
  if (y < 0.015625f) {
    code = u < y * 64.0f;
  } else {
    const unsigned int exponent = lc_bits(y) >> 23, octave = exponent < 127u ? exponent - 120u : 7u;
    const float part = y * lc_float((254u - exponent) << 23) - 1.0f;
    code = octave < 7u && u < part ? octave + 1u : octave;
  }
  return code ? code | (lc_bits(x) >> 28 & 8u) : 0u;
}

LC_FN float lc_e3m0_value(unsigned int code) {
  const unsigned int c = code & 7u;
  return lc_float((code & 8u) << 28 | (c ? (c + 120u) << 23 : 0u));
}

#endif
