// bfloat16 and float16 to float32, exact; shared by C++ and CUDA. Narrow numbers travel as 16-bit words.
#ifndef LC_NARROW_CUH
#define LC_NARROW_CUH

#ifndef LC_FN
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define LC_FN __device__ __host__ static inline
#else
#define LC_FN static inline
#endif
#endif

LC_FN float lc_float_of_bits(unsigned int bits) {
  union {
    unsigned int u;
    float f;
  } value;
  value.u = bits;
  return value.f;
}

LC_FN unsigned int lc_bits_of_float(float f) {
  union {
    unsigned int u;
    float f;
  } value;
  value.f = f;
  return value.u;
}

LC_FN float lc_bf16_to_f32(unsigned short h) { return lc_float_of_bits((unsigned int)h << 16); }

LC_FN float lc_f16_to_f32(unsigned short h) {
  const unsigned int sign = (unsigned int)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
  if (magnitude >= 0x7C00) return lc_float_of_bits(sign | 0x7F800000u | (magnitude & 0x3FF) << 13);
  if (magnitude < 0x400)  // zero or subnormal: a multiple of 2^-24
    return lc_float_of_bits(sign | lc_bits_of_float((float)magnitude * 5.9604644775390625e-8f));
  return lc_float_of_bits(sign | ((magnitude << 13) + (112u << 23)));
}

#endif
