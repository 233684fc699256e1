// Arithmetic of eden.py, shared by C++ and CUDA.
#ifndef LC_EDEN_CUH
#define LC_EDEN_CUH
#include "numbers.cuh"

enum { LC_EDEN_BIASED, LC_EDEN_UNBIASED, LC_EDEN_MATCHED };  // eden._MODES

#define LC_EDEN_MAX_SCALE 1.2676506002282294e30f  // 2^100, eden._MAX_SCALE
#define LC_EDEN_LARGE 1099511627776.0f            // 2^40: blocks from here on are multiplied by
#define LC_EDEN_REDUCTION 7.888609052210118e-31f  // 2^-100

// Positive Lloyd-Max levels of N(0, 1), ascending (eden._LEVELS).
LC_FN double lc_eden_exact_level(int bits, int k) {
  if (bits == 1) return 0.7978845608;
  if (bits == 2) return k ? 1.5104176085 : 0.4527800346;
  if (bits == 3) return k < 2 ? (k ? 0.7560052812 : 0.2450941789) : k == 2 ? 1.3439092785 : 2.1519457045;
  if (k < 4) return k < 2 ? (k ? 0.3880482995 : 0.1283950299) : k == 2 ? 0.6567591185 : 0.9423404565;
  return k < 6 ? (k == 4 ? 1.2562311973 : 1.6180463860) : k == 6 ? 2.0690172265 : 2.7325895710;
}

LC_FN float lc_eden_positive_level(int bits, int k) { return (float)lc_eden_exact_level(bits, k); }

LC_FN float lc_eden_boundary(int bits, int k) {  // between level k and the next
  return (float)((lc_eden_exact_level(bits, k) + lc_eden_exact_level(bits, k + 1)) / 2);
}

LC_FN float lc_eden_level(int code, int bits) {
  const int half = 1 << (bits - 1);
  return code >= half ? lc_eden_positive_level(bits, code - half) : -lc_eden_positive_level(bits, half - 1 - code);
}

// Number of boundaries strictly below z.
LC_FN int lc_eden_code(float z, int bits) {
  const int half = 1 << (bits - 1);
  const float a = lc_float(lc_magnitude(z));
  int k = 0;
  for (int b = 0; b + 1 < half; ++b) k += z > 0 ? a > lc_eden_boundary(bits, b) : a >= lc_eden_boundary(bits, b);
  return z > 0 ? half + k : half - 1 - k;
}

// By what a block of this absolute maximum is multiplied before it is rotated.
LC_FN float lc_eden_range_factor(float absmax) {
  return absmax >= LC_EDEN_LARGE ? LC_EDEN_REDUCTION : lc_range_factor(absmax);
}

// sqrt(P) and 1/sqrt(P) for P = 2^log2_size, and how the latter is applied: to the scale where that is exact (P a power
// of 4), otherwise to the elements.
LC_FN float lc_eden_root(int log2_size) {
  return (log2_size & 1 ? 1.41421356237f : 1.0f) * lc_float((unsigned int)(127 + log2_size / 2) << 23);
}

LC_FN float lc_eden_inverse_root(int log2_size) {
  return (log2_size & 1 ? 0.70710678118f : 1.0f) * lc_float((unsigned int)(127 - log2_size / 2) << 23);
}

LC_FN float lc_eden_on_elements(int log2_size) { return log2_size & 1 ? lc_eden_inverse_root(log2_size) : 1.0f; }
LC_FN float lc_eden_on_scale(int log2_size) { return log2_size & 1 ? 1.0f : lc_eden_inverse_root(log2_size); }

// S for one bit from the sum of magnitudes and the energy of the rotated block, with +-1 for the levels.
LC_FN float lc_eden_scale_of_signs(float l1, float energy, float size, int mode) {
  return mode == LC_EDEN_BIASED ? l1 / size : mode == LC_EDEN_UNBIASED ? energy / l1 : LC_SQRT(energy / size);
}

// S from <c, y>, ||y||^2 and ||c||^2.
LC_FN float lc_eden_scale_of_levels(float dot, float energy, float norm, int mode) {
  return mode == LC_EDEN_BIASED ? dot / norm : mode == LC_EDEN_UNBIASED ? energy / dot : LC_SQRT(energy / norm);
}

#endif
