// Kernels of topk.py: exact selection in rows of c elements, fused with the encoding of positions and values and with
// error feedback; decoding into dense vectors, and adding to them.
//
// A thread block has a row, its threads two times eight neighbouring elements each: those of the first half of the thread
// block's elements, then those of the second. Behind the end of a row elements are zeros, which are never kept before an
// element of the row, as ties go to the lower position.
#include "device.cuh"
#include "sparse.cuh"
#include "strided.cuh"

#define TOPK_ALL 0xFFFFFFFFu
enum { TOPK_LIST = 256 };      // maxima of groups of elements, and later keys that may belong to the k largest
enum { LC_DAMAGED = 1 << 16 };

// Shared memory of a row, beside the dynamic one.
struct TopkShared {
  u32 keys[TOPK_LIST], totals[2][32], counts[2][32];
  u32 bound, listed, cut_bits, cut_ties;
};

struct TopkFormat {
  int c, k, index, value;
};

LC_DEVICE int topk_log2(int v) { return 31 - __clz(v); }
LC_DEVICE int topk_low(const TopkFormat& f) { return topk_log2(f.c / f.k); }                 // low bits of Elias-Fano
LC_DEVICE int topk_upper(const TopkFormat& f) { return f.k + (f.c >> topk_low(f)); }         // length of its bit vector
LC_DEVICE int topk_field(const TopkFormat& f) { return f.c > 1 ? topk_log2(f.c - 1) + 1 : 0; }

// Bits of a row in its section: 0 where entries have whole bytes and are not collected in shared memory.
LC_DEVICE int topk_index_bits(const TopkFormat& f) {
  if (f.index == LC_ELIAS_FANO) return (f.k * topk_low(f) + topk_upper(f) + 7) / 8 * 8;
  return f.index == LC_BITMAP ? f.c : f.index == LC_FIELDS ? f.k * topk_field(f) : 0;
}

LC_DEVICE int topk_code_bits(const TopkFormat& f) { return f.value < LC_MAG2 ? 0 : f.k * lc_value_bits(f.value); }
LC_DEVICE i64 topk_least(i64 a, i64 b) { return a < b ? a : b; }
LC_DEVICE i64 topk_first_byte(i64 row, int bits) { return row * bits / 8; }

// ---- bit streams in shared memory

LC_DEVICE void topk_put(u32* words, int bit, u32 v, int width) {
  const int shift = bit & 31;
  atomicOr(words + bit / 32, v << shift);
  if (shift + width > 32) atomicOr(words + bit / 32 + 1, v >> (32 - shift));
}

LC_DEVICE u32 topk_get(const u32* words, int bit, int width) {  // reads a word behind the last one
  const u64 pair = (u64)words[bit / 32 + 1] << 32 | words[bit / 32];
  return (u32)(pair >> (bit & 31)) & (u32)((1ull << width) - 1);
}

LC_DEVICE int topk_words(int bits) { return (bits + 7) / 32 + 2; }  // that hold them from any bit of a byte on

// ---- the threshold

// What divides the kept elements from the others: keys above `bits`, and the first `ties` of those equal to it.
struct TopkCut {
  u32 bits, ties, reached;
};

// Bisects for k keys between `low`, which `at_low` >= k reach, and `high`, which fewer than k reach; stops where k + slack
// or fewer do.
template <class Count>
LC_DEVICE TopkCut topk_bisect(u32 low, u32 at_low, u32 high, u32 k, u32 slack, const Count& count) {
  u32 at_high = 0;
#pragma unroll 1
  for (int step = 0; at_low > k + slack && high - low > 1; ++step) {
    const u32 middle = low + (high - low) / 2, reached = count(middle, step);
    if (reached >= k) {
      low = middle, at_low = reached;
    } else {
      high = middle, at_high = reached;
    }
  }
  return {low, at_low == k ? TOPK_ALL : k - at_high, at_low};
}

LC_DEVICE TopkCut topk_bisect_warp(const u32 keys[8], u32 low, u32 at_low, u32 k, u32 slack) {
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) largest = max(largest, keys[j]);
  largest = __reduce_max_sync(LC_ALL, largest);
  return topk_bisect(low, at_low, largest + 1, k, slack, [&](u32 least, int) {
    u32 reached = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) reached += keys[j] >= least;
    return __reduce_add_sync(LC_ALL, reached);
  });
}

// A number that about k, at least k, of the maxima of groups reach; then at least k elements do, and not many more.
LC_DEVICE u32 topk_bound(const u32* maxima, int groups, u32 k) {
  u32 keys[8], least = TOPK_ALL;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = lc_lane() + 32 * j;
    keys[j] = i < groups ? maxima[i] : 0;
    if (i < groups) least = min(least, keys[j]);
  }
  least = __reduce_min_sync(LC_ALL, least);
  return topk_bisect_warp(keys, least, (u32)groups, k, k / 8).bits;
}

LC_DEVICE u32 topk_at_least(const LcEight e[2], u32 bound) {  // bit 8 s + j: element j of e[s]
  u32 mask = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) mask |= (u32)(lc_magnitude(e[i / 8].v[i % 8]) >= bound) << i;
  return mask;
}

LC_DEVICE void topk_list(const LcEight e[2], u32 bound, TopkShared& shared) {
  if (max(e[0].largest, e[1].largest) < bound) return;
  const u32 mask = topk_at_least(e, bound);
  u32 slot = atomicAdd(&shared.listed, (u32)__popc(mask));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (!(mask >> i & 1)) continue;
    if (slot < TOPK_LIST) shared.keys[slot] = lc_magnitude(e[i / 8].v[i % 8]);
    ++slot;
  }
}

// All threads get a lower bound of the k-th largest key, and how many reach it, listed in shared.keys; 0 where there is no
// good one.
LC_DEVICE u32 topk_survey(const LcEight e[2], int k, TopkShared& shared) {
  const int threads = (int)blockDim.x, groups = min(threads, (int)TOPK_LIST);
  u32 largest = max(e[0].largest, e[1].largest);
  if (threads > TOPK_LIST) largest = max(largest, __shfl_xor_sync(LC_ALL, largest, 1));
  const int group = (int)threadIdx.x / (threads / groups);
  if ((int)threadIdx.x % (threads / groups) == 0) shared.keys[group] = largest;
  if (threadIdx.x == 0) shared.listed = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    const u32 bound = topk_bound(shared.keys, groups, (u32)k);
    if (threadIdx.x == 0) shared.bound = bound;
  }
  __syncthreads();
  const u32 bound = shared.bound;
  if (bound) topk_list(e, bound, shared);
  __syncthreads();
  return bound;
}

LC_DEVICE TopkCut topk_cut_listed(u32 bound, int k, TopkShared& shared) {
  if (threadIdx.x < 32) {
    u32 keys[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) keys[j] = lc_lane() + 32 * j < (int)shared.listed ? shared.keys[lc_lane() + 32 * j] : 0;
    const TopkCut cut = topk_bisect_warp(keys, bound, shared.listed, (u32)k, 0);
    if (threadIdx.x == 0) shared.cut_bits = cut.bits, shared.cut_ties = cut.ties;
  }
  __syncthreads();
  return {shared.cut_bits, shared.cut_ties, 0};
}

// Among all elements, for any k.
LC_DEVICE TopkCut topk_cut_whole(const LcEight e[2], u32 bound, int k, TopkShared& shared) {
  const int threads = (int)blockDim.x;
  const u32 largest = lc_group_max(max(e[0].largest, e[1].largest), threads, shared.keys);
  // Counts in turn in two places: a warp may still read the one before.
  const auto count = [&](u32 least, int step) {
    return lc_group_count((u32)__popc(topk_at_least(e, least)), threads, shared.counts[step & 1]);
  };
  const u32 reached = bound ? count(bound, 0) : 16u * (u32)threads;
  return topk_bisect(bound, reached, largest + 1, (u32)k, 0, [&](u32 least, int step) { return count(least, step + 1); });
}

LC_DEVICE TopkCut topk_cut(const LcEight e[2], int k, TopkShared& shared) {
  u32 bound = 0;
  if (2 * k <= min((int)blockDim.x, (int)TOPK_LIST)) {
    bound = topk_survey(e, k, shared);
    if (bound && shared.listed <= TOPK_LIST) return topk_cut_listed(bound, k, shared);
  }
  return topk_cut_whole(e, bound, k, shared);
}

// ---- the kept elements in order

// How many elements of a mask of 8 + 8 are before this thread's in the first half, and in both halves: 16 bits each.
LC_DEVICE u32 topk_before(u32 mask, u32 totals[32]) {
  const u32 mine = (u32)__popc(mask & 0xFF) | (u32)__popc(mask >> 8) << 16;
  u32 sum = mine, before = 0, all = 0;
#pragma unroll
  for (u32 by = 1; by < 32; by *= 2) {
    const u32 other = __shfl_up_sync(LC_ALL, sum, by);
    if (lc_lane() >= (int)by) sum += other;
  }
  if (lc_lane() == 31) totals[threadIdx.x / 32] = sum;
  __syncthreads();
  for (u32 w = 0; w < blockDim.x / 32; ++w) {
    if (w < threadIdx.x / 32) before += totals[w];
    all += totals[w];
  }
  return before + sum - mine + (all << 16);
}

LC_DEVICE u32 topk_lowest(u32 mask, int count) {  // the lowest `count` bits that are set
  for (int surplus = __popc(mask) - max(count, 0); surplus > 0; --surplus) mask ^= 1u << (31 - __clz((int)mask));
  return mask;
}

LC_DEVICE u32 topk_kept(const LcEight e[2], TopkCut cut, TopkShared& shared) {
  const u32 reach = topk_at_least(e, cut.bits);
  if (cut.ties == TOPK_ALL) return reach;
  const u32 above = topk_at_least(e, cut.bits + 1), ties = reach & ~above, before = topk_before(ties, shared.totals[1]);
  const int left = (int)cut.ties - (int)(before & 0xFFFF), left_above = (int)cut.ties - (int)(before >> 16);
  return above | topk_lowest(ties & 0xFF, left) | topk_lowest(ties >> 8, left_above) << 8;
}

// ---- values

// What value writers get: the values, one of every thread of the crew in each of eight places.
struct TopkValues {
  float v[8];
  int crew, k;       // threads, values
  float count;       // of them real
  float* partial;    // room for tree sums
  u32 *counts;       // and for counts
};

LC_DEVICE int topk_place(const TopkValues& t, int j) { return (int)threadIdx.x + t.crew * j; }
LC_DEVICE float topk_sum(const TopkValues& t, const float v[8]) { return lc_strided_tree_sum(v, t.crew, t.partial); }

struct TopkLevels {
  LcTwoLevels levels;
  float threshold;
};

LC_DEVICE TopkLevels topk_lloyd(const TopkValues& t, float factor, int iterations) {
  const auto sum = [&](float from, float to) {  // of the magnitudes that are above `from` and not above `to`
    float part[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float magnitude = lc_float(lc_magnitude(t.v[j])) * factor;
      part[j] = magnitude > from && !(magnitude > to) ? magnitude : 0.0f;
    }
    return topk_sum(t, part);
  };
  const float most = lc_float(LC_INFINITY_BITS);
  float threshold = sum(-1.0f, most) / t.count;
#pragma unroll 1
  for (int i = 0;; ++i) {
    u32 large = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) large += lc_float(lc_magnitude(t.v[j])) * factor > threshold;
    const float small_sum = sum(-1.0f, threshold), large_sum = sum(threshold, most), num_large = (float)lc_group_count(large, t.crew, t.counts);
    const LcTwoLevels levels = lc_two_levels(small_sum, large_sum, t.count - num_large, num_large);
    const float next = lc_midpoint(levels);
    if (i == iterations || next == threshold) return {levels, threshold};  // nothing changes any more
    threshold = next;
  }
}

// Codes go to `codes` from bit `at` on, decoded values to `decoded`. Returns flags.
LC_DEVICE int topk_write_mag2(const TopkValues& t, u32 largest, int iterations, u8* scale, u32* codes, int at, float* decoded) {
  const bool tiny = lc_float(largest) < LC_TINY;
  const float factor = lc_range_factor(lc_float(largest));
  TopkLevels found = {{0.0f, 0.0f}, 0.0f};
  if (!tiny) found = topk_lloyd(t, factor, iterations);
  int flags = 0;
  const u16 small = lc_level_to_bf16(found.levels.small / factor, &flags), large = lc_level_to_bf16(found.levels.large / factor, &flags);
  if (threadIdx.x == 0) lc_store_bytes(scale, (u32)large << 16 | small, 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = topk_place(t, j);
    if (i >= t.k) break;
    const u32 code = tiny ? 0 : lc_mag2_code(t.v[j], factor, found.threshold);
    if (code) topk_put(codes, at + 2 * i, code, 2);
    decoded[i] = lc_sign_of(lc_bf16_to_f32(code >> 1 ? large : small), code & 1);
  }
  return flags;
}

LC_DEVICE int topk_write_sign1(const TopkValues& t, u32 largest, u8* scale, u32* codes, int at, float* decoded) {
  const bool tiny = lc_float(largest) < LC_TINY;
  const float factor = lc_range_factor(lc_float(largest));
  float magnitude[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) magnitude[j] = lc_float(lc_magnitude(t.v[j])) * factor;
  const float level = tiny ? 0.0f : topk_sum(t, magnitude) / t.count / factor;
  int flags = 0;
  const u16 rounded = lc_level_to_bf16(level, &flags);
  if (threadIdx.x == 0) lc_store_bytes(scale, rounded, 2);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = topk_place(t, j);
    if (i >= t.k) break;
    const bool negative = t.v[j] < 0 && !tiny;
    if (negative) topk_put(codes, at + i, 1, 1);
    decoded[i] = lc_sign_of(lc_bf16_to_f32(rounded), negative);
  }
  return flags;
}

LC_DEVICE void topk_write_int(const TopkValues& t, u32 largest, int width, u8* scale_at, u32* codes, int at, float* decoded) {
  const bool tiny = lc_float(largest) < LC_TINY;
  const float top = (float)((1 << (width - 1)) - 1), absmax = tiny ? 0.0f : lc_float(largest);
  const float inverse = tiny ? 0.0f : top / absmax, scale = lc_block_scale(absmax, top);
  if (threadIdx.x == 0) lc_store_float(scale_at, scale);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = topk_place(t, j);
    if (i >= t.k) break;
    const int q = lc_kept_int(t.v[j], inverse, top);
    topk_put(codes, at + width * i, (u32)q & ((1u << width) - 1), width);
    decoded[i] = (float)q * scale;
  }
}

LC_DEVICE int topk_write_raw(const TopkValues& t, bool narrow, u8* codes, float* decoded) {
  int flags = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int i = topk_place(t, j);
    if (i >= t.k) break;
    if (narrow) {
      const u16 rounded = lc_level_to_bf16(t.v[j], &flags);
      lc_store_bytes(codes + 2 * i, rounded, 2);
      decoded[i] = lc_bf16_to_f32(rounded);
    } else {
      lc_store_float(codes + 4 * i, t.v[j]);
    }
  }
  return flags;
}

struct TopkSections {
  u8 *scales, *indices, *codes;
};

// The first `crew` threads encode the row's values[0..k-1], which become what a receiver decodes. at: first bit in code_bits.
LC_DEVICE int topk_write_values(const TopkFormat& f, TopkSections to, i64 row, int count, int crew, int iterations,
                                float* values, float* partial, u32* code_bits, int at, TopkShared& shared) {
  TopkValues t = {{}, crew, f.k, (float)count, partial, shared.counts[0]};
#pragma unroll
  for (int j = 0; j < 8; ++j) t.v[j] = topk_place(t, j) < f.k ? values[topk_place(t, j)] : 0.0f;
  if (f.value < LC_MAG2) {
    const int bytes = lc_value_bits(f.value) / 8;
    return topk_write_raw(t, f.value == LC_RAW_BF16, to.codes + row * f.k * bytes, values);
  }
  const u32 largest = lc_group_max(lc_largest8(t.v), crew, shared.counts[1]);
  u8* scale = to.scales + row * lc_value_scale_bytes(f.value);
  if (f.value == LC_MAG2) return topk_write_mag2(t, largest, iterations, scale, code_bits, at, values);
  if (f.value == LC_SIGN1) return topk_write_sign1(t, largest, scale, code_bits, at, values);
  topk_write_int(t, largest, lc_value_bits(f.value), scale, code_bits, at, values);
  return 0;
}

// ---- positions

LC_DEVICE void topk_write_positions(const TopkFormat& f, const u16* places, i64 row, u8* section, u32* words, int bit) {
  const int low = topk_low(f), field = topk_field(f);
  for (int j = (int)threadIdx.x; j < f.k; j += (int)blockDim.x) {
    const u32 at = places[j];
    if (f.index == LC_ELIAS_FANO) {
      if (low) topk_put(words, bit + j * low, at & ((1u << low) - 1), low);
      topk_put(words, bit + f.k * low + (int)(at >> low) + j, 1, 1);
    } else if (f.index == LC_FIELDS) {
      if (field) topk_put(words, bit + j * field, at, field);
    } else if (f.index == LC_BITMAP) {
      topk_put(words, bit + (int)at, 1, 1);
    } else {
      lc_store_word(section + (row * f.k + j) * 4, (u32)(row * f.c + at));
    }
  }
}

LC_DEVICE void topk_zero(u32* words, int count) {
  for (int i = (int)threadIdx.x; i < count; i += (int)blockDim.x) words[i] = 0;
}

LC_DEVICE void topk_flush(const u32* words, int bits, u8* to) {
  for (int i = (int)threadIdx.x; i < (bits + 7) / 8; i += (int)blockDim.x) to[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
}

// Dynamic shared memory of the encoder (launches.Rows.encode_space).
struct TopkBlock {
  float *values, *partial;
  u32 *index_words, *code_words;
  u16* places;
};

LC_DEVICE TopkBlock topk_block(const TopkFormat& f, int together, float* memory) {
  TopkBlock b = {memory, memory + f.k};
  b.index_words = (u32*)(b.partial + blockDim.x);
  b.code_words = b.index_words + topk_words(together * topk_index_bits(f));
  b.places = (u16*)(b.code_words + topk_words(together * topk_code_bits(f)));
  return b;
}

// What a thread knows of its elements of a row: which are kept (bit 8 s + j), and how many are kept before those of the
// first half, and before those of the second, 16 bits each.
struct TopkMine {
  u32 kept, before, flags;
};

// Lists the kept elements of a row, of which this thread has those from `first` and from `first + half` on.
LC_DEVICE TopkMine topk_select(const LcSource& source, i64 first, int half, int k, const TopkBlock& block,
                               TopkShared& shared) {
  const LcEight e[2] = {lc_take8(source, first), lc_take8(source, first + half)};
  TopkMine mine = {topk_kept(e, topk_cut(e, k, shared), shared), 0, e[0].flags | e[1].flags};
  mine.before = topk_before(mine.kept, shared.totals[0]);
  u32 slots[2] = {mine.before & 0xFFFF, mine.before >> 16};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (!(mine.kept >> i & 1)) continue;
    const u32 slot = slots[i / 8]++;
    block.places[slot] = (u16)(8 * (int)threadIdx.x + half * (i / 8) + i % 8);
    block.values[slot] = e[i / 8].v[i % 8];
  }
  return mine;
}

// Loads the elements again, out of the caches: kept in registers they would leave room for fewer thread blocks.
LC_DEVICE void topk_store_residuals(const LcSource& source, float* candidate, i64 first, int half, const TopkMine& mine,
                                    const float* decoded) {
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const LcEight e = lc_take8(source, first + i * half);
    const float* next = decoded + (mine.before >> (16 * i) & 0xFFFF);
    float sent[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sent[j] = mine.kept >> (8 * i + j) & 1 ? *next++ : 0.0f;
    lc_store_residual(candidate, source.n, first + i * half, e, sent);
  }
}

// Threads of a thread block: a power of two of at least 32, 1/16 of c and 1/8 of k. It does `together` rows, so that what
// it writes begins and ends with whole bytes.
extern "C" __global__ void __launch_bounds__(512, 1)
lc_topk_encode(const void* x, int dtype, const float* anchor, const float* residual, float decay, float* candidate, i64 n,
               int c, int k, int index, int value, int iterations, int together, u8* scales, u8* indices, u8* codes,
               u32* flags) {
  LC_DYNAMIC_SHARED(float, memory);
  __shared__ TopkShared shared;
  const TopkFormat f = {c, k, index, value};
  const int index_bits = topk_index_bits(f), code_bits = topk_code_bits(f);
  const TopkBlock block = topk_block(f, together, memory);
  const i64 rows = (n + c - 1) / c, begin = (i64)blockIdx.x * together;
  const int count = (int)topk_least(rows - begin, together);
  if (index_bits) lc_zero_padding(indices, (rows * index_bits + 7) / 8);
  lc_zero_padding(codes, (rows * k * lc_value_bits(value) + 7) / 8);
  lc_zero_padding(scales, rows * lc_value_scale_bytes(value));
  topk_zero(block.index_words, topk_words(together * index_bits));
  topk_zero(block.code_words, topk_words(together * code_bits));
  __syncthreads();
  u32 found = 0;
#pragma unroll 1
  for (int nth = 0; nth < count; ++nth) {
    const i64 row = begin + nth, first = row * c + 8 * (int)threadIdx.x;
    const LcSource source = {x, dtype, anchor, residual, decay, topk_least(row * c + c, n)};
    const TopkMine mine = topk_select(source, first, 8 * (int)blockDim.x, k, block, shared);
    __syncthreads();
    topk_write_positions(f, block.places, row, indices, block.index_words, nth * index_bits);
    const int crew = k <= 256 ? 32 : (int)blockDim.x, real = (int)topk_least(n - row * c, k);
    found |= mine.flags;
    if ((int)threadIdx.x < crew)
      found |= (u32)topk_write_values(f, {scales, indices, codes}, row, real, crew, iterations, block.values, block.partial,
                                      block.code_words, nth * code_bits, shared);
    __syncthreads();
    if (candidate) {
      topk_store_residuals(source, candidate, first, 8 * (int)blockDim.x, mine, block.values);
      __syncthreads();  // before the next row's values
    }
  }
  topk_flush(block.index_words, count * index_bits, indices + topk_first_byte(begin, index_bits));
  topk_flush(block.code_words, count * code_bits, codes + topk_first_byte(begin, code_bits));
  lc_report(flags, found);
}

// ---- decoding

// Bytes of a row, from the one with its first bit on, to shared memory. Returns where in the first byte it begins.
LC_DEVICE int topk_stage(u32* words, const u8* section, i64 row, int bits) {
  const i64 first = row * bits;
  const int shift = (int)(first & 7), bytes = (shift + bits + 7) / 8;
  const u8* from = section + first / 8;
  for (int i = (int)threadIdx.x; i < topk_words(bits); i += (int)blockDim.x)
    words[i] = (u32)lc_load_bytes(from + 4 * i, max(min(bytes - 4 * i, 4), 0));
  return shift;
}

// The positions of `length` bits that are set, from bit `at` of words on: where they are, less their number (with
// `less`), in `places`. Returns how many are set; only the first k are stored.
LC_DEVICE int topk_set_bits(const u32* words, int at, int length, int k, bool less, u16* places, u32 totals[32]) {
  const int threads = (int)blockDim.x;
  int span = 1;
  while (span * threads < length) span *= 2;
  const int first = (int)threadIdx.x * span, mine = max(min(length - first, span), 0);
  u32 bits = mine ? topk_get(words, at + first, mine) : 0, sum = (u32)__popc(bits), before = 0, all = 0;
  const u32 count = sum;
#pragma unroll
  for (u32 by = 1; by < 32; by *= 2) {
    const u32 other = __shfl_up_sync(LC_ALL, sum, by);
    if (lc_lane() >= (int)by) sum += other;
  }
  if (lc_lane() == 31) totals[threadIdx.x / 32] = sum;
  __syncthreads();
  for (u32 w = 0; w < blockDim.x / 32; ++w) {
    if (w < threadIdx.x / 32) before += totals[w];
    all += totals[w];
  }
  for (int j = (int)(before + sum - count); bits && j < k; bits &= bits - 1, ++j)
    places[j] = (u16)(first + __ffs((int)bits) - 1 - (less ? j : 0));
  return (int)all;
}

// Fills `places`. Returns k, 0, or -1 where no encoder can have written the row.
LC_DEVICE int topk_read_positions(const TopkFormat& f, const u8* section, i64 row, const u32* words, int at, u16* places,
                                  u32 totals[32]) {
  if (f.index == LC_ELIAS_FANO || f.index == LC_BITMAP) {
    const bool fano = f.index == LC_ELIAS_FANO;
    const int low = topk_low(f), begin = fano ? at + f.k * low : at, length = fano ? topk_upper(f) : f.c;
    const int count = topk_set_bits(words, begin, length, f.k, fano, places, totals);
    if (count != f.k) return count ? -1 : 0;
    __syncthreads();
    for (int j = (int)threadIdx.x; fano && j < f.k; j += (int)blockDim.x)
      places[j] = (u16)((u32)places[j] << low | (low ? topk_get(words, at + j * low, low) : 0));
    return count;
  }
  const i64 start = f.index == LC_U32 ? row * f.c : 0;
  const int field = topk_field(f);
  int any = f.k == 1 && start == 0;  // zeros are "no entries", except one entry at position 0
  for (int j = (int)threadIdx.x; j < f.k; j += (int)blockDim.x) {
    const u32 v = f.index == LC_U32 ? lc_load_word(section + (row * f.k + j) * 4) : field ? topk_get(words, at + j * field, field) : 0;
    any |= v != 0;
    places[j] = (i64)v >= start && (i64)v - start < f.c ? (u16)(v - start) : (u16)0xFFFF;
  }
  return __syncthreads_or(any) ? f.k : 0;
}

struct TopkScales {
  float first, second;
};

LC_DEVICE TopkScales topk_read_scales(const TopkFormat& f, const u8* scales, i64 row) {
  const u8* at = scales + row * lc_value_scale_bytes(f.value);
  if (f.value < LC_MAG2) return {0.0f, 0.0f};
  if (f.value >= LC_KEPT_INT8) return {lc_load_float(at), 0.0f};
  const float first = lc_bf16_to_f32((u16)lc_load_bytes(at, 2));
  return {first, f.value == LC_MAG2 ? lc_bf16_to_f32((u16)lc_load_bytes(at + 2, 2)) : first};
}

LC_DEVICE float topk_read_value(const TopkFormat& f, TopkScales scales, const u8* section, i64 row, int j, const u32* words,
                                int at) {
  if (f.value == LC_RAW_F32) return lc_load_float(section + (row * f.k + j) * 4);
  if (f.value == LC_RAW_BF16) return lc_bf16_to_f32((u16)lc_load_bytes(section + (row * f.k + j) * 2, 2));
  const int width = lc_value_bits(f.value);
  const u32 code = topk_get(words, at + j * width, width);
  if (f.value >= LC_KEPT_INT8) return lc_kept_int_value(code, width, scales.first);
  return lc_sign_of(code >> 1 ? scales.second : scales.first, code & 1);
}

// What is done with the entries of a row: to[position] += weight * value, or = with `set`, on `m` elements.
struct TopkTarget {
  float* to;  // null: they are only checked
  float weight;
  bool set;
  int m;
};

// Where entries of several ranks are added the caller waits for all threads in between. Returns whether the row is valid.
LC_DEVICE bool topk_read_row(const TopkFormat& f, const TopkSections& from, i64 row, TopkTarget target, u32* index_words,
                             u32* code_words, u16* places, u32 totals[32]) {
  const int index_at = topk_stage(index_words, from.indices, row, topk_index_bits(f));
  const int code_at = topk_stage(code_words, from.codes, row, topk_code_bits(f));
  __syncthreads();
  const int count = topk_read_positions(f, from.indices, row, index_words, index_at, places, totals);
  __syncthreads();
  const TopkScales scales = topk_read_scales(f, from.scales, row);
  bool valid = count >= 0 && lc_finite(scales.first) && lc_finite(scales.second);
  for (int j = (int)threadIdx.x; j < f.k; j += (int)blockDim.x) {
    const float v = topk_read_value(f, scales, from.codes, row, j, code_words, code_at);
    valid &= lc_finite(v);
    if (count <= 0) continue;
    const int place = places[j];
    const bool ascends = place < f.c && (j == 0 || (int)places[j - 1] < place);
    valid &= ascends;
    if (!target.to || place >= target.m || !ascends) continue;
    const float weighted = target.weight == 1.0f ? v : target.weight * v;
    target.to[place] = target.set ? weighted : target.to[place] + weighted;
  }
  return valid;
}

// bodies: `count` of them, `stride` bytes apart, their sections `indices_at` and `codes_at` bytes behind the start. See
// LcSink. One row for each thread block, threads as for encoding. With `check` only the flag LC_DAMAGED comes out; a
// launch that updates what is there does nothing where an earlier one has raised it.
extern "C" __global__ void __launch_bounds__(512, 2)
lc_topk_decode(const u8* bodies, i64 stride, int count, const float* weights, float weight, float divisor, int add,
               float* out, float* anchor, float* momentum, float outer_lr, float outer_momentum, int nesterov, i64 n, int c,
               int k, int index, int value, i64 indices_at, i64 codes_at, int check, u32* flags) {
  LC_DYNAMIC_SHARED(float, sums);
  __shared__ u32 totals[32];
  const TopkFormat f = {c, k, index, value};
  const int threads = (int)blockDim.x;
  const bool sparse = add && !anchor && divisor == 1.0f;  // only the entries of `out` are touched
  if ((add || anchor) && !check && *flags & LC_DAMAGED) return;
  u32* index_words = (u32*)(sums + 16 * threads);
  u32* code_words = index_words + topk_words(topk_index_bits(f));
  u16* places = (u16*)(code_words + topk_words(topk_code_bits(f)));
  const i64 row = blockIdx.x, start = row * c, stop = topk_least(start + c, n);
  TopkTarget target = {check ? nullptr : sparse ? out + start : sums, 1.0f, false, (int)(stop - start)};
  for (int i = (int)threadIdx.x; !sparse && !check && i < 16 * threads; i += threads)
    sums[i] = add && start + i < stop ? out[start + i] : 0.0f;
  bool valid = true;
  for (int rank = 0; rank < count; ++rank) {
    u8* body = (u8*)bodies + rank * stride;
    target.weight = weights ? weights[rank] : weight, target.set = !rank && !add;
    valid &= topk_read_row(f, {body, body + indices_at, body + codes_at}, row, target, index_words, code_words, places, totals);
    __syncthreads();
  }
  if (!valid) lc_report(flags, LC_DAMAGED);
  if (check || sparse) return;
  const LcSink rest = {1, 0, nullptr, 1.0f, divisor, 0, out, anchor, momentum, outer_lr, outer_momentum, nesterov, stop};
  for (int half = 0; half < 2; ++half) {
    const int i = 8 * ((int)threadIdx.x + half * threads);
    if (start + i < stop) lc_sink8(rest, start + i, [&](int, float v[8]) { lc_load8(sums, i, 16 * threads, v); });
  }
}
