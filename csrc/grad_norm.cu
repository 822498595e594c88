// Sum of squares of a flat gradient in fp64, in two stages and without atomics: the order of additions, and so the
// result to the bit, depends on the number of elements only.

#include "cuda.cuh"
#include "cuda_kernels.h"

namespace megalite {
namespace {

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// The block's sum, valid in thread 0; once per kernel, since its shared memory is not guarded against a second use.
__device__ double block_sum(double value) {
  __shared__ double warps[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = warp_sum(value);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  if (warp > 0) return 0.0;
  return warp_sum(lane < kThreads / 32 ? warps[lane] : 0.0);
}

__device__ __forceinline__ void add_square(double& sum, float x) {
  const double wide = x;
  sum = fma(wide, wide, sum);
}

__global__ void __launch_bounds__(kThreads) square_sum_blocks(const float* grad, int64_t num, double* partial) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t vectors = aligned(grad, 16) ? num / 4 : 0;
  double x = 0.0, y = 0.0, z = 0.0, w = 0.0;
#pragma unroll 2
  for (int64_t i = first; i < vectors; i += threads) {
    const float4 four = reinterpret_cast<const float4*>(grad)[i];
    add_square(x, four.x);
    add_square(y, four.y);
    add_square(z, four.z);
    add_square(w, four.w);
  }
  for (int64_t i = 4 * vectors + first; i < num; i += threads) add_square(x, grad[i]);
  const double sum = block_sum((x + y) + (z + w));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) square_sum_total(const double* partial, int num, double* total) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < num; i += kThreads) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total = sum;
}

}  // namespace

int square_sum_cuda(const float* grad, int64_t num, double* scratch, double* sum, CUstream_st* stream) {
  constexpr int64_t kPerBlock = kThreads * 16;
  const int64_t wanted = (num + kPerBlock - 1) / kPerBlock;
  const int blocks = static_cast<int>(wanted < kSquareSumScratch ? wanted : kSquareSumScratch);
  if (blocks > 0) {
    const unsigned grid = static_cast<unsigned>(blocks);
    const int error = MEGALITE_LAUNCH(square_sum_blocks, grid, kThreads, stream, grad, num, scratch);
    if (error) return error;
  }
  return MEGALITE_LAUNCH(square_sum_total, 1u, kThreads, stream, scratch, blocks, sum);
}

}  // namespace megalite
