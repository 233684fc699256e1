// Kernels of e3m0.py: sign and power of two of every element. Blocks: powers of two from 8 to 8192.
#include "blocks.cuh"

template <bool STOCHASTIC>
struct E3M0Format {
  static constexpr int BITS = 4;
  struct Grid {
    float scale, threshold;
  };
  int pow2;
  u64 seed;
  u32 stream, step;

  __device__ int scale_bytes() const { return pow2 ? 1 : 4; }
  __device__ u32 adjust(float p[8]) const { return 0; }

  __device__ Grid grid(const float p[8], u32 largest, int valid, int group) const {
    __shared__ u32 shared[32];
    const float scale = lc_e3m0_scale(lc_float(lc_group_max(largest, group, shared)), pow2);
    return {scale, lc_e3m0_threshold(scale)};
  }

  __device__ void store(u8* at, const Grid& grid) const {
    lc_store_scale(at, grid.scale, pow2 ? LC_SCALE_POW2 : LC_SCALE_F32);
  }

  __device__ Grid load(const u8* at) const { return {lc_load_scale(at, pow2 ? LC_SCALE_POW2 : LC_SCALE_F32), 0.0f}; }

  __device__ void codes(const Grid& grid, const float p[8], i64 first, u32 code[8]) const {
    float u[8];
    if (STOCHASTIC) lc_noise8(first, seed, stream, step, u);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      code[j] = grid.scale == 0.0f ? 0
                : STOCHASTIC       ? lc_e3m0_stochastic_code(p[j], grid.scale, u[j])
                                   : lc_e3m0_code(p[j], grid.threshold, grid.scale);
  }

  __device__ float value(const Grid& grid, u32 code) const { return lc_e3m0_value(code) * grid.scale; }
};

extern "C" __global__ void __launch_bounds__(1024)
lc_e3m0_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
               int block, int pow2, int stochastic, u64 seed, u32 stream, u32 step, u8* body, i64 codes_at, u32* flags) {
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  if (stochastic) {
    lc_encode_blocks(E3M0Format<true>{pow2, seed, stream, step}, source, candidate, block, body, codes_at, flags);
  } else {
    lc_encode_blocks(E3M0Format<false>{pow2}, source, candidate, block, body, codes_at, flags);
  }
}

extern "C" __global__ void __launch_bounds__(256)
lc_e3m0_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
               float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
               int block, int pow2, i64 codes_at) {
  const LcSink sink = {count,    stride,   weights,        weight,   divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  lc_decode_blocks(E3M0Format<false>{pow2}, bodies, sink, block, codes_at);
}
