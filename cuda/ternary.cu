// Kernels of ternary.py. Base 3: five elements in a byte, so a thread block holds whole groups of five blocks.
#include "ternary.cuh"
#include "device.cuh"

// How the kept elements are chosen.
struct TernaryRule {
  int stochastic;
  float clip, shared_scale;  // 0: none
  u64 seed;
  u32 stream, step;
};

// Shared memory of the reductions; `sums`: see lc_tree_sum.
struct TernarySpace {
  float* sums;
  u32 *clipped, *counts;
};

LC_DEVICE float ternary_deterministic(const LcEight& e, float absmax, int m, int group, TernarySpace& space, u32 trits[8]) {
  const float factor = lc_range_factor(absmax);
  float magnitude[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) magnitude[j] = lc_float(lc_magnitude(factor * e.v[j]));
  const float threshold = lc_ternary_threshold(lc_tree_sum(magnitude, group, space.sums), (float)m);
  u32 count = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const bool kept = magnitude[j] > threshold && absmax >= LC_TINY;
    trits[j] = lc_trit(kept, e.v[j]), count += kept;
    magnitude[j] = kept ? magnitude[j] : 0.0f;
  }
  const float sum = lc_tree_sum(magnitude, group, space.sums);
  const u32 kept = lc_group_count(count, group, space.counts);
  return absmax >= LC_TINY ? lc_ternary_mean(sum, kept) / factor : 0.0f;
}

// Clamp the elements of the block to +-clip standard deviations.
LC_DEVICE void ternary_clip(float v[8], float absmax, float clip, i64 first, i64 n, int m, int group, float* sums) {
  const float factor = lc_range_factor(absmax);
  float part[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) part[j] = factor * v[j];
  const float mean = lc_tree_sum(part, group, sums) / (float)m;
#pragma unroll
  for (int j = 0; j < 8; ++j) part[j] = first + j < n ? (part[j] - mean) * (part[j] - mean) : 0.0f;
  const float limit = lc_ternary_limit(clip, lc_tree_sum(part, group, sums), (float)m, factor);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = lc_ternary_clip(v[j], limit);
}

LC_DEVICE float ternary_stochastic(const TernaryRule& rule, const LcEight& e, float absmax, i64 first, i64 n, int m,
                                   int group, TernarySpace& space, u32 trits[8], u32& found) {
  float v[8], u[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = e.v[j];
  if (rule.clip > 0) {
    ternary_clip(v, absmax, rule.clip, first, n, m, group, space.sums);
    absmax = lc_float(lc_group_max(lc_largest8(v), group, space.clipped));
  }
  const float scale = lc_ternary_scale(absmax, rule.shared_scale), inverse = scale > 0 ? 1.0f / scale : 0.0f;
  if (scale > 0 && absmax > scale) found |= LC_SATURATED;
  lc_noise8(first, rule.seed, rule.stream, rule.step, u);
#pragma unroll
  for (int j = 0; j < 8; ++j) trits[j] = lc_trit(u[j] < lc_float(lc_magnitude(v[j])) * inverse, v[j]);
  return scale;
}

// Trits of the whole thread block, a byte each, become base-3 bytes: four of them by each of the first threads.
LC_DEVICE void ternary_pack3(const u8* trits, u8* codes, i64 tile_first, i64 n) {
  const i64 bytes = (n + 4) / 5, at = tile_first / 5;
  const int i = 4 * (int)threadIdx.x;
  if (i >= (int)blockDim.x * 8 / 5 || at + i >= bytes) return;
  const u32* twenty = (const u32*)(trits + 5 * i);
  u32 word = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {  // trits 5b .. 5b + 4 are at byte b of word b
    const u32 low = twenty[b] >> (8 * b), four = b ? low | twenty[b + 1] << (32 - 8 * b) : low;
    // byte 3 of the product is t0 + 3 t1 + 9 t2 + 27 t3, and nothing is carried into it
    word |= ((four * 0x0103091Bu >> 24) + 81 * (twenty[b + 1] >> (8 * b) & 255)) << (8 * b);
  }
  if (at + i + 4 <= bytes) {
    lc_store_word(codes + at + i, word);
  } else {
    lc_store_bytes(codes + at + i, word, (int)(bytes - at - i));
  }
}

// block: a power of two from 8 on, up to 1024 with base 3 and 8192 with 2 bits. With base 3 a thread block has a multiple
// of 5 * block / 8 threads, and of 20.
extern "C" __global__ void __launch_bounds__(1024)
lc_ternary_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate,
                  i64 n, int block, int two_bit, int stochastic, float clip, float shared_scale, u64 seed, u32 stream,
                  u32 step, u8* scales, u8* codes, u32* flags) {
  LC_DYNAMIC_SHARED(float, shared);  // of the sums, or the trits, which come after them
  __shared__ u32 largest[32], clipped[32], counts[32];
  const i64 first = 8 * lc_thread(), begin = first & ~(i64)(block - 1);
  const int group = block / 8, m = n - begin < block ? (int)(n - begin) : block;
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  const TernaryRule rule = {stochastic, clip, shared_scale, seed, stream, step};
  TernarySpace space = {shared, clipped, counts};
  const LcEight e = lc_take8(source, first);
  const float absmax = lc_float(lc_group_max(e.largest, group, largest));
  u32 trits[8], found = e.flags, packed = 0;
  const float scale = stochastic ? ternary_stochastic(rule, e, absmax, first, n, m, group, space, trits, found)
                                 : ternary_deterministic(e, absmax, m, group, space, trits);
  lc_report(flags, found);
  if (first == begin && first < n) lc_store_float(scales + 4 * lc_block_of(first, block), scale);
  if (candidate) {
    float decoded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) decoded[j] = lc_ternary_value(trits[j], scale);
    lc_store_residual(candidate, n, first, e, decoded);
  }
  if (two_bit) {
#pragma unroll
    for (int j = 0; j < 8; ++j) packed |= trits[j] << (2 * j);
    lc_store_codes<2>(codes, first, n, packed);
    lc_zero_padding(codes, (n + 3) / 4);
    return;
  }
  u8* bytes = (u8*)shared;
  uint2 pair = {0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) pair.x |= trits[j] << (8 * j), pair.y |= trits[4 + j] << (8 * j);
  ((uint2*)bytes)[threadIdx.x] = pair;
  __syncthreads();
  ternary_pack3(bytes, codes, 8 * (i64)blockIdx.x * blockDim.x, n);
  lc_zero_padding(codes, (n + 4) / 5);
}

// The digits of eight elements from `first` on; all 3 where a byte of codes is none. Three bytes hold them.
LC_DEVICE void ternary_digits3(const u8* codes, i64 first, i64 n, u32 trits[8]) {
  const i64 at = first / 5, last = (n - 1) / 5;
  const int place = (int)(first - 5 * at);
  const u32 a = codes[at], b = at < last ? codes[at + 1] : 0, c = place > 2 && at + 1 < last ? codes[at + 2] : 0;
  const bool damaged = a > 242 || b > 242 || c > 242;
  u32 rest = a + 243 * b + 59049 * c;
#pragma unroll
  for (int k = 0; k < 4; ++k) rest = k < place ? rest / 3 : rest;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const u32 next = rest / 3;
    trits[j] = damaged ? 3 : rest - 3 * next;
    rest = next;
  }
}

LC_DEVICE void ternary_load(const u8* codes, i64 first, i64 n, int two_bit, u32 trits[8]) {
  if (!two_bit) return ternary_digits3(codes, first, n, trits);
  const u32 packed = (u32)lc_load_codes<2>(codes, first, n);
#pragma unroll
  for (int j = 0; j < 8; ++j) trits[j] = first + j < n ? packed >> (2 * j) & 3 : 0;
}

// flags[0] becomes 1 where a code is none; then what is written means nothing. With `add` or an anchor, lc_ternary_check comes
// first, and where it has found something nothing is changed.
extern "C" __global__ void __launch_bounds__(256)
lc_ternary_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
                  float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
                  int block, int two_bit, i64 codes_at, u32* flags) {
  const i64 first = 8 * lc_thread();
  if (first >= n || ((add || anchor) && *flags)) return;
  const LcSink sink = {count,    stride,   weights,        weight,   divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  lc_sink8(sink, first, [&](int rank, float v[8]) {
    const u8* body = bodies + rank * stride;
    u32 trits[8];
    ternary_load(body + codes_at, first, n, two_bit, trits);
    const float scale = lc_load_float(body + 4 * lc_block_of(first, block));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (trits[j] == 3) lc_report(flags, 1);
      v[j] = lc_ternary_value(trits[j], scale);
    }
  });
}

// Whether every code is one that an encoder writes: flags[0] becomes 1 if not.
extern "C" __global__ void __launch_bounds__(256)
lc_ternary_check(const u8* codes, i64 n, int two_bit, u32* flags) {
  const i64 first = 8 * lc_thread();
  if (first >= n) return;
  u32 trits[8], damaged = 0;
  ternary_load(codes, first, n, two_bit, trits);
#pragma unroll
  for (int j = 0; j < 8; ++j) damaged |= trits[j] == 3;
  lc_report(flags, damaged);
}
