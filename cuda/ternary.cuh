// Arithmetic of ternary.py for one block and one element, shared by C++ and CUDA. Trits: 0, 1 for +s, 2 for -s.
#ifndef LC_TERNARY_CUH
#define LC_TERNARY_CUH
#include "numbers.cuh"

// Deterministic: magnitudes above this are kept. sum: of the m magnitudes of the block.
LC_FN float lc_ternary_threshold(float sum, float m) { return 0.75f * (sum / m); }

// Deterministic: the scale, times the range factor.
LC_FN float lc_ternary_mean(float kept_sum, unsigned int kept) { return kept_sum / (float)(kept > 1 ? kept : 1); }

// Clipping: the limit at `clip` standard deviations. squares: sum of squared deviations of the block times `factor`.
LC_FN float lc_ternary_limit(float clip, float squares, float m, float factor) {
  return clip * LC_SQRT(squares / m) / factor;
}

LC_FN float lc_ternary_clip(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// Stochastic: the scale of a block; shared: one for all blocks, or 0.
LC_FN float lc_ternary_scale(float absmax, float shared) { return !(absmax >= LC_TINY) ? 0.0f : shared > 0 ? shared : absmax; }

LC_FN unsigned int lc_trit(bool kept, float x) { return kept ? (x < 0 ? 2u : 1u) : 0u; }

LC_FN float lc_ternary_value(unsigned int trit, float scale) { return trit == 0 ? 0.0f : trit == 1 ? scale : -scale; }

#endif
