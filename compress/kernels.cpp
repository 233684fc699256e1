// Run-time choice of the instruction set.
#include "kernels.h"

int lc_active_level = LC_PORTABLE;

LC_API int32_t lc_max_level() {
#ifdef LC_X86
  __builtin_cpu_init();
  const bool vectors = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (vectors && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt")) return LC_LEVEL_AVX2;
#endif
  return LC_PORTABLE;
}

LC_API int32_t lc_set_level(int32_t level) {
  lc_active_level = level < 0 ? LC_PORTABLE : level > lc_max_level() ? lc_max_level() : level;
  return lc_active_level;
}
