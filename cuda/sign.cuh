// Arithmetic of sign.py for one block, shared by C++ and CUDA.
#ifndef LC_SIGN_CUH
#define LC_SIGN_CUH
#include "numbers.cuh"

enum { LC_SIGN_L1, LC_SIGN_L2, LC_SIGN_TWO_MEANS, LC_SIGN_NONE };  // sign._KINDS

// The scale of m elements whose magnitudes (or squares) sum to `sum` after multiplication by `factor`.
LC_FN float lc_sign_scale(float sum, float m, float factor, int kind) {
  const float mean = sum / m;
  return (kind == LC_SIGN_L2 ? LC_SQRT(mean) : mean) / factor;
}

// The two means: of `count` elements >= 0, and of `count` elements < 0, from their sums.
LC_FN float lc_sign_mean_plus(float sum, unsigned int count, float factor) {
  return sum / (float)(count > 1 ? count : 1) / factor;
}

LC_FN float lc_sign_mean_minus(float sum, unsigned int count, float factor) {
  return 0.0f - -sum / (float)(count > 1 ? count : 1) / factor;
}

#endif
