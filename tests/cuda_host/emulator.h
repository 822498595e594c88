// A stand-in for the CUDA runtime that runs a kernel's blocks on host threads: one std::thread per CUDA thread of a
// block; blocks run one after the other, or together where `emulator::resident` is set. __syncthreads() is a barrier that orders memory; a warp shuffle is not: it passes
// values through relaxed atomics, as the hardware promises no more. So ThreadSanitizer sees a missing barrier.
//
// Shared memory is static storage, which is why usually only one block runs at a time. `emulator::dropped_line` names a
// __syncthreads() by its line that is skipped: that is how the tests plant faults.
#pragma once

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads() ::emulator::block_barrier(__LINE__)
#define __syncthreads_or(vote) ::emulator::block_barrier(__LINE__, vote)

struct float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct ushort4 {
  unsigned short x, y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct CUstream_st {};

namespace emulator {

constexpr int kWarp = 32;
inline int dropped_line = 0;
inline bool resident = false;

// One value per lane of a warp: a slot holds 32 bits of the value and the number of the exchange it belongs to.
struct Warp {
  std::atomic<uint64_t> slots[2][2][kWarp];  // [parity of the exchange][low or high word][lane]
  std::atomic<uint32_t> readers[2];          // lanes that have read, over all exchanges of a parity
};

// Orders memory for all threads of the block, as __syncthreads() does; returns whether any of them voted yes.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  bool wait(bool vote) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t phase = phase_;
    votes_ |= vote;
    if (++arrived_ == threads_) {
      arrived_ = 0;
      outcome_ = votes_;
      votes_ = false;
      ++phase_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return phase_ != phase; });
    }
    return outcome_;
  }

 private:
  const int threads_;
  int arrived_ = 0;
  bool votes_ = false, outcome_ = false;
  uint64_t phase_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
  explicit Block(int threads) : barrier(threads), warps(threads / kWarp) {}
};

struct Self {
  Block* block = nullptr;
  uint32_t exchanges = 0;
};

inline thread_local Self self;
inline thread_local dim3 thread_index, block_index, block_size, grid_size;

inline bool block_barrier(int line, bool vote = false) {
  return line != dropped_line ? self.block->barrier.wait(vote) : vote;
}

// The value of lane + offset; the own one where that is beyond the warp. All lanes of a warp take part.
inline double shuffle_down(double value, unsigned offset) {
  Warp& warp = self.block->warps[thread_index.x / kWarp];
  const unsigned lane = thread_index.x % kWarp;
  const uint32_t number = ++self.exchanges;
  auto& slots = warp.slots[number % 2];
  auto& readers = warp.readers[number % 2];
  // a slot is written again only after all lanes have read the exchange before the last one, which has this parity too
  while (readers.load(std::memory_order_relaxed) < kWarp * ((number - 1) / 2)) std::this_thread::yield();
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  for (int half = 0; half < 2; ++half) {
    const uint64_t word = (bits >> (32 * half)) & 0xffffffffu;
    slots[half][lane].store(static_cast<uint64_t>(number) << 32 | word, std::memory_order_relaxed);
  }
  const unsigned source = lane + offset < kWarp ? lane + offset : lane;
  bits = 0;
  for (int half = 0; half < 2; ++half) {
    uint64_t found;
    while ((found = slots[half][source].load(std::memory_order_relaxed)) >> 32 != number) std::this_thread::yield();
    bits |= (found & 0xffffffffu) << (32 * half);
  }
  readers.fetch_add(1, std::memory_order_relaxed);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Run every block of the grid; returns when the last one is done.
inline void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  const unsigned together = resident ? blocks : 1;
  for (unsigned first = 0; first < blocks; first += together) {
    std::vector<std::unique_ptr<Block>> present;
    std::vector<std::thread> running;
    for (unsigned b = first; b < first + together; ++b) {
      present.push_back(std::make_unique<Block>(static_cast<int>(threads)));
      for (unsigned t = 0; t < threads; ++t) {
        running.emplace_back([&kernel, block = present.back().get(), b, t, blocks, threads] {
          self = {block, 0};
          thread_index = {t, 0, 0};
          block_index = {b, 0, 0};
          block_size = {threads, 1, 1};
          grid_size = {blocks, 1, 1};
          kernel();
        });
      }
    }
    for (std::thread& one : running) one.join();
  }
}

}  // namespace emulator

#define threadIdx (::emulator::thread_index)
#define blockIdx (::emulator::block_index)
#define blockDim (::emulator::block_size)
#define gridDim (::emulator::grid_size)

#define MEGALITE_LAUNCH(kernel, grid, block, stream, ...) \
  (::emulator::run(grid, block, [&] { kernel(__VA_ARGS__); }), static_cast<void>(stream), 0)

inline double __shfl_down_sync(unsigned, double value, unsigned offset) {
  return emulator::shuffle_down(value, offset);
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
