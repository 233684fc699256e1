// How vectors enter and leave kernels: inputs of any dtype as float32, corrected inputs, streaming stores.
#pragma once
#include "kernels.h"
#include "numbers.cuh"

#ifdef LC_X86
LC_AVX2 static inline int64_t lc_widen_avx2(const uint16_t* x, int dtype, int64_t m, float* out) {
  int64_t i = 0;
  for (; i + 8 <= m; i += 8) {
    const __m128i h = _mm_loadu_si128((const __m128i*)(x + i));
    const __m256 wide = dtype == LC_F16 ? _mm256_cvtph_ps(h)
                                        : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    _mm256_storeu_ps(out + i, wide);
  }
  return i;
}
#endif

// What error feedback encodes: p = decay * residual + x.
#ifdef LC_X86
LC_AVX2 static inline int64_t lc_correct_avx2(const float* x, const float* residual, float decay, int64_t m, float* p) {
  const __m256 factor = _mm256_set1_ps(decay);
  int64_t i = 0;
  for (; i + 8 <= m; i += 8) {
    const __m256 r = _mm256_loadu_ps(residual + i);
    _mm256_storeu_ps(p + i, _mm256_add_ps(decay == 1 ? r : _mm256_mul_ps(factor, r), _mm256_loadu_ps(x + i)));
  }
  return i;
}
#endif

static inline void lc_correct(const float* x, const float* residual, float decay, int64_t m, float* p) {
  int64_t i = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) i = lc_correct_avx2(x, residual, decay, m, p);
#endif
  for (; i < m; ++i) p[i] = (decay == 1 ? residual[i] : decay * residual[i]) + x[i];
}

// Streaming stores need whole 32-byte lines and pay only where the output does not fit the caches.
static inline bool lc_streams(const float* out, int64_t n) {
  return lc_active_level >= LC_LEVEL_AVX2 && 4 * n >= LC_STREAM_BYTES && (uintptr_t)out % 32 == 0;
}

// Every thread that may have used streaming stores ends with this.
static inline void lc_stream_fence() {
#ifdef LC_X86
  _mm_sfence();
#endif
}

// Zero the bytes between the end of a section and its padding to 4 bytes.
static inline void lc_zero_padding(uint8_t* section, int64_t used) {
  for (; used % 4; ++used) section[used] = 0;
}

// Elements first .. first+m-1 of x: x's own memory where it is float32, otherwise widened into `scratch` (m floats).
static inline const float* lc_input(const void* x, int dtype, int64_t first, int64_t m, float* scratch) {
  if (dtype == LC_F32) return (const float*)x + first;
  const uint16_t* narrow = (const uint16_t*)x + first;
  int64_t i = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) i = lc_widen_avx2(narrow, dtype, m, scratch);
#endif
  for (; i < m; ++i) scratch[i] = dtype == LC_F16 ? lc_f16_to_f32(narrow[i]) : lc_bf16_to_f32(narrow[i]);
  return scratch;
}
