// Kernels of cast.py: float32, bfloat16 or float16, without scales.
#include "device.cuh"

enum { CAST_F32, CAST_BF16, CAST_F16 };  // cast._KINDS

LC_DEVICE float cast_largest(int kind) {
  return kind == CAST_BF16 ? lc_bf16_to_f32(0x7F7F) : kind == CAST_F16 ? 65504.0f : lc_float(0x7F7FFFFFu);
}

// The code of a finite number; beyond the largest one that is the code of the largest.
LC_DEVICE u32 cast_code(float x, int kind) {
  return kind == CAST_F32 ? lc_bits(x) : kind == CAST_BF16 ? lc_f32_to_bf16(x) : lc_f32_to_f16(x);
}

LC_DEVICE float cast_value(u32 code, int kind) { return kind == CAST_F32 ? lc_float(code) : lc_widen16(code, kind); }

LC_DEVICE void cast_store(u8* body, i64 first, i64 n, const u32 codes[8], int kind) {
  const int size = kind == CAST_F32 ? 4 : 2;
  u8* p = body + first * size;
  if (first + 8 <= n && lc_aligned(p, 16)) {
    if (kind == CAST_F32) {
      ((uint4*)p)[0] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
      ((uint4*)p)[1] = make_uint4(codes[4], codes[5], codes[6], codes[7]);
    } else {
      *(uint4*)p = make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16, codes[4] | codes[5] << 16,
                              codes[6] | codes[7] << 16);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (first + j < n) lc_store_bytes(p + size * j, codes[j], size);
}

LC_DEVICE void cast_load(const u8* body, i64 first, i64 n, float v[8], int kind) {
  const int size = kind == CAST_F32 ? 4 : 2;
  const u8* p = body + first * size;
  if (lc_aligned(p, size)) {
    if (kind == CAST_F32) {
      lc_load8((const float*)body, first, n, v);
    } else {
      lc_load8_narrow((const u16*)body, kind, first, n, v);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = first + j < n ? cast_value((u32)lc_load_bytes(p + size * j, size), kind) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(256)
lc_cast_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
               int kind, u8* body, u32* flags) {
  const i64 first = 8 * lc_thread();
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  const LcEight e = lc_take8(source, first);
  u32 codes[8];
  float decoded[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) codes[j] = cast_code(e.v[j], kind), decoded[j] = cast_value(codes[j], kind);
  lc_report(flags, e.flags | (lc_float(e.largest) > cast_largest(kind) ? LC_SATURATED : 0));
  cast_store(body, first, n, codes, kind);
  lc_zero_padding(body, n * (kind == CAST_F32 ? 4 : 2));
  if (candidate) lc_store_residual(candidate, n, first, e, decoded);
}

extern "C" __global__ void __launch_bounds__(256)
lc_cast_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
               float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
               int kind) {
  const i64 first = 8 * lc_thread();
  if (first >= n) return;
  const LcSink sink = {count,    stride,   weights,        weight,   divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  lc_sink8(sink, first, [&](int rank, float v[8]) { cast_load(bodies + rank * stride, first, n, v, kind); });
}
