// Kernels of eden.py: random rotation of blocks of 2^k elements, 1 to 4 bits for each coordinate.
//
// A block belongs to block / 8 neighbouring threads. A thread has eight neighbouring elements while they are read, signed,
// packed and stored; strides 1, 2 and 4 of the transform are then in its registers. For the others the block lies in shared
// memory, and at the end a thread has eight coordinates block / 8 apart (strided.cuh). The last block of a vector may be
// smaller, down to one element; the places behind it hold zeros and take no part.
#include "device.cuh"
#include "eden.cuh"
#include "philox.cuh"
#include "strided.cuh"

// Dynamic shared memory of a thread block (launches._eden_space): 8 elements, a float, and 8 random signs for each thread.
struct EdenShared {
  float *y, *partial;
  u32* signs;
};

// What belongs to a thread's block: its first element, log2 of its size, whether it has elements at all.
struct EdenBlock {
  i64 begin;
  int log2_size, me, threads;  // me: number of this thread among those of the block
  bool exists;
};

LC_DEVICE EdenShared eden_shared(float* memory) {
  const int threads = (int)blockDim.x;
  return {memory, memory + 8 * threads, (u32*)(memory + 9 * threads)};
}

LC_DEVICE int eden_log2_up(int v) { return v > 1 ? 32 - __clz(v - 1) : 0; }

LC_DEVICE EdenBlock eden_block(i64 n, int block) {
  const i64 begin = 8 * lc_thread() & ~(i64)(block - 1);
  const int m = begin >= n ? 1 : n - begin < block ? (int)(n - begin) : block;
  return {begin, eden_log2_up(m), (int)threadIdx.x % (block / 8), block / 8, begin < n};
}

// Coordinates of a vector: all elements, and the padding of the last block.
LC_DEVICE i64 eden_coordinates(i64 n, int block) {
  const i64 whole = n & ~(i64)(block - 1);
  return whole < n ? whole + ((i64)1 << eden_log2_up((int)(n - whole))) : n;
}

// ---- random signs: bit i of `signs` belongs to element i of the thread block; a set bit is -1

LC_DEVICE void eden_draw_signs(u32* signs, u64 seed, u32 step) {
  const i64 first = (i64)blockIdx.x * blockDim.x / 16;  // 128 elements for each counter
  for (int i = (int)threadIdx.x; i < (int)blockDim.x / 16; i += (int)blockDim.x)
    lc_philox((u64)(first + i), LC_STREAM_SIGNS, step, seed, signs + 4 * i);
}

LC_DEVICE void eden_flip(float v[8], const u32* signs) {
  const u32 byte = signs[threadIdx.x / 4] >> (8 * (threadIdx.x % 4));
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = lc_float(lc_bits(v[j]) ^ (byte >> j & 1) << 31);
}

// ---- Walsh-Hadamard transform, strides 1, 2, 4, ... in this order

// Where element i of the thread block lies: so that neighbours and elements 8, 64, ... apart are in different banks.
LC_DEVICE int eden_at(int i) { return i ^ (i >> 3 & 28); }

// Butterflies between the places of a thread that are `from`, 2 from, ... apart up to 4, where `stride` times that is a
// stride of a block of `size` that has not been done, that is from `done` on.
LC_DEVICE void eden_butterflies(float v[8], int stride, int done, int size) {
#pragma unroll
  for (int apart = 1; apart < 8; apart *= 2) {
    if (stride * apart < done || stride * apart >= size) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j & apart) continue;
      const float a = v[j], b = v[j + apart];
      v[j] = a + b, v[j + apart] = a - b;
    }
  }
}

LC_DEVICE void eden_store_neighbours(float* y, const float v[8]) {
  const int i = 8 * (int)threadIdx.x;
  *(float4*)(y + eden_at(i)) = make_float4(v[0], v[1], v[2], v[3]);
  *(float4*)(y + eden_at(i + 4)) = make_float4(v[4], v[5], v[6], v[7]);
}

LC_DEVICE void eden_load_neighbours(const float* y, float v[8]) {
  const int i = 8 * (int)threadIdx.x;
  const float4 a = *(const float4*)(y + eden_at(i)), b = *(const float4*)(y + eden_at(i + 4));
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// v: neighbours; afterwards coordinates me + threads j of the transform. All threads of the thread block call it.
LC_DEVICE void eden_transform(float v[8], const EdenBlock& b, float* y) {
  const int size = 1 << b.log2_size, base = 8 * ((int)threadIdx.x - b.me);
  int done = 8;
  eden_butterflies(v, 1, 1, size);
  eden_store_neighbours(y, v);
  for (; 8 * done < 8 * b.threads; done *= 8) {
    __syncthreads();
    const int first = base + b.me / done * 8 * done + b.me % done;
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = y[eden_at(first + done * j)];
    eden_butterflies(v, done, done, size);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[eden_at(first + done * j)] = v[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = y[eden_at(base + b.me + b.threads * j)];
  eden_butterflies(v, b.threads, done, size);
  __syncthreads();  // `y` may be written again
}

LC_DEVICE void eden_multiply(float v[8], float factor) {
  if (factor == 1.0f) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] *= factor;
}

// ---- quantization

template <int BITS>
LC_DEVICE float eden_level(int code) {  // selects among constants
  float level = BITS == 1 ? 1.0f - 2.0f * (float)code : 0.0f;
#pragma unroll
  for (int k = 0; BITS > 1 && k < 1 << BITS; ++k) level = code == k ? lc_eden_level(k, BITS) : level;
  return level;
}

// Codes of a rotated block, of which this thread has the coordinates me + threads j. Returns the scale.
template <int BITS>
LC_DEVICE float eden_quantize(const float y[8], const EdenBlock& b, int mode, float* partial, int code[8]) {
  const float on_scale = lc_eden_on_scale(b.log2_size), size = (float)(1 << b.log2_size);
  float part[8], energy = 0.0f;
  if (BITS > 1 || mode != LC_EDEN_BIASED) {
#pragma unroll
    for (int j = 0; j < 8; ++j) part[j] = y[j] * y[j];
    energy = lc_strided_tree_sum(part, b.threads, partial) * (on_scale * on_scale);
  }
  if (BITS == 1) {
#pragma unroll
    for (int j = 0; j < 8; ++j) part[j] = lc_float(lc_magnitude(y[j])), code[j] = y[j] < 0;
    return lc_eden_scale_of_signs(lc_strided_tree_sum(part, b.threads, partial) * on_scale, energy, size, mode);
  }
  const float stretch = lc_eden_root(b.log2_size) / LC_SQRT(energy) * on_scale;
  float dot = 0.0f, norm = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) code[j] = lc_eden_code(y[j] * stretch, BITS);
  if (mode != LC_EDEN_MATCHED) {
#pragma unroll
    for (int j = 0; j < 8; ++j) part[j] = b.me + b.threads * j < 1 << b.log2_size ? eden_level<BITS>(code[j]) * y[j] : 0.0f;
    dot = lc_strided_tree_sum(part, b.threads, partial) * on_scale;
  }
  if (mode != LC_EDEN_UNBIASED) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float c = eden_level<BITS>(code[j]);
      part[j] = b.me + b.threads * j < 1 << b.log2_size ? c * c : 0.0f;
    }
    norm = lc_strided_tree_sum(part, b.threads, partial);
  }
  return lc_eden_scale_of_levels(dot, energy, norm, mode);
}

// The codes of a thread's coordinates become those of its eight neighbouring ones, a byte for each.
LC_DEVICE u64 eden_neighbour_codes(const int code[8], const EdenBlock& b, bool alive, u8* bytes) {
  const int base = 8 * ((int)threadIdx.x - b.me);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = b.me + b.threads * j;
    bytes[base + i] = alive && i < 1 << b.log2_size ? (u8)code[j] : 0;
  }
  __syncthreads();
  const uint2 pair = *(const uint2*)(bytes + 8 * threadIdx.x);
  __syncthreads();  // before the memory is used again
  return (u64)pair.y << 32 | pair.x;
}

template <int BITS>
LC_DEVICE u32 eden_pack(u64 codes) {
  u32 packed = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) packed |= (u32)(codes >> (8 * j) & 0xFF) << (BITS * j);
  return packed;
}

// ---- decoding: D H(S c) / sqrt(P)

template <int BITS>
LC_DEVICE void eden_levels(u32 packed, float v[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = eden_level<BITS>((int)(packed >> (BITS * j) & ((1u << BITS) - 1)));
}

// v: levels of the thread's neighbours, becomes their values. All threads of the thread block call it.
LC_DEVICE void eden_unrotate(float scale, const EdenBlock& b, const EdenShared& shared, float v[8]) {
  const float factor = scale * lc_eden_on_scale(b.log2_size);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = factor * v[j];
  eden_transform(v, b, shared.y);
  eden_multiply(v, lc_eden_on_elements(b.log2_size));
  const int base = 8 * ((int)threadIdx.x - b.me);
#pragma unroll
  for (int j = 0; j < 8; ++j) shared.y[eden_at(base + b.me + b.threads * j)] = v[j];
  __syncthreads();
  eden_load_neighbours(shared.y, v);
  __syncthreads();
  eden_flip(v, shared.signs);
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = scale == 0.0f ? 0.0f : v[j];
}

struct EdenJob {
  i64 n;
  int block, mode;
  u8 *scales, *codes;
};

template <int BITS>
LC_DEVICE u32 eden_encode(const LcSource& source, const EdenJob& job, float* candidate, const EdenShared& shared,
                          u32 maxima[32]) {
  const EdenBlock b = eden_block(job.n, job.block);
  const i64 first = 8 * lc_thread();
  const LcEight e = lc_take8(source, first);
  const float absmax = lc_float(lc_group_max(e.largest, b.threads, maxima)), factor = lc_eden_range_factor(absmax);
  float v[8];
  int code[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = factor * e.v[j];
  eden_flip(v, shared.signs);
  eden_transform(v, b, shared.y);
  eden_multiply(v, lc_eden_on_elements(b.log2_size));
  const bool alive = absmax >= LC_TINY;
  float scale = eden_quantize<BITS>(v, b, job.mode, shared.partial, code) / factor;
  const bool saturated = alive && scale > LC_EDEN_MAX_SCALE;
  scale = !alive ? 0.0f : saturated ? LC_EDEN_MAX_SCALE : scale;
  const u32 packed = eden_pack<BITS>(eden_neighbour_codes(code, b, alive, (u8*)shared.y));
  lc_store_codes<BITS>(job.codes, first, eden_coordinates(job.n, job.block), packed);
  if (b.me == 0 && b.exists) lc_store_float(job.scales + first / job.block * 4, scale);
  if (candidate) {
    eden_levels<BITS>(packed, v);
    eden_unrotate(scale, b, shared, v);
    lc_store_residual(candidate, job.n, first, e, v);
  }
  return e.flags | (saturated ? LC_SATURATED : 0);
}

// block: a power of two from 8 to 4096. seed: of the encoding rank.
extern "C" __global__ void __launch_bounds__(512, 1)
lc_eden_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
               int block, int bits, int mode, u64 seed, u32 step, u8* scales, u8* codes, u32* flags) {
  LC_DYNAMIC_SHARED(float, memory);
  __shared__ u32 maxima[32];
  const EdenShared shared = eden_shared(memory);
  const LcSource source = {x, dtype, anchor, residual, decay, n};
  const EdenJob job = {n, block, mode, scales, codes};
  eden_draw_signs(shared.signs, seed, step);
  lc_zero_padding(codes, (eden_coordinates(n, block) * bits + 7) / 8);
  __syncthreads();
  u32 found;
  if (bits == 1) {
    found = eden_encode<1>(source, job, candidate, shared, maxima);
  } else if (bits == 2) {
    found = eden_encode<2>(source, job, candidate, shared, maxima);
  } else if (bits == 3) {
    found = eden_encode<3>(source, job, candidate, shared, maxima);
  } else {
    found = eden_encode<4>(source, job, candidate, shared, maxima);
  }
  lc_report(flags, found);
}

// Values of the thread's neighbours in the message at `body`.
LC_DEVICE void eden_decode_body(const u8* body, i64 codes_at, i64 n, int block, int bits, const EdenBlock& b,
                                const EdenShared& shared, float v[8]) {
  const i64 first = 8 * lc_thread(), total = eden_coordinates(n, block);
  const float scale = b.exists ? lc_load_float(body + first / block * 4) : 0.0f;
  const u8* codes = body + codes_at;
  if (bits == 1) {
    eden_levels<1>((u32)lc_load_codes<1>(codes, first, total), v);
  } else if (bits == 2) {
    eden_levels<2>((u32)lc_load_codes<2>(codes, first, total), v);
  } else if (bits == 3) {
    eden_levels<3>((u32)lc_load_codes<3>(codes, first, total), v);
  } else {
    eden_levels<4>((u32)lc_load_codes<4>(codes, first, total), v);
  }
  eden_unrotate(scale, b, shared, v);
}

// bodies: `count` of them, `stride` bytes apart; their codes begin `codes_at` bytes behind the scales. All ranks have the
// signs of `seed`. See LcSink.
extern "C" __global__ void __launch_bounds__(512, 1)
lc_eden_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
               float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n,
               int block, int bits, u64 seed, u32 step, i64 codes_at) {
  LC_DYNAMIC_SHARED(float, memory);
  const EdenShared shared = eden_shared(memory);
  const EdenBlock b = eden_block(n, block);
  eden_draw_signs(shared.signs, seed, step);
  __syncthreads();
  const LcSink sink = {count,    stride,         weights, weight, divisor, add, out, anchor,
                       momentum, outer_lr, outer_momentum, nesterov, n};
  lc_sink8(sink, 8 * lc_thread(), [&](int rank, float v[8]) {
    eden_decode_body(bodies + rank * stride, codes_at, n, block, bits, b, shared, v);
  });
}
