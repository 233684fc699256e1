// Products of thin factors (powersgd.py): out = P Q^T with the terms of every element added in order.
#include "kernels.h"

namespace {

constexpr int64_t COLUMNS = 2048;  // columns at a time, so that what is added to stays in the first cache
constexpr int64_t GRAIN = 1 << 16;  // elements worth another thread

static inline __attribute__((always_inline)) void product_row(const float* left, const float* right, float* out,
                                                              int64_t cols, int64_t rank) {
  for (int64_t first = 0; first < cols; first += COLUMNS) {
    const int64_t m = cols - first < COLUMNS ? cols - first : COLUMNS;
    const float* q = right + first;
    float* to = out + first;
    for (int64_t c = 0; c < m; ++c) to[c] = left[0] * q[c];
    for (int64_t j = 1; j < rank; ++j)
      for (int64_t c = 0; c < m; ++c) to[c] += left[j] * q[j * cols + c];
  }
}

void product_portable(const float* left, const float* right, float* out, int64_t begin, int64_t end, int64_t cols,
                      int64_t rank) {
  for (int64_t i = begin; i < end; ++i) product_row(left + i * rank, right, out + i * cols, cols, rank);
}

#ifdef LC_X86
LC_AVX2 void product_avx2(const float* left, const float* right, float* out, int64_t begin, int64_t end, int64_t cols,
                          int64_t rank) {
  for (int64_t i = begin; i < end; ++i) product_row(left + i * rank, right, out + i * cols, cols, rank);
}
#endif

}  // namespace

// left: rows x rank; right: rank x cols (transposed); out: rows x cols. rank >= 1.
LC_API int32_t lc_factor_product(const float* left, const float* right, float* out, int64_t rows, int64_t cols, int64_t rank,
                                 int32_t threads) {
  return lc_parallel(rows, GRAIN / (cols + 1) + 1, threads, [&](int64_t begin, int64_t end) {
#ifdef LC_X86
    if (lc_active_level >= LC_LEVEL_AVX2) {
      product_avx2(left, right, out, begin, end, cols, rank);
      return 0;
    }
#endif
    product_portable(left, right, out, begin, end, cols, rank);
    return 0;
  });
}
