// Groups of threads whose values lie strided: place j of thread i of `size` threads has value i + size * j. The halves
// that tree_sum folds first are then places of one thread, and a warp has neighbouring values in each place.
#ifndef LC_STRIDED_CUH
#define LC_STRIDED_CUH
#include "device.cuh"

// tree_sum of the 8 * size values of every group, for all its threads. size: a power of two. Where it is over 32 all
// threads of the thread block call this, and `shared` has a float for each of them; otherwise whole warps do.
LC_DEVICE float lc_strided_tree_sum(const float v[8], int size, float* shared) {
  float sum = ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  if (size <= 32) {
    for (int flip = size / 2; flip; flip /= 2) sum += __shfl_xor_sync(LC_ALL, sum, flip);
    return sum;
  }
  const int me = (int)threadIdx.x % size;
  float* group = shared + ((int)threadIdx.x - me);
  __syncthreads();  // `shared` may still be read
  group[me] = sum;
  __syncthreads();
  if (me < 32) {  // every lane folds a column of its own
    for (int half = size / 2; half >= 32; half /= 2)
      for (int i = me; i < half; i += 32) group[i] += group[i + half];
    sum = group[me];
#pragma unroll
    for (int flip = 16; flip; flip /= 2) sum += __shfl_xor_sync(LC_ALL, sum, flip);
    if (me == 0) group[0] = sum;
  }
  __syncthreads();
  return group[0];
}

#endif
