// Optimizer kernels on the GPU: device pointers and a stream in, a cudaError_t out (0 is success). They return at once;
// nothing is read back, so neither the step count, the scale nor the sum costs a synchronisation.
#pragma once

#include <cstdint>

#include "adamw.h"

// Blocks of a grid at most; the emulator takes few, so that each walks over several pieces of work.
#ifndef MEGALITE_MAX_BLOCKS
#define MEGALITE_MAX_BLOCKS 2048
#endif

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace megalite {

// Slices that one launch takes: their table travels in the kernel's arguments (4 KB).
constexpr int kMaxSlices = 48;
// fp64 numbers of scratch that square_sum_cuda needs.
constexpr int kSquareSumScratch = MEGALITE_MAX_BLOCKS;

// One update of `num` slices from grad * *scale; step (from 1) and scale lie on the device.
int adamw_cuda(const AdamSlice* slices, int num, const AdamHyper& hyper, const int64_t* step, const float* scale,
               CUstream_st* stream);

// Sum of squares in fp64 into *sum on the device; the order of additions depends on `num` only.
int square_sum_cuda(const float* grad, int64_t num, double* scratch, double* sum, CUstream_st* stream);

// The runtime's text for an error code.
const char* cuda_error_text(int error);

}  // namespace megalite
