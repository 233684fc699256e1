// The outer step on flat float32 buffers: one pass, reads three streams, writes two.
#include "kernels.h"

template <bool NESTEROV>
static int outer_sgd(float* __restrict x, float* __restrict b, const float* __restrict d, int64_t n, float nu, float mu) {
  for (int64_t i = 0; i < n; ++i) {
    const float momentum = mu * b[i] + d[i];
    const float step = NESTEROV ? d[i] + mu * momentum : momentum;
    b[i] = momentum;
    x[i] = x[i] - nu * step;
  }
  return 0;
}

// x anchor, b momentum, d pseudo-gradient; each (n,) float32.
LC_API int32_t lc_outer_sgd(float* x, float* b, const float* d, int64_t n, float nu, float mu, int32_t nesterov, int32_t threads) {
  if (n < 32768) threads = 1;
  return lc_parallel(n, 4096, threads, [=](int64_t begin, int64_t stop) {
    return nesterov ? outer_sgd<true>(x + begin, b + begin, d + begin, stop - begin, nu, mu)
                    : outer_sgd<false>(x + begin, b + begin, d + begin, stop - begin, nu, mu);
  });
}
