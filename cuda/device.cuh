// What the kernels share: how a thread gets its eight elements, reductions over blocks of elements in the order of
// summation that every implementation uses, and how codes and decoded values leave.
//
// A thread has eight neighbouring elements: their codes fill whole bytes whatever the width of a code, and a warp reads
// and writes whole lines. A block of B elements (B a power of two, from 8 on) belongs to B / 8 neighbouring threads, its
// group. Rules of every kernel: nothing depends on lanes running in lockstep, on the order of thread blocks, or on atomics
// for a floating-point result; addresses may be misaligned; all indices have 64 bits.
#ifndef LC_DEVICE_CUH
#define LC_DEVICE_CUH
#include "numbers.cuh"
#include "philox.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define LC_DEVICE static __device__ __forceinline__
#define LC_ALL 0xFFFFFFFFu  // all lanes of a warp
#ifndef LC_DYNAMIC_SHARED
#define LC_DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

enum { LC_F32 = 0, LC_BF16 = 1, LC_F16 = 2 };                        // kernels.py
enum { LC_HAS_NAN = 1, LC_HAS_INF = 2, LC_SATURATED = 8 };           // codec.py

LC_DEVICE i64 lc_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
LC_DEVICE int lc_lane() { return (int)(threadIdx.x & 31); }
LC_DEVICE i64 lc_block_of(i64 element, int block) { return element >> (31 - __clz(block)); }  // block: a power of two
LC_DEVICE bool lc_aligned(const void* p, int bytes) { return ((u64)p & (u64)(bytes - 1)) == 0; }
LC_DEVICE i64 lc_pad4(i64 bytes) { return (bytes + 3) & ~(i64)3; }

// ---- eight elements in

LC_DEVICE void lc_load8(const float* p, i64 first, i64 n, float v[8]) {
  if (first + 8 <= n && lc_aligned(p + first, 16)) {
    const float4 a = *(const float4*)(p + first), b = *(const float4*)(p + first + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = first + j < n ? p[first + j] : 0.0f;
}

LC_DEVICE float lc_widen16(u32 half, int dtype) {
  return dtype == LC_BF16 ? lc_bf16_to_f32((u16)half) : lc_f16_to_f32((u16)half);
}

LC_DEVICE void lc_load8_narrow(const u16* p, int dtype, i64 first, i64 n, float v[8]) {
  if (first + 8 <= n && lc_aligned(p + first, 16)) {
    const uint4 a = *(const uint4*)(p + first);
    const u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = lc_widen16(words[j / 2] >> (16 * (j % 2)), dtype);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = first + j < n ? lc_widen16(p[first + j], dtype) : 0.0f;
}

// What is encoded: x, or anchor - x, with decay * residual in front where there is a residual.
struct LcSource {
  const void* x;
  int dtype;
  const float *anchor, *residual;  // or null
  float decay;
  i64 n;
};

LC_DEVICE void lc_load_source(const LcSource& s, i64 first, float v[8]) {
  float other[8];
  if (s.dtype == LC_F32) {
    lc_load8((const float*)s.x, first, s.n, v);
  } else {
    lc_load8_narrow((const u16*)s.x, s.dtype, first, s.n, v);
  }
  if (s.anchor) {
    lc_load8(s.anchor, first, s.n, other);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = other[j] - v[j];
  }
  if (s.residual) {
    lc_load8(s.residual, first, s.n, other);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = (s.decay == 1.0f ? other[j] : s.decay * other[j]) + v[j];
  }
}

// A thread's elements with NaN and infinities replaced by 0 (bit j of `bad`), and the bits of their absolute maximum.
struct LcEight {
  float v[8];
  u32 largest, bad, flags;
};

LC_DEVICE u32 lc_largest8(const float v[8]) {
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) largest = max(largest, lc_magnitude(v[j]));
  return largest;
}

LC_DEVICE LcEight lc_take8(const LcSource& s, i64 first) {
  LcEight e;
  lc_load_source(s, first, e.v);
  e.largest = lc_largest8(e.v), e.bad = 0, e.flags = 0;
  if (e.largest < LC_INFINITY_BITS) return e;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const u32 magnitude = lc_magnitude(e.v[j]);
    if (magnitude < LC_INFINITY_BITS) continue;
    e.flags |= magnitude > LC_INFINITY_BITS ? LC_HAS_NAN : LC_HAS_INF;
    e.bad |= 1u << j, e.v[j] = 0.0f;
  }
  e.largest = lc_largest8(e.v);
  return e;
}

LC_DEVICE void lc_report(u32* flags, u32 found) {
  if (found) atomicOr(flags, found);
}

// Uniform noise of elements first .. first + 7.
LC_DEVICE void lc_noise8(i64 first, u64 seed, u32 stream, u32 step, float u[8]) {
  u32 words[8];
  lc_philox((u64)first / 4, stream, step, seed, words);
  lc_philox((u64)first / 4 + 1, stream, step, seed, words + 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) u[j] = lc_uniform(words[j]);
}

// ---- eight elements out

LC_DEVICE void lc_store8(float* p, i64 first, i64 n, const float v[8]) {
  if (first + 8 <= n && lc_aligned(p + first, 16)) {
    *(float4*)(p + first) = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)(p + first + 4) = make_float4(v[4], v[5], v[6], v[7]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (first + j < n) p[first + j] = v[j];
}

// The new residual: what was to be sent less what a receiver decodes, 0 where it was not finite.
LC_DEVICE void lc_store_residual(float* candidate, i64 n, i64 first, const LcEight& e, const float decoded[8]) {
  float rest[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) rest[j] = e.bad >> j & 1 ? 0.0f : e.v[j] - decoded[j];
  lc_store8(candidate, first, n, rest);
}

LC_DEVICE void lc_store_bytes(u8* p, u64 word, int bytes) {
  for (int i = 0; i < bytes; ++i) p[i] = (u8)(word >> (8 * i));
}

LC_DEVICE u64 lc_load_bytes(const u8* p, int bytes) {
  u64 word = 0;
  for (int i = 0; i < bytes; ++i) word |= (u64)p[i] << (8 * i);
  return word;
}

// Codes of eight elements from element `first` on, BITS <= 8 bits each, to a section of n codes.
template <int BITS>
LC_DEVICE void lc_store_codes(u8* section, i64 first, i64 n, u64 codes) {
  u8* p = section + first / 8 * BITS;
  if (first + 8 > n) {
    if (first < n) lc_store_bytes(p, codes, (int)(((n - first) * BITS + 7) / 8));
    return;
  }
  if (BITS == 1) {
    *p = (u8)codes;
  } else if (BITS == 2 && lc_aligned(section, 2)) {
    *(u16*)p = (u16)codes;
  } else if (BITS == 4 && lc_aligned(section, 4)) {
    *(u32*)p = (u32)codes;
  } else if (BITS == 8 && lc_aligned(section, 8)) {
    *(uint2*)p = make_uint2((u32)codes, (u32)(codes >> 32));
  } else if (BITS == 8 && lc_aligned(section, 4)) {
    ((u32*)p)[0] = (u32)codes, ((u32*)p)[1] = (u32)(codes >> 32);
  } else {
    lc_store_bytes(p, codes, BITS);
  }
}

template <int BITS>
LC_DEVICE u64 lc_load_codes(const u8* section, i64 first, i64 n) {
  const u8* p = section + first / 8 * BITS;
  if (first + 8 > n) return first < n ? lc_load_bytes(p, (int)(((n - first) * BITS + 7) / 8)) : 0;
  if (BITS == 1) return *p;
  if (BITS == 2 && lc_aligned(section, 2)) return *(const u16*)p;
  if (BITS == 4 && lc_aligned(section, 4)) return *(const u32*)p;
  if (BITS == 8 && lc_aligned(section, 8)) {
    const uint2 pair = *(const uint2*)p;
    return (u64)pair.y << 32 | pair.x;
  }
  if (BITS == 8 && lc_aligned(section, 4)) return (u64)((const u32*)p)[1] << 32 | ((const u32*)p)[0];
  return lc_load_bytes(p, BITS);
}

// Bytes of a section after the first `used` ones, up to a multiple of 4, become 0. One thread of the grid does it.
LC_DEVICE void lc_zero_padding(u8* section, i64 used) {
  if (lc_thread() == 0)
    for (i64 i = used; i % 4; ++i) section[i] = 0;
}

LC_DEVICE void lc_store_word(u8* p, u32 word) {
  if (lc_aligned(p, 4)) {
    *(u32*)p = word;
  } else {
    lc_store_bytes(p, word, 4);
  }
}

LC_DEVICE u32 lc_load_word(const u8* p) { return lc_aligned(p, 4) ? *(const u32*)p : (u32)lc_load_bytes(p, 4); }
LC_DEVICE void lc_store_float(u8* p, float v) { lc_store_word(p, lc_bits(v)); }
LC_DEVICE float lc_load_float(const u8* p) { return lc_float(lc_load_word(p)); }

// ---- reductions over a group: all its threads call them and get the result. group: threads of it, a power of two.
// Groups of more than one warp use shared memory and barriers, which all threads of the thread block pass.

LC_DEVICE u32 lc_group_max(u32 v, int group, u32 shared[32]) {
  if (group <= 32) {
    for (int flip = group / 2; flip; flip /= 2) v = max(v, __shfl_xor_sync(LC_ALL, v, flip));
    return v;
  }
  v = __reduce_max_sync(LC_ALL, v);
  if (lc_lane() == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  const int warps = group / 32, first = (int)threadIdx.x / 32 / warps * warps;
  for (int w = first; w < first + warps; ++w) v = max(v, shared[w]);
  return v;
}

LC_DEVICE u32 lc_group_count(u32 v, int group, u32 shared[32]) {
  if (group <= 32) {
    for (int flip = group / 2; flip; flip /= 2) v += __shfl_xor_sync(LC_ALL, v, flip);
    return v;
  }
  v = __reduce_add_sync(LC_ALL, v);
  if (lc_lane() == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  const int warps = group / 32, first = (int)threadIdx.x / 32 / warps * warps;
  v = 0;
  for (int w = first; w < first + warps; ++w) v += shared[w];
  return v;
}

// tree_sum of the 8 * GROUP elements of a group inside a warp. Folding halves means lanes first, those far apart before
// those near, then the eight places. While lanes are folded, each of a pair goes on with half of the places.
template <int GROUP>
LC_DEVICE float lc_lanes_tree_sum(const float v[8]) {
  float a[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = v[j];
  int held = 8;
#pragma unroll
  for (int flip = GROUP / 2; flip; flip /= 2) {
    if (held == 1) {
      a[0] += __shfl_xor_sync(LC_ALL, a[0], flip);
      continue;
    }
    held /= 2;
    const bool upper = lc_lane() & flip;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= held) continue;
      const float mine = upper ? a[j + held] : a[j], other = upper ? a[j] : a[j + held];
      a[j] = mine + __shfl_xor_sync(LC_ALL, other, flip);
    }
  }
#pragma unroll
  for (int level = 0, flip = GROUP / 2; level < 3; ++level, flip /= 2) {
    if (!flip) held /= 2;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < held) a[j] += flip ? __shfl_xor_sync(LC_ALL, a[j], flip) : a[(j + held) & 7];
  }
  return a[0];
}

// The same for a group of several warps: rows of 256 elements are folded column by column, then one row is left.
LC_DEVICE float lc_warps_tree_sum(const float v[8], int group, float* shared) {
  const int me = (int)threadIdx.x % group;
  float* mine = shared + 8 * ((int)threadIdx.x - me);
  *(float4*)(mine + 8 * me) = make_float4(v[0], v[1], v[2], v[3]);
  *(float4*)(mine + 8 * me + 4) = make_float4(v[4], v[5], v[6], v[7]);
  __syncthreads();
  for (int column = me; column < 256; column += group)
    for (int rows = group / 64; rows; rows /= 2)
      for (int r = 0; r < rows; ++r) mine[column + 256 * r] += mine[column + 256 * (r + rows)];
  __syncthreads();
  float a[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) a[j] = mine[lc_lane() + 32 * j];
  float sum = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
#pragma unroll
  for (int flip = 16; flip; flip /= 2) sum += __shfl_xor_sync(LC_ALL, sum, flip);
  __syncthreads();  // before `shared` is used again
  return sum;
}

// shared: 8 floats for each thread of the thread block, where groups have more than one warp.
LC_DEVICE float lc_tree_sum(const float v[8], int group, float* shared) {
  switch (group) {
    case 1: return lc_lanes_tree_sum<1>(v);
    case 2: return lc_lanes_tree_sum<2>(v);
    case 4: return lc_lanes_tree_sum<4>(v);
    case 8: return lc_lanes_tree_sum<8>(v);
    case 16: return lc_lanes_tree_sum<16>(v);
    case 32: return lc_lanes_tree_sum<32>(v);
  }
  return lc_warps_tree_sum(v, group, shared);
}

// ---- decoded values out

// What becomes of the messages of `count` ranks, whose bodies lie `stride` bytes apart, in rank order:
//   sum = w_0 d_0;  sum = fl(sum + fl(w_r d_r)), r = 1, 2, ...;  with `add` it starts as out
//   out = sum, or sum / divisor;  or, with an anchor, an outer SGD step with that as pseudo-gradient
struct LcSink {
  int count;
  i64 stride;
  const float* weights;  // of the ranks; null: `weight` for all. 1.0 skips the multiplication
  float weight, divisor;
  int add;
  float *out, *anchor, *momentum;
  float outer_lr, outer_momentum;
  int nesterov;
  i64 n;
};

// Values of rank r come from decode(r, v).
template <class Decode>
LC_DEVICE void lc_sink8(const LcSink& s, i64 first, const Decode& decode) {
  float sum[8], v[8];
  if (s.add) lc_load8(s.out, first, s.n, sum);
#pragma unroll 4
  for (int r = 0; r < s.count; ++r) {
    decode(r, v);
    const float weight = s.weights ? s.weights[r] : s.weight;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float weighted = weight == 1.0f ? v[j] : weight * v[j];
      sum[j] = r || s.add ? sum[j] + weighted : weighted;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] = s.divisor == 1.0f ? sum[j] : sum[j] / s.divisor;
  if (!s.anchor) {
    lc_store8(s.out, first, s.n, sum);
    return;
  }
  float x[8], b[8];
  lc_load8(s.anchor, first, s.n, x);
  lc_load8(s.momentum, first, s.n, b);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    b[j] = s.outer_momentum * b[j] + sum[j];
    x[j] = x[j] - s.outer_lr * (s.nesterov ? sum[j] + s.outer_momentum * b[j] : b[j]);
  }
  lc_store8(s.momentum, first, s.n, b);
  lc_store8(s.anchor, first, s.n, x);
}

#endif
