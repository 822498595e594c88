// What every .cu file includes: the CUDA runtime, or on a machine without one the stand-in of tests/cuda_host/, which
// runs the same source on host threads.
#pragma once

#ifdef MEGALITE_HOST_EMULATOR
#include "emulator.h"
#else
#include <cuda_runtime.h>

// Launch and return the error code. The stream is a cudaStream_t that was passed through Python as an integer.
#define MEGALITE_LAUNCH(kernel, grid, block, stream, ...) \
  (kernel<<<grid, block, 0, stream>>>(__VA_ARGS__), static_cast<int>(cudaGetLastError()))
#endif

#include <cstdint>

// Threads of a block; the emulator takes few, since each is a thread of the host.
#ifndef MEGALITE_THREADS
#define MEGALITE_THREADS 256
#endif

namespace megalite {

constexpr int kThreads = MEGALITE_THREADS;
static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps");

// Whether a pointer (null as well) allows loads of `bytes` at once.
__device__ __forceinline__ bool aligned(const void* pointer, unsigned bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace megalite
