// Count sketch (sketch.py): tables of signed sums and their estimates.
#include <algorithm>
#include "input.h"
#include "philox.cuh"

namespace {

constexpr int64_t CHUNK = 512;  // positions whose hashes are computed at once
constexpr int MAX_ROWS = 63;
constexpr int64_t GRAIN = 1 << 15;  // elements worth another thread

struct Hash {
  uint32_t cell_key, sign_key, columns;
};

// Cells and sign bits (0 or 0x80000000) of positions first .. first+m-1.
static inline __attribute__((always_inline)) void hash_range(Hash hash, int64_t first, int64_t m, uint32_t* cells,
                                                             uint32_t* signs) {
  for (int64_t i = 0; i < m; ++i) {
    const uint32_t mixed = (uint32_t)(first + i) * 0x9E3779B1u;
    cells[i] = (uint32_t)(((uint64_t)lc_fmix32(mixed + hash.cell_key) * hash.columns) >> 32);
    signs[i] = lc_fmix32(mixed + hash.sign_key) << 31;
  }
}

void hash_portable(Hash hash, int64_t first, int64_t m, uint32_t* cells, uint32_t* signs) {
  hash_range(hash, first, m, cells, signs);
}

#ifdef LC_X86
LC_AVX2 void hash_avx2(Hash hash, int64_t first, int64_t m, uint32_t* cells, uint32_t* signs) {
  hash_range(hash, first, m, cells, signs);
}
#endif

void hash_chunk(Hash hash, int64_t first, int64_t m, uint32_t* cells, uint32_t* signs) {
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) return hash_avx2(hash, first, m, cells, signs);
#endif
  hash_portable(hash, first, m, cells, signs);
}

inline float with_sign(float value, uint32_t sign) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits ^= sign;
  memcpy(&value, &bits, 4);
  return value;
}

int finite_bits(const float* values, int64_t m, float* out) {
  int flags = 0;
  for (int64_t i = 0; i < m; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x7F800000u) flags |= magnitude > 0x7F800000u ? LC_HAS_NAN : LC_HAS_INF;
    out[i] = magnitude >= 0x7F800000u ? 0.0f : values[i];
  }
  return flags;
}

int sketch_row(const void* x, int dtype, int64_t n, float* row, Hash hash) {
  float wide[CHUNK], values[CHUNK];
  uint32_t cells[CHUNK], signs[CHUNK];
  int flags = 0;
  std::fill_n(row, hash.columns, 0.0f);  // not memset: an empty table may have a null address
  for (int64_t first = 0; first < n; first += CHUNK) {
    const int64_t m = n - first < CHUNK ? n - first : CHUNK;
    flags |= finite_bits(lc_input(x, dtype, first, m, wide), m, values);
    hash_chunk(hash, first, m, cells, signs);
    for (int64_t i = 0; i < m; ++i) row[cells[i]] += with_sign(values[i], signs[i]);
  }
  return flags;
}

// Sort the `rows` numbers of each of m positions: odd-even transposition, one position per lane.
static inline __attribute__((always_inline)) void sort_lanes(float (*lanes)[CHUNK], int rows, int64_t m) {
  for (int pass = 0; pass < rows; ++pass) {
    for (int j = pass & 1; j + 1 < rows; j += 2) {
      for (int64_t i = 0; i < m; ++i) {
        const float a = lanes[j][i], b = lanes[j + 1][i];
        lanes[j][i] = a < b ? a : b;
        lanes[j + 1][i] = a < b ? b : a;
      }
    }
  }
}

void sort_portable(float (*lanes)[CHUNK], int rows, int64_t m) { sort_lanes(lanes, rows, m); }

#ifdef LC_X86
LC_AVX2 void sort_avx2(float (*lanes)[CHUNK], int rows, int64_t m) { sort_lanes(lanes, rows, m); }
#endif

void sort_chunk(float (*lanes)[CHUNK], int rows, int64_t m) {
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) return sort_avx2(lanes, rows, m);
#endif
  sort_portable(lanes, rows, m);
}

void estimate_range(float* out, const float* table, const int64_t* keys, int rows, int64_t columns, int64_t begin,
                    int64_t end) {
  float lanes[MAX_ROWS][CHUNK];
  uint32_t cells[CHUNK], signs[CHUNK];
  for (int64_t first = begin; first < end; first += CHUNK) {
    const int64_t m = end - first < CHUNK ? end - first : CHUNK;
    for (int j = 0; j < rows; ++j) {
      const Hash hash = {(uint32_t)keys[2 * j], (uint32_t)keys[2 * j + 1], (uint32_t)columns};
      const float* row = table + j * columns;
      hash_chunk(hash, first, m, cells, signs);
      for (int64_t i = 0; i < m; ++i) lanes[j][i] = with_sign(row[cells[i]], signs[i]) + 0.0f;
    }
    sort_chunk(lanes, rows, m);
    const float *low = lanes[(rows - 1) / 2], *high = lanes[rows / 2];
    for (int64_t i = 0; i < m; ++i) out[first + i] = rows % 2 ? low[i] : (low[i] + high[i]) * 0.5f;
  }
}

}  // namespace

// table: rows * columns floats, overwritten; keys: rows * 2, the keys of cell and sign of each row.
LC_API int32_t lc_count_sketch(const void* x, int32_t dtype, int64_t n, float* table, const int64_t* keys, int32_t rows,
                               int64_t columns, int32_t threads) {
  const int64_t grain = n < GRAIN ? GRAIN / (n + 1) + 1 : 1;  // rows
  return lc_parallel(rows, grain, threads, [&](int64_t first, int64_t last) {
    int flags = 0;
    for (int64_t j = first; j < last; ++j) {
      const Hash hash = {(uint32_t)keys[2 * j], (uint32_t)keys[2 * j + 1], (uint32_t)columns};
      flags |= sketch_row(x, dtype, n, table + j * columns, hash);
    }
    return flags;
  });
}

LC_API int32_t lc_count_sketch_estimate(float* out, int64_t n, const float* table, const int64_t* keys, int32_t rows,
                                        int64_t columns, int32_t threads) {
  return lc_parallel(n, GRAIN, threads, [&](int64_t begin, int64_t end) {
    estimate_range(out, table, keys, rows, columns, begin, end);
    return 0;
  });
}
