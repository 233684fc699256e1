// Keep block statistics finite, as ranges.py: non-finite elements, and blocks whose sums or squares would leave float32.
#pragma once
#include "kernels.h"
#include "numbers.cuh"

enum { LC_SATURATED = 8 };  // codec.py

// Flags of p[0..m-1] and the absolute maximum of its finite elements.
static inline int lc_survey(const float* p, int64_t m, float* absmax) {
  uint32_t largest = 0, over = 0, nan = 0;
  for (int64_t i = 0; i < m; ++i) {
    const uint32_t u = lc_bits(p[i]) & 0x7FFFFFFFu;
    const bool finite = u < 0x7F800000u;
    largest = finite && u > largest ? u : largest;
    over |= !finite;
    nan |= u > 0x7F800000u;
  }
  *absmax = lc_float(largest);
  if (!over) return 0;
  bool inf = false;
  for (int64_t i = 0; i < m; ++i) inf |= (lc_bits(p[i]) & 0x7FFFFFFFu) == 0x7F800000u;
  return (nan ? LC_HAS_NAN : 0) | (inf ? LC_HAS_INF : 0);
}

// out = factor * p with non-finite elements replaced by 0.
static inline void lc_clean(const float* p, int64_t m, float factor, float* out) {
  for (int64_t i = 0; i < m; ++i) out[i] = lc_finite(p[i]) ? factor * p[i] : 0.0f;
}

static inline float lc_load_float(const uint8_t* at) {
  float v;
  memcpy(&v, at, 4);
  return v;
}

static inline void lc_store_float(uint8_t* at, float v) { memcpy(at, &v, 4); }

// Elements below which a second thread costs more than it saves.
constexpr int64_t LC_THREAD_ELEMENTS = 32768;

// Units of `unit` elements that one thread should at least get.
static inline int64_t lc_thread_grain(int64_t unit) {
  return unit >= LC_THREAD_ELEMENTS ? 1 : LC_THREAD_ELEMENTS / unit;
}
