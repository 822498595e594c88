// What CUDA C++ has no words for: system-scope flags, the wall clock, packed conversions and multicast addresses. On the
// host tests/cuda_host/ptx_host.h gives the same functions their meaning in C++ atomics, which ThreadSanitizer knows.
#pragma once

#include "cuda.cuh"

#ifdef MEGALITE_HOST_EMULATOR
#include "ptx_host.h"
#else

namespace megalite {

// Everything that this thread wrote, or knows of through a block barrier, is visible to who acquires the value.
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// 0 -> 1 in this device's memory; whether it was this thread that did it.
__device__ __forceinline__ bool claim(uint32_t* word) { return atomicCAS(word, 0u, 1u) == 0u; }

// Nanoseconds of a clock that all SMs share.
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Between two looks at a flag: nothing, since the look itself takes long enough.
__device__ __forceinline__ void relax() {}

// Two fp32 numbers, each rounded to nearest even, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ uint32_t pack_fp16(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float widen_fp16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// A multicast address stands for the same place in every rank's buffer. Reading sums all of them in the switch (in fp32,
// in an order that it chooses), writing writes them all. sm_90 and NVLink with NVSwitch; the host refuses it elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MEGALITE_MULTIMEM 1
#define MEGALITE_MULTIMEM_SUM(type)                                                            \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add." type " {%0, %1, %2, %3}, [%4];"    \
               : "=r"(sum.x), "=r"(sum.y), "=r"(sum.z), "=r"(sum.w)                            \
               : "l"(base + offset)                                                            \
               : "memory")

template <int kFormat>  // Format of formats.cuh
__device__ __forceinline__ uint4 multimem_sum(const char* base, int64_t offset) {
  uint4 sum;
  if constexpr (kFormat == 0) {
    float4 wide;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(wide.x), "=f"(wide.y), "=f"(wide.z), "=f"(wide.w)
                 : "l"(base + offset)
                 : "memory");
    sum = {__float_as_uint(wide.x), __float_as_uint(wide.y), __float_as_uint(wide.z), __float_as_uint(wide.w)};
  } else if constexpr (kFormat == 1) {
    MEGALITE_MULTIMEM_SUM("acc::f32.v4.bf16x2");
  } else {
    MEGALITE_MULTIMEM_SUM("acc::f32.v4.f16x2");
  }
  return sum;
}

__device__ __forceinline__ void multimem_store(char* base, int64_t offset, uint4 value) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(base + offset),
               "f"(__uint_as_float(value.x)), "f"(__uint_as_float(value.y)), "f"(__uint_as_float(value.z)),
               "f"(__uint_as_float(value.w))
               : "memory");
}
#endif

}  // namespace megalite

#endif
