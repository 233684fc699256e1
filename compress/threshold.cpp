// Kernels of threshold.py: list the entries of a vector whose magnitude reaches a threshold.
#include "input.h"
#include "select.h"

namespace {

constexpr int64_t SCAN = 4096;   // elements corrected, widened and scanned while they are in the cache
constexpr int MAX_THREADS = 64;  // threshold.py
constexpr int OVERFLOW = 0x100;  // threshold.py

// Where positions and values go; counts on when there is no more room.
struct List {
  uint8_t *positions, *values;
  int64_t room, count;
  int flags;

  void add(int64_t position, float value, uint32_t least) {
    flags |= lc_nonfinite(value);
    if (lc_key(value) < least) return;
    if (count < room) {
      const uint32_t p = (uint32_t)position;
      memcpy(positions + 4 * count, &p, 4);
      memcpy(values + 4 * count, &value, 4);
    }
    ++count;
  }
};

#ifdef LC_X86
// Elements i .. m-1 in steps of 32; where none of a step reaches the threshold, which is the usual case, it is left at
// once. What is not finite reaches every threshold, and is sorted out in `add`.
LC_AVX2 int64_t scan_avx2(const float* p, int64_t first, int64_t m, uint32_t least, List& list) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF), below = _mm256_set1_epi32((int)least - 1);
  int64_t i = 0;
  for (; i + 32 <= m; i += 32) {
    __m256i above[4];
    for (int j = 0; j < 4; ++j) {
      const __m256i bits = _mm256_loadu_si256((const __m256i*)(p + i + 8 * j));
      above[j] = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude), below);
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(above[0], above[1]), _mm256_or_si256(above[2], above[3]));
    if (_mm256_testz_si256(any, any)) continue;
    for (int j = 0; j < 4; ++j) {
      unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(above[j]));
      for (; mask; mask &= mask - 1) {
        const int64_t at = i + 8 * j + __builtin_ctz(mask);
        list.add(first + at, p[at], least);
      }
    }
  }
  return i;
}
#endif

void scan(const float* p, int64_t first, int64_t m, uint32_t least, List& list) {
  int64_t i = 0;
#ifdef LC_X86
  if (lc_active_level >= LC_LEVEL_AVX2) i = scan_avx2(p, first, m, least, list);
#endif
  for (; i < m; ++i) list.add(first + i, p[i], least);
}

struct Source {
  const void* x;
  int dtype;
  const float* residual;
  float* candidate;
  float decay;

  // Elements first .. first+m-1 of what is encoded.
  const float* read(int64_t first, int64_t m, float* scratch) const {
    if (!candidate) return lc_input(x, dtype, first, m, scratch);
    if (residual) lc_correct((const float*)x + first, residual + first, decay, m, candidate + first);
    return candidate + first;
  }
};

void list_range(const Source& source, int64_t begin, int64_t end, uint32_t least, List& list) {
  float scratch[SCAN];
  for (int64_t first = begin; first < end; first += SCAN) {
    const int64_t m = end - first < SCAN ? end - first : SCAN;
    scan(source.read(first, m, scratch), first, m, least, list);
  }
}

// The list of the first range is in the body, its values behind the room for positions; join the others to it.
void join(const List* lists, int parts, int64_t total, int64_t capacity, uint8_t* body) {
  int64_t done = lists[0].count;
  for (int t = 1; t < parts; done += lists[t++].count)
    memcpy(body + 4 + 4 * done, lists[t].positions, (size_t)lists[t].count * 4);
  uint8_t* values = body + 4 + 4 * total;
  memmove(values, lists[0].values, (size_t)lists[0].count * 4);
  done = lists[0].count;
  for (int t = 1; t < parts; done += lists[t++].count)
    memcpy(values + 4 * done, lists[t].values, (size_t)lists[t].count * 4);
  memset(values + 4 * total, 0, (size_t)(capacity - total) * 8);
}

bool is_list(const uint8_t* body, int64_t n, int64_t capacity) {
  uint32_t count, position;
  memcpy(&count, body, 4);
  if (count > capacity) return false;
  int64_t before = -1;
  for (int64_t j = 0; j < count; ++j, before = position) {
    memcpy(&position, body + 4 + 4 * j, 4);
    float value;
    memcpy(&value, body + 4 + 4 * (count + j), 4);
    if (position <= before || position >= n || lc_nonfinite(value)) return false;
  }
  return true;
}

template <class Use>
void for_each(const uint8_t* body, const Use& use) {
  uint32_t count, position;
  float value;
  memcpy(&count, body, 4);
  for (int64_t j = 0; j < count; ++j) {
    memcpy(&position, body + 4 + 4 * j, 4);
    memcpy(&value, body + 4 + 4 * (count + j), 4);
    use(position, value);
  }
}

}  // namespace

// Entries of x, or, with a candidate, of decay * residual + x, which is written to it (without a residual the candidate
// is x already). body: room for `capacity` entries; only its count is right where OVERFLOW is returned. scratch: 8
// `capacity` bytes for every thread but the first.
LC_API int32_t lc_threshold_encode(const void* x, int32_t dtype, const float* residual, float* candidate, float decay,
                                   int64_t n, int64_t capacity, uint32_t least, uint8_t* body, uint8_t* scratch,
                                   int32_t threads) {
  const Source source{x, dtype, residual, candidate, decay};
  const int64_t scans = (n + SCAN - 1) / SCAN;
  const int parts = threads > MAX_THREADS ? MAX_THREADS : threads > scans / 8 ? 1 : threads;
  List lists[MAX_THREADS];
  lc_parallel(parts, 1, parts, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      uint8_t* to = t == 0 ? body + 4 : scratch + (t - 1) * 8 * capacity;
      lists[t] = {to, to + 4 * capacity, capacity, 0, 0};
      const int64_t stop = scans * (t + 1) / parts * SCAN;
      list_range(source, scans * t / parts * SCAN, stop < n ? stop : n, least, lists[t]);
    }
    return 0;
  });
  int64_t total = 0;
  int flags = 0;
  for (int t = 0; t < parts; ++t) total += lists[t].count, flags |= lists[t].flags;
  const uint32_t count = (uint32_t)total;
  memcpy(body, &count, 4);
  if (total > capacity) return flags | OVERFLOW;
  join(lists, parts, total, capacity, body);
  return flags;
}

// The bits of the k-th largest magnitude of n elements.
LC_API int32_t lc_kth_magnitude(const float* x, int64_t n, int64_t k) { return (int32_t)lc_radix_threshold(x, n, k).bits; }

// The `capacity` largest entries of a list of more in `all` (4-byte aligned), ties to the lower position, as a body.
LC_API int32_t lc_threshold_trim(const uint8_t* all, int64_t capacity, uint8_t* body) {
  uint32_t hits, count = (uint32_t)capacity;
  memcpy(&hits, all, 4);
  const uint8_t* positions = all + 4;
  const float* values = (const float*)(all + 4 + 4 * (int64_t)hits);
  LcThreshold t = lc_radix_threshold(values, hits, capacity);
  memcpy(body, &count, 4);
  int64_t taken = 0;
  for (int64_t j = 0; j < hits; ++j) {
    const uint32_t key = lc_key(values[j]);
    if (key < t.bits || (key == t.bits && t.ties-- <= 0)) continue;
    memcpy(body + 4 + 4 * taken, positions + 4 * j, 4);
    memcpy(body + 4 + 4 * (capacity + taken), values + j, 4);
    ++taken;
  }
  return 0;
}

// out = the decoded vector, or out += weight * it. Returns 1, with nothing written, where the body is damaged.
LC_API int32_t lc_threshold_decode(const uint8_t* body, int64_t n, int64_t capacity, float* out, int32_t add, float weight,
                                   int32_t threads) {
  if (!is_list(body, n, capacity)) return 1;
  if (add) {
    for_each(body, [=](int64_t i, float v) { out[i] += weight == 1 ? v : weight * v; });
    return 0;
  }
  lc_parallel(n, 65536, threads, [=](int64_t begin, int64_t end) {
    memset(out + begin, 0, (size_t)(end - begin) * 4);
    return 0;
  });
  for_each(body, [=](int64_t i, float v) { out[i] = v; });
  return 0;
}

// The candidate after a body was made from it: 0 where an entry was sent and, in the first n elements, where one is not
// finite.
LC_API int32_t lc_threshold_clear(float* candidate, const uint8_t* body, int64_t n) {
  for_each(body, [=](int64_t i, float) { candidate[i] = 0.0f; });
  for (int64_t i = 0; i < n; ++i)
    if (lc_nonfinite(candidate[i])) candidate[i] = 0.0f;
  return 0;
}
