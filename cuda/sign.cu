// Kernels of sign.py: one bit per element and a scale per block.
#include "device.cuh"
#include "sign.cuh"

// Scale bytes of a block.
LC_DEVICE int sign_scale_bytes(int kind) { return kind == LC_SIGN_NONE ? 0 : kind == LC_SIGN_TWO_MEANS ? 8 : 4; }

// What bit 0 and bit 1 stand for.
struct SignValues {
  float plus, minus;
};

LC_DEVICE SignValues sign_values(const u8* scales, i64 block_index, int kind) {
  if (kind == LC_SIGN_NONE) return {1.0f, -1.0f};
  const u8* at = scales + block_index * sign_scale_bytes(kind);
  const float plus = lc_load_float(at);
  return {plus, kind == LC_SIGN_TWO_MEANS ? lc_load_float(at + 4) : -plus};
}

LC_DEVICE void sign_expand(u32 bits, SignValues values, float v[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = bits >> j & 1 ? values.minus : values.plus;
}

// Scales of a block of m elements of which those in `negative` are below 0.
LC_DEVICE SignValues sign_scales(const float q[8], u32 negative, int m, int group, float factor, int kind, float* shared,
                                 u32 counts[32]) {
  float part[8];
#pragma unroll
  for (int j = 0; j < 8; ++j)
    part[j] = kind == LC_SIGN_L1 ? lc_float(lc_magnitude(q[j])) : kind == LC_SIGN_L2 ? q[j] * q[j] : q[j] < 0 ? 0.0f : q[j];
  const float sum = lc_tree_sum(part, group, shared);
  if (kind != LC_SIGN_TWO_MEANS) {
    const float scale = lc_sign_scale(sum, (float)m, factor, kind);
    return {scale, -scale};
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) part[j] = q[j] < 0 ? q[j] : 0.0f;
  const float below = lc_tree_sum(part, group, shared);
  const u32 count = lc_group_count((u32)__popc(negative), group, counts);
  return {lc_sign_mean_plus(sum, (u32)m - count, factor), lc_sign_mean_minus(below, count, factor)};
}

// block: a power of two from 8 to 8192. With a residual or an anchor, `candidate` receives the new residual.
extern "C" __global__ void __launch_bounds__(1024)
lc_sign_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
               int block, int kind, u8* scales, u8* bits, u32* flags) {
  LC_DYNAMIC_SHARED(float, shared);
  __shared__ u32 largest[32], counts[32];
  const i64 first = 8 * lc_thread();
  const int group = block / 8;
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  const LcEight e = lc_take8(source, first);
  lc_report(flags, e.flags);
  lc_zero_padding(bits, (n + 7) / 8);
  const float absmax = lc_float(lc_group_max(e.largest, group, largest));
  const bool alive = kind == LC_SIGN_NONE || absmax >= LC_TINY;
  const float factor = lc_range_factor(absmax);
  float q[8];
  u32 negative = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) q[j] = factor * e.v[j], negative |= (u32)(e.v[j] < 0 && alive) << j;
  SignValues values = {1.0f, -1.0f};
  if (kind != LC_SIGN_NONE) {
    const i64 begin = first & ~(i64)(block - 1);
    const int m = n - begin < block ? (int)(n - begin) : block;
    values = sign_scales(q, negative, m, group, factor, kind, shared, counts);
    if (!alive) values = {0.0f, 0.0f};
    if (first == begin && first < n) {
      u8* at = scales + lc_block_of(first, block) * sign_scale_bytes(kind);
      lc_store_float(at, values.plus);
      if (kind == LC_SIGN_TWO_MEANS) lc_store_float(at + 4, values.minus);
    }
  }
  lc_store_codes<1>(bits, first, n, negative);
  if (candidate) {
    float decoded[8];
    sign_expand(negative, values, decoded);
    lc_store_residual(candidate, n, first, e, decoded);
  }
}

// bodies: `count` of them, `stride` bytes apart; their bits begin `bits_at` bytes behind the scales. See LcSink.
extern "C" __global__ void __launch_bounds__(256)
lc_sign_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
               float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
               int block, int kind, i64 bits_at) {
  const i64 first = 8 * lc_thread();
  if (first >= n) return;
  const LcSink sink = {count,    stride,         weights, weight, divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  lc_sink8(sink, first, [&](int rank, float v[8]) {
    const u8* body = bodies + rank * stride;
    sign_expand((u32)lc_load_codes<1>(body + bits_at, first, n), sign_values(body, lc_block_of(first, block), kind), v);
  });
}
