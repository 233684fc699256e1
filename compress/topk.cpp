// Top-k of rows, fused with the encoding of positions and values and with error feedback (topk.py).
#include "input.h"
#include "select.h"
#include "sparse.h"

#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

int thread_number() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

struct Scratch {
  uint32_t *at, *next_at;
  float *v, *decoded, *sums, *row;

  // words: those of one thread, at least 4 * k + 4 * LC_ROOM + 2056 + k / 1024 and, for rows that are copied, c more
  Scratch(float* all, int64_t words, int64_t k) {
    const int64_t room = k > LC_ROOM ? k : LC_ROOM;
    float* mine = all + thread_number() * words;
    at = (uint32_t*)mine, next_at = at + room, v = mine + 2 * room, decoded = v + room, sums = decoded + room, row = sums + 2056 + k / 1024;
  }
};

struct Input {
  const void* x;
  int32_t dtype;
  const float* residual;  // or null
  float* candidate;       // receives p and then the new residual; null without error feedback
  float decay;
};

// Row `first` .. first + m - 1 as float32, corrected by the residual (then it lies in the candidate).
const float* corrected_row(const Input& in, int64_t first, int64_t m, float* buffer) {
  const float* x = lc_input(in.x, in.dtype, first, m, buffer);
  if (!in.residual) return x;
  float* p = in.candidate + first;
  for (int64_t i = 0; i < m; ++i) p[i] = in.decay * in.residual[first + i] + x[i];
  return p;
}

int select_row(const Input& in, int64_t first, int64_t m, int64_t k, Scratch& s) {
  const float* x = corrected_row(in, first, m, s.row);
  int flags = 0;
  for (int64_t i = 0; i < m; ++i) flags |= lc_nonfinite(x[i]);
  lc_select(x, m, k, s.at, s.v);
  return flags;
}

#ifdef LC_X86
LC_AVX2 int select_full_row_avx2(const Input& in, int64_t first, LcSelector& selector, Scratch& s) {
  const float* x = lc_input(in.x, in.dtype, first, selector.c, s.row);
  const float* residual = in.residual ? in.residual + first : nullptr;
  float* p = in.residual ? in.candidate + first : nullptr;
  if (lc_select_avx2(selector, x, residual, in.decay, p, s.at, s.v)) return 0;
  const int flags = lc_copy_finite(p ? p : x, selector.c, s.row);
  lc_select_avx2(selector, s.row, nullptr, 0.0f, nullptr, s.at, s.v);
  return flags;
}
#endif

// The candidate holds p; what was sent leaves it. The residual of what is not finite is 0.
void correct_candidate(float* p, int64_t m, int64_t count, const Scratch& s, bool finite) {
  for (int64_t j = 0; j < count; ++j)
    if (finite || !lc_nonfinite(p[s.at[j]])) p[s.at[j]] = s.v[j] - s.decoded[j];
  if (!finite) lc_copy_finite(p, m, p);
}

int encode_rows(const LcSparse& f, const Input& in, int64_t n, LcSections to, int64_t begin, int64_t end, Scratch s) {
  LcRowWriter writer(f, to, begin, end, s.sums);
  int flags = 0;
#ifdef LC_X86
  const bool avx2 = lc_active_level >= LC_LEVEL_AVX2 && lc_selector_takes(f.c, f.k);
  LcSelector selector;
  selector.c = f.c, selector.k = f.k;
#endif
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * f.c, m = n - first < f.c ? n - first : f.c, count = m < f.k ? m : f.k;
#ifdef LC_X86
    const int bad = avx2 && m == f.c ? select_full_row_avx2(in, first, selector, s) : select_row(in, first, m, f.k, s);
#else
    const int bad = select_row(in, first, m, f.k, s);
#endif
    flags |= bad | writer.write(s.at, s.v, count, s.decoded);
    if (in.candidate) correct_candidate(in.candidate + first, m, count, s, !bad);
  }
  writer.finish();
  return flags;
}

// Zeros between the sections and at the end.
void pad_sections(const LcSparse& f, LcSections to, int64_t rows) {
  const auto pad = [](uint8_t* section, int64_t bytes) { memset(section + bytes, 0, (size_t)(lc_pad4(bytes) - bytes)); };
  pad(to.scales, rows * f.scale_bytes());
  pad(to.indices, f.index_bytes(rows));
  pad(to.codes, f.code_bytes(rows));
}

bool rows_are_valid(const LcSparse& f, LcSections from, int64_t begin, int64_t end, Scratch s) {
  LcRowReader reader(f, from, begin);
  bool valid = true;
  for (int64_t row = begin; row < end; ++row) valid &= reader.read(s.at, s.v) >= 0;
  return valid;
}

// Write `from` past the caches.
void stream(const float* from, int64_t m, float* to) {
  int64_t i = 0;
#ifdef LC_X86
  for (; i < m && ((uintptr_t)(to + i) & 31); ++i) to[i] = from[i];
  for (; i + 8 <= m; i += 8) {
    _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
    _mm_stream_ps(to + i + 4, _mm_loadu_ps(from + i + 4));
  }
#endif
  for (; i < m; ++i) to[i] = from[i];
}

// Overwrite `out` by rows begin .. end - 1. Returns 0, or 1 where one of them is damaged.
int decode_rows(const LcSparse& f, LcSections from, float* out, int64_t n, int64_t begin, int64_t end, Scratch s) {
  LcRowReader reader(f, from, begin);
  const bool streamed = f.c <= LC_MAX_ROW && n * 4 >= LC_STREAM_BYTES;
  if (streamed) memset(s.row, 0, (size_t)f.c * 4);
  bool valid = true;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * f.c, m = n - first < f.c ? n - first : f.c, count = reader.read(s.at, s.v);
    float* to = streamed ? s.row : out + first;
    if (!streamed) memset(to, 0, (size_t)m * 4);
    for (int64_t j = 0; j < count; ++j)
      if (s.at[j] < m) to[s.at[j]] = s.v[j];
    valid &= count >= 0;
    if (!streamed) continue;
    stream(s.row, m, out + first);
    for (int64_t j = 0; j < count; ++j) s.row[s.at[j]] = 0.0f;
  }
#ifdef LC_X86
  if (streamed) _mm_sfence();
#endif
  return valid ? 0 : 1;
}

// acc += weight * decoded, on the entries only.
void add_rows(const LcSparse& f, LcSections from, float* acc, float weight, int64_t n, int64_t begin, int64_t end, Scratch s) {
  LcRowReader reader(f, from, begin);
  uint32_t *at = s.at, *next_at = s.next_at;
  float *v = s.v, *next_v = s.decoded;
  int64_t count = reader.read(at, v);
  for (int64_t row = begin; row < end; ++row) {
    float* to = acc + row * f.c;
    const int64_t m = n - row * f.c < f.c ? n - row * f.c : f.c;
    int64_t next_count = 0;
    if (row + 1 < end) {  // the entries of a row are far apart: ask for the next ones before adding these
      next_count = reader.read(next_at, next_v);
      for (int64_t j = 0; j < next_count; ++j) __builtin_prefetch(to + f.c + next_at[j], 1);
    }
    for (int64_t j = 0; j < count; ++j)
      if (at[j] < m) to[at[j]] += weight * v[j];
    std::swap(at, next_at), std::swap(v, next_v);
    count = next_count;
  }
}

}  // namespace

// x: n elements; residual and candidate: n float32, or both null; body: as SparseFormat.nbytes says; scratch: `words` for
// each thread. Returns flags.
LC_API int32_t lc_topk_encode(const void* x, int32_t dtype, const float* residual, float* candidate, float decay, int64_t n,
                              int64_t c, int64_t k, int32_t index, int32_t value, int32_t iterations, uint8_t* body,
                              float* scratch, int64_t words, int32_t threads) {
  const LcSparse f = {c, k, index, value, iterations};
  const Input in = {x, dtype, residual, candidate, decay};
  const int64_t rows = (n + c - 1) / c;
  const LcSections to = lc_sections(f, body, rows);
  pad_sections(f, to, rows);
  return lc_parallel(rows, 8, threads, [&](int64_t begin, int64_t end) {
    return encode_rows(f, in, n, to, begin, end, Scratch(scratch, words, k));
  });
}

// Returns 0, or 1 where the body is damaged; then what is in `out` means nothing.
LC_API int32_t lc_topk_decode(const uint8_t* body, float* out, int64_t n, int64_t c, int64_t k, int32_t index, int32_t value,
                              float* scratch, int64_t words, int32_t threads) {
  const LcSparse f = {c, k, index, value, 0};
  const int64_t rows = (n + c - 1) / c;
  const LcSections from = lc_sections(f, const_cast<uint8_t*>(body), rows);
  return lc_parallel(rows, 8, threads, [&](int64_t begin, int64_t end) {
    return decode_rows(f, from, out, n, begin, end, Scratch(scratch, words, k));
  });
}

// Returns 0, or 1, having added nothing, where the body is damaged.
LC_API int32_t lc_topk_decode_add(const uint8_t* body, float* acc, float weight, int64_t n, int64_t c, int64_t k,
                                  int32_t index, int32_t value, float* scratch, int64_t words, int32_t threads) {
  const LcSparse f = {c, k, index, value, 0};
  const int64_t rows = (n + c - 1) / c;
  const LcSections from = lc_sections(f, const_cast<uint8_t*>(body), rows);
  const int damaged = lc_parallel(rows, 8, threads, [&](int64_t begin, int64_t end) {
    return rows_are_valid(f, from, begin, end, Scratch(scratch, words, k)) ? 0 : 1;
  });
  if (damaged) return 1;
  return lc_parallel(rows, 8, threads, [&](int64_t begin, int64_t end) {
    add_rows(f, from, acc, weight, n, begin, end, Scratch(scratch, words, k));
    return 0;
  });
}
