// AdamW over slices of flat shards in one launch: 30 bytes per element (28 without the bf16 copy), 128-bit accesses.
// Same bits as the CPU kernel; blocks stay and walk over chunks, so the bias corrections are computed once per block.

#include "cuda.cuh"
#include "cuda_kernels.h"

namespace megalite {
namespace {

constexpr int kVectors = 2;  // float4 per thread and tensor: 8 loads of 16 bytes in flight
constexpr int kChunk = kThreads * 4 * kVectors;

struct Table {
  AdamSlice slices[kMaxSlices];
  int64_t end_chunk[kMaxSlices];  // first chunk behind each slice
};
static_assert(sizeof(Table) <= 3968, "kernel arguments are limited to 4 KB");

__device__ void update_one(const AdamSlice& s, const AdamTerms& terms, int64_t i) {
  AdamState state{s.main[i], s.exp_avg[i], s.exp_avg_sq[i]};
  adam_update(state, s.grad[i], terms);
  s.main[i] = state.main;
  s.exp_avg[i] = state.exp_avg;
  s.exp_avg_sq[i] = state.exp_avg_sq;
  if (s.copy) s.copy[i] = bf16_bits(__float_as_uint(state.main));
}

__device__ void update_lane(float& main, float grad, float& exp_avg, float& exp_avg_sq, const AdamTerms& terms) {
  AdamState state{main, exp_avg, exp_avg_sq};
  adam_update(state, grad, terms);
  main = state.main;
  exp_avg = state.exp_avg;
  exp_avg_sq = state.exp_avg_sq;
}

// A whole chunk: all loads first, so that they overlap.
__device__ void update_chunk(const AdamSlice& s, const AdamTerms& terms, int64_t begin) {
  float4 main[kVectors], grad[kVectors], exp_avg[kVectors], exp_avg_sq[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = begin + 4 * (k * kThreads + static_cast<int>(threadIdx.x));
    main[k] = *reinterpret_cast<const float4*>(s.main + i);
    grad[k] = *reinterpret_cast<const float4*>(s.grad + i);
    exp_avg[k] = *reinterpret_cast<const float4*>(s.exp_avg + i);
    exp_avg_sq[k] = *reinterpret_cast<const float4*>(s.exp_avg_sq + i);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int64_t i = begin + 4 * (k * kThreads + static_cast<int>(threadIdx.x));
    update_lane(main[k].x, grad[k].x, exp_avg[k].x, exp_avg_sq[k].x, terms);
    update_lane(main[k].y, grad[k].y, exp_avg[k].y, exp_avg_sq[k].y, terms);
    update_lane(main[k].z, grad[k].z, exp_avg[k].z, exp_avg_sq[k].z, terms);
    update_lane(main[k].w, grad[k].w, exp_avg[k].w, exp_avg_sq[k].w, terms);
    *reinterpret_cast<float4*>(s.main + i) = main[k];
    *reinterpret_cast<float4*>(s.exp_avg + i) = exp_avg[k];
    *reinterpret_cast<float4*>(s.exp_avg_sq + i) = exp_avg_sq[k];
    if (s.copy) {
      ushort4 copy;
      copy.x = bf16_bits(__float_as_uint(main[k].x));
      copy.y = bf16_bits(__float_as_uint(main[k].y));
      copy.z = bf16_bits(__float_as_uint(main[k].z));
      copy.w = bf16_bits(__float_as_uint(main[k].w));
      *reinterpret_cast<ushort4*>(s.copy + i) = copy;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ Table table, int64_t num_chunks, const AdamHyper hyper, const int64_t* step,
                 const float* scale) {
  __shared__ AdamTerms shared_terms;
  if (threadIdx.x == 0) shared_terms = adam_terms(hyper, *step, *scale);
  __syncthreads();
  AdamTerms terms = shared_terms;
  int index = 0;
  for (int64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    while (chunk >= table.end_chunk[index]) ++index;
    const AdamSlice& s = table.slices[index];
    const int64_t first_chunk = index > 0 ? table.end_chunk[index - 1] : 0;
    const int64_t begin = (chunk - first_chunk) * kChunk;
    terms.keep = adam_keep(hyper, s.weight_decay);
    const bool vectors = aligned(s.main, 16) && aligned(s.grad, 16) && aligned(s.exp_avg, 16) &&
                         aligned(s.exp_avg_sq, 16) && aligned(s.copy, 8);
    if (vectors && begin + kChunk <= s.num) {
      update_chunk(s, terms, begin);
    } else {
      const int64_t end = begin + kChunk < s.num ? begin + kChunk : s.num;
      for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) update_one(s, terms, i);
    }
  }
}

}  // namespace

int adamw_cuda(const AdamSlice* slices, int num, const AdamHyper& hyper, const int64_t* step, const float* scale,
               CUstream_st* stream) {
  for (int done = 0; done < num;) {
    Table table{};
    int64_t chunks = 0;
    int used = 0;
    for (; used < kMaxSlices && done < num; ++done) {
      if (slices[done].num == 0) continue;
      chunks += (slices[done].num + kChunk - 1) / kChunk;
      table.slices[used] = slices[done];
      table.end_chunk[used++] = chunks;
    }
    if (used == 0) break;
    const unsigned blocks = static_cast<unsigned>(chunks < MEGALITE_MAX_BLOCKS ? chunks : MEGALITE_MAX_BLOCKS);
    const int error = MEGALITE_LAUNCH(adamw_kernel, blocks, kThreads, stream, table, chunks, hyper, step, scale);
    if (error) return error;
  }
  return 0;
}

}  // namespace megalite
