// The two passes of a sync over a fragment: build the pseudo-gradient, apply the outer step. Each reads and writes main
// memory once. A fragment is a table of pieces: live tensor memory and where it lies in the flat buffers.
#include "input.h"

namespace {

struct Piece {
  void* live;
  int64_t start, length;  // extent in the flat buffers
};

constexpr int64_t RUN = 2048;  // elements handled at a time: all streams of a run stay in L1

inline void* advanced(void* live, int dtype, int64_t by) {
  return dtype == LC_F32 ? (void*)((float*)live + by) : (void*)((uint16_t*)live + by);
}

inline void subtract(const float* __restrict x, const float* __restrict live, float* __restrict out, int64_t m) {
  for (int64_t i = 0; i < m; ++i) out[i] = x[i] - live[i];
}

template <bool NESTEROV>
void outer_sgd(float* __restrict x, float* __restrict b, const float* __restrict d, int64_t m, float nu, float mu) {
  for (int64_t i = 0; i < m; ++i) {
    const float momentum = mu * b[i] + d[i];
    const float step = NESTEROV ? d[i] + mu * momentum : momentum;
    b[i] = momentum;
    x[i] = x[i] - nu * step;
  }
}

inline void outer_sgd(float* x, float* b, const float* d, int64_t m, float nu, float mu, int nesterov) {
  if (nesterov) outer_sgd<true>(x, b, d, m, nu, mu);
  else outer_sgd<false>(x, b, d, m, nu, mu);
}

// As torch rounds: to nearest even, every NaN to the same one.
inline uint16_t round_bf16(float x) {
  const uint32_t u = lc_bits(x), rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  return (u & 0x7FFFFFFF) > 0x7F800000u ? 0x7FC0 : (uint16_t)rounded;
}

void write_live(const float* x, void* live, int dtype, int64_t m) {
  if (dtype == LC_F32) {
    memcpy(live, x, m * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < m; ++i) ((uint16_t*)live)[i] = round_bf16(x[i]);
}

// Calls run(piece, offset inside it, elements) for consecutive runs of all pieces, in parallel over pieces.
template <class Run>
void for_runs(const Piece* pieces, int64_t count, int threads, const Run& run) {
  lc_parallel(count, 1, threads, [&](int64_t begin, int64_t stop) {
    for (int64_t p = begin; p < stop; ++p)
      for (int64_t i = 0; i < pieces[p].length; i += RUN)
        run(pieces[p], i, pieces[p].length - i < RUN ? pieces[p].length - i : RUN);
    return 0;
  });
}

}  // namespace

// out = anchor - live for every piece. pieces: (count, 3) int64 rows (address, start, length); dtype: that of the live
// tensors, float32 or bfloat16; anchor, out: flat float32.
LC_API int32_t lc_pack_delta(const void* pieces, int64_t count, int32_t dtype, const float* anchor, float* out,
                             int32_t threads) {
  for_runs((const Piece*)pieces, count, threads, [=](const Piece& piece, int64_t i, int64_t m) {
    float scratch[RUN];
    const int64_t at = piece.start + i;
    subtract(anchor + at, lc_input(piece.live, dtype, i, m, scratch), out + at, m);
  });
  return 0;
}

// The outer SGD step on anchor and momentum, then live = anchor, for every piece.
LC_API int32_t lc_apply_sgd(const void* pieces, int64_t count, int32_t dtype, float* anchor, float* momentum,
                            const float* delta, float nu, float mu, int32_t nesterov, int32_t threads) {
  for_runs((const Piece*)pieces, count, threads, [=](const Piece& piece, int64_t i, int64_t m) {
    const int64_t at = piece.start + i;
    outer_sgd(anchor + at, momentum + at, delta + at, m, nu, mu, nesterov);
    write_live(anchor + at, advanced(piece.live, dtype, i), dtype, m);
  });
  return 0;
}

// The outer SGD step on flat buffers: x anchor, b momentum, d pseudo-gradient, each (n,) float32.
LC_API int32_t lc_outer_sgd(float* x, float* b, const float* d, int64_t n, float nu, float mu, int32_t nesterov,
                            int32_t threads) {
  return lc_parallel(n, 4096, n < 32768 ? 1 : threads, [=](int64_t begin, int64_t stop) {
    outer_sgd(x + begin, b + begin, d + begin, stop - begin, nu, mu, nesterov);
    return 0;
  });
}
