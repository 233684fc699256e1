// Kernels of quantize.py: block integers of 2, 4 or 8 bits. Blocks: powers of two from 8 to 8192.
#include "blocks.cuh"

template <int WIDTH, bool STOCHASTIC>
struct IntFormat {
  static constexpr int BITS = WIDTH;
  typedef LcIntGrid Grid;
  int affine, scale;
  u64 seed;
  u32 stream, step;

  __device__ int scale_bytes() const { return affine ? 8 : lc_scale_bytes(scale); }

  __device__ u32 adjust(float p[8]) const {
    u32 clipped = 0;
    if (!affine) return 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) clipped |= lc_int_clip(p[j]) != p[j], p[j] = lc_int_clip(p[j]);
    return clipped ? LC_SATURATED : 0;
  }

  __device__ Grid grid(const float p[8], u32 largest, int valid, int group) const {
    __shared__ u32 first[32], second[32];
    if (!affine) return lc_int_symmetric_grid(lc_float(lc_group_max(largest, group, first)), BITS, scale);
    u32 high = 0, low = 0;  // unsigned keys in the order of the numbers, and in the opposite one
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 bits = lc_bits(p[j]), key = bits >> 31 ? ~bits : bits | 0x80000000u;
      if (j < valid) high = max(high, key), low = max(low, ~key);
    }
    high = lc_group_max(high, group, first), low = ~lc_group_max(low, group, second);
    return lc_int_affine_grid(number(low), number(high), BITS);
  }

  __device__ static float number(u32 key) { return lc_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

  __device__ void store(u8* at, const Grid& grid) const {
    if (affine) {
      lc_store_float(at, grid.low), lc_store_float(at + 4, grid.step);
    } else {
      lc_store_scale(at, grid.step, scale);
    }
  }

  __device__ Grid load(const u8* at) const {
    if (affine) return {lc_load_float(at), lc_load_float(at + 4), 0.0f};
    return {0.0f, lc_load_scale(at, scale), 0.0f};
  }

  __device__ void codes(const Grid& grid, const float p[8], i64 first, u32 code[8]) const {
    float u[8];
    if (STOCHASTIC) lc_noise8(first, seed, stream, step, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float y = lc_int_scaled(grid, p[j], affine);
      code[j] = lc_int_code(STOCHASTIC ? LC_FLOOR(y + u[j]) : LC_RINT(y), BITS, affine);
    }
  }

  __device__ float value(const Grid& grid, u32 code) const { return lc_int_value(grid, code, BITS, affine); }
};

// Codes of `bits` bits; stochastic: 0 or 1.
extern "C" __global__ void __launch_bounds__(1024)
lc_int_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
              int block, int bits, int affine, int scale, int stochastic, u64 seed, u32 stream, u32 step, u8* body,
              i64 codes_at, u32* flags) {
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  const auto run = [&](const auto& format) {
    lc_encode_blocks(format, source, candidate, block, body, codes_at, flags);
  };
  switch (bits + stochastic) {
    case 2: return run(IntFormat<2, false>{affine, scale});
    case 3: return run(IntFormat<2, true>{affine, scale, seed, stream, step});
    case 4: return run(IntFormat<4, false>{affine, scale});
    case 5: return run(IntFormat<4, true>{affine, scale, seed, stream, step});
    case 8: return run(IntFormat<8, false>{affine, scale});
    case 9: return run(IntFormat<8, true>{affine, scale, seed, stream, step});
  }
}

extern "C" __global__ void __launch_bounds__(256)
lc_int_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
              float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
              int block, int bits, int affine, int scale, i64 codes_at) {
  const LcSink sink = {count,    stride,   weights,        weight,   divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  const auto run = [&](const auto& format) { lc_decode_blocks(format, bodies, sink, block, codes_at); };
  switch (bits) {
    case 2: return run(IntFormat<2, false>{affine, scale});
    case 4: return run(IntFormat<4, false>{affine, scale});
    case 8: return run(IntFormat<8, false>{affine, scale});
  }
}
