// Kernels of float8.py: e4m3 and e5m2 with a scale per block. Blocks: powers of two from 8 to 8192.
#include "blocks.cuh"

struct Float8Format {
  static constexpr int BITS = 8;
  struct Grid {
    float scale, inverse;
  };
  int e5m2;

  __device__ int scale_bytes() const { return 4; }
  __device__ u32 adjust(float p[8]) const { return 0; }

  __device__ Grid grid(const float p[8], u32 largest, int valid, int group) const {
    __shared__ u32 shared[32];
    const float absmax = lc_float(lc_group_max(largest, group, shared)), top = lc_float8_largest(e5m2);
    if (!(absmax >= LC_TINY)) return {0.0f, 0.0f};
    return {lc_block_scale(absmax, top), top / absmax};
  }

  __device__ void store(u8* at, const Grid& grid) const { lc_store_float(at, grid.scale); }
  __device__ Grid load(const u8* at) const { return {lc_load_float(at), 0.0f}; }

  __device__ void codes(const Grid& grid, const float p[8], i64 first, u32 code[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) code[j] = lc_float8_code(p[j], grid.inverse, e5m2);
  }

  __device__ float value(const Grid& grid, u32 code) const { return lc_float8_value(code, e5m2) * grid.scale; }
};

extern "C" __global__ void __launch_bounds__(1024)
lc_float8_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
                 int block, int e5m2, u8* body, i64 codes_at, u32* flags) {
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  lc_encode_blocks(Float8Format{e5m2}, source, candidate, block, body, codes_at, flags);
}

extern "C" __global__ void __launch_bounds__(256)
lc_float8_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
                 float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
                 int block, int e5m2, i64 codes_at) {
  const LcSink sink = {count,    stride,   weights,        weight,   divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  lc_decode_blocks(Float8Format{e5m2}, bodies, sink, block, codes_at);
}
