// Shared by all kernel files: types, run-time dispatch, threads.
//
// Rules of every kernel here (docs/design.md):
//   - plain C interface; raw pointers, int64 sizes; returns int32 (flags or 0); never throws, never allocates on the hot path;
//   - any n >= 0, any tail, any address alignment;
//   - the bytes do not depend on the level or on the number of threads.
#pragma once
#include <cstdint>
#include <cstring>

#define LC_API extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__) && defined(__GNUC__)
#define LC_X86 1
#define LC_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt")))
#include <immintrin.h>
#endif

enum { LC_PORTABLE = 0, LC_LEVEL_AVX2 = 1 };
enum { LC_F32 = 0, LC_BF16 = 1, LC_F16 = 2 };          // input dtypes (kernels.dtype_code)
enum { LC_HAS_NAN = 1, LC_HAS_INF = 2 };               // flags (codec.py)

extern int lc_active_level;                            // set by lc_set_level

// Outputs at least this large do not fit the caches: write them with streaming stores.
constexpr int64_t LC_STREAM_BYTES = 4 << 20;

// Run body(begin, end) on `count` items, in contiguous ranges that are multiples of `grain` items, OR-ing the results.
template <class Body>
static inline int lc_parallel(int64_t count, int64_t grain, int threads, const Body& body) {
  const int64_t grains = (count + grain - 1) / grain;
  if (threads > grains) threads = (int)grains;
  if (threads <= 1) return count > 0 ? body((int64_t)0, count) : 0;
  int flags = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(| : flags)
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = grains * t / threads * grain, stop = grains * (t + 1) / threads * grain;
    flags |= body(begin, stop < count ? stop : count);
  }
  return flags;
}
