// Two-dimensional cosine transforms of tiles (dct.py): out = A T B^T, every sum in ascending order from +0.
#include "kernels.h"

namespace {

constexpr int MAX_SIDE = 128;

// to[l] = sum over the listed i of scale[i] * rows[i * w + l]. Terms that are zero for every l may be left out of the
// list: a sum that starts at +0 is never -0, and adding a zero of either sign to any other sum changes nothing.
void combine_portable(float* to, int64_t w, const int* list, int count, const float* scale, const float* rows) {
  memset(to, 0, sizeof(float) * w);
  for (int c = 0; c < count; ++c) {
    const float factor = scale[list[c]];
    const float* row = rows + list[c] * w;
    for (int64_t l = 0; l < w; ++l) to[l] += factor * row[l];
  }
}

#ifdef LC_X86
// `VECTORS` vectors of 8 columns, kept in registers.
template <int VECTORS>
LC_AVX2 static inline void combine_columns(float* to, int64_t w, const int* list, int count, const float* scale,
                                           const float* rows) {
  __m256 sum[VECTORS];
  for (int v = 0; v < VECTORS; ++v) sum[v] = _mm256_setzero_ps();
  for (int c = 0; c < count; ++c) {
    const __m256 factor = _mm256_set1_ps(scale[list[c]]);
    const float* row = rows + list[c] * w;
    for (int v = 0; v < VECTORS; ++v) sum[v] = _mm256_add_ps(sum[v], _mm256_mul_ps(factor, _mm256_loadu_ps(row + 8 * v)));
  }
  for (int v = 0; v < VECTORS; ++v) _mm256_storeu_ps(to + 8 * v, sum[v]);
}

LC_AVX2 void combine_avx2(float* to, int64_t w, const int* list, int count, const float* scale, const float* rows) {
  int64_t l = 0;
  for (; l + 64 <= w; l += 64) combine_columns<8>(to + l, w, list, count, scale, rows + l);
  for (; l + 8 <= w; l += 8) combine_columns<1>(to + l, w, list, count, scale, rows + l);
  for (; l < w; ++l) {
    float sum = 0.0f;
    for (int c = 0; c < count; ++c) sum += scale[list[c]] * rows[list[c] * w + l];
    to[l] = sum;
  }
}
#endif

void combine(float* to, int64_t w, const int* list, int count, const float* scale, const float* rows) {
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) return combine_avx2(to, w, list, count, scale, rows);
#endif
  combine_portable(to, w, list, count, scale, rows);
}

void transform(const float* tile, float* out, int64_t h, int64_t w, const float* along_rows, const float* along_columns) {
  float half[MAX_SIDE * MAX_SIDE];
  int list[MAX_SIDE], alive[MAX_SIDE], num_alive = 0;
  for (int64_t i = 0; i < h; ++i) {
    int count = 0;
    for (int64_t j = 0; j < w; ++j) {
      list[count] = (int)j;
      count += tile[i * w + j] != 0.0f;
    }
    if (count == 0) continue;
    alive[num_alive++] = (int)i;
    combine(half + i * w, w, list, count, tile + i * w, along_rows);
  }
  for (int64_t k = 0; k < h; ++k) combine(out + k * w, w, alive, num_alive, along_columns + k * h, half);
}

}  // namespace

// in, out: tiles x h x w, different buffers; along_rows: B transposed, w x w; along_columns: A, h x h. h, w <= 128.
LC_API int32_t lc_transform_tiles(const float* in, float* out, int64_t tiles, int64_t h, int64_t w, const float* along_rows,
                                  const float* along_columns, int32_t threads) {
  return lc_parallel(tiles, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) transform(in + t * h * w, out + t * h * w, h, w, along_rows, along_columns);
    return 0;
  });
}
