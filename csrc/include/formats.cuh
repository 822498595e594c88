// Sixteen bytes of numbers: how they unpack to fp32 and pack again (one rounding), and loads and stores of them that
// need neither alignment nor a whole vector.
#pragma once

#include "ptx.cuh"

namespace megalite {

enum Format : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

template <int kFormat>
struct Numbers;

template <>
struct Numbers<kFp32> {
  using Raw = uint32_t;
  static constexpr int kLanes = 4;

  static __device__ __forceinline__ void unpack(uint4 v, float (&to)[kLanes]) {
    to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y);
    to[2] = __uint_as_float(v.z), to[3] = __uint_as_float(v.w);
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[kLanes]) {
    return {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3])};
  }
};

template <>
struct Numbers<kBf16> {
  using Raw = uint16_t;
  static constexpr int kLanes = 8;

  static __device__ __forceinline__ void unpack(uint4 v, float (&to)[kLanes]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(words[i] << 16);
      to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[kLanes]) {
    return {pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7])};
  }
};

template <>
struct Numbers<kFp16> {
  using Raw = uint16_t;
  static constexpr int kLanes = 8;

  static __device__ __forceinline__ void unpack(uint4 v, float (&to)[kLanes]) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = widen_fp16(static_cast<uint16_t>(words[i]));
      to[2 * i + 1] = widen_fp16(static_cast<uint16_t>(words[i] >> 16));
    }
  }
  static __device__ __forceinline__ uint4 pack(const float (&f)[kLanes]) {
    return {pack_fp16(f[0], f[1]), pack_fp16(f[2], f[3]), pack_fp16(f[4], f[5]), pack_fp16(f[6], f[7])};
  }
};

// How the elements of all ranks become one.
enum Reduction : int { kSum = 0, kMax = 1, kMin = 2 };

// A NaN on either side stays.
__device__ __forceinline__ float reduce_two(float a, float b, int reduction) {
  if (reduction == kSum) return a + b;
  if (a != a) return a;
  return reduction == kMax ? (a > b ? a : b) : (a < b ? a : b);
}

// The 16 bytes at `from`, of which `left` elements exist (zeros behind them); `whole` says that `from` is aligned.
template <typename Raw>
__device__ __forceinline__ uint4 load_some(const Raw* from, int64_t left, bool whole) {
  constexpr int kLanes = 16 / sizeof(Raw), kHalves = 4 / sizeof(Raw);
  if (whole && left >= kLanes) return *reinterpret_cast<const uint4*>(from);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (i < left) words[i / kHalves] |= static_cast<uint32_t>(from[i]) << (16 * (i % kHalves));
  }
  return {words[0], words[1], words[2], words[3]};
}

template <typename Raw>
__device__ __forceinline__ void store_some(Raw* to, uint4 value, int64_t left, bool whole) {
  constexpr int kLanes = 16 / sizeof(Raw), kHalves = 4 / sizeof(Raw);
  if (whole && left >= kLanes) {
    *reinterpret_cast<uint4*>(to) = value;
    return;
  }
  const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    if (i < left) to[i] = static_cast<Raw>(words[i / kHalves] >> (16 * (i % kHalves)));
  }
}

}  // namespace megalite
