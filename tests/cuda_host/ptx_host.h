// The functions of ptx.cuh in C++ atomics. `emulator::fault` weakens one of them, `emulator::jitter_us` delays what
// others wait for by a random time up to that.
#pragma once

#include <chrono>
#include <random>
#include <thread>

#include "adamw.h"

namespace emulator {

enum Fault { kNoFault, kRelaxedRelease, kRelaxedAcquire, kSkippedWait, kOneBuffer, kUnsignedCompare };
inline int fault = kNoFault;
inline int jitter_us = 0;

// What a multicast address is here: the same buffer of every rank.
struct Multicast {
  int size;
  char* bases[16];
};

inline void jitter() {
  if (!jitter_us) return;
  thread_local std::minstd_rand random(static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
  std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(jitter_us)));
}

}  // namespace emulator

namespace megalite {

inline void store_release(uint32_t* flag, uint32_t value) {
  emulator::jitter();
  if (emulator::fault == emulator::kRelaxedRelease) {
    __atomic_store_n(flag, value, __ATOMIC_RELAXED);
  } else {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  }
}

inline uint32_t load_acquire(const uint32_t* flag) {
  if (emulator::fault == emulator::kRelaxedAcquire) return __atomic_load_n(flag, __ATOMIC_RELAXED);
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

inline bool claim(uint32_t* word) {
  uint32_t expected = 0;
  return __atomic_compare_exchange_n(word, &expected, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

inline uint64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline void relax() { std::this_thread::yield(); }

inline uint32_t pack_bf16(float low, float high) {
  return bf16_bits(__float_as_uint(low)) | static_cast<uint32_t>(bf16_bits(__float_as_uint(high))) << 16;
}

inline uint16_t fp16_bits(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

inline uint32_t pack_fp16(float low, float high) { return fp16_bits(low) | static_cast<uint32_t>(fp16_bits(high)) << 16; }

inline float widen_fp16(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}

#define MEGALITE_MULTIMEM 1

template <int kFormat>
uint4 multimem_sum(const char* base, int64_t offset);

inline void multimem_store(char* base, int64_t offset, uint4 value) {
  const auto* all = reinterpret_cast<const emulator::Multicast*>(base);
  for (int i = 0; i < all->size; ++i) *reinterpret_cast<uint4*>(all->bases[i] + offset) = value;
}

}  // namespace megalite
