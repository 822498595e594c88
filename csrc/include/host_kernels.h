// Optimizer kernels on the host. Raw pointers and sizes in, an error code out; the caller owns all memory.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "adamw.h"

namespace megalite {

// Vector instructions. Each level gives the same bits; a caller asks for less than the machine has only in tests.
enum Simd : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

// The best level of this machine.
Simd best_simd();

// Whether `threads` and `simd` can be met here.
inline bool can_run(int threads, int simd) { return threads >= 1 && simd >= kScalar && simd <= best_simd(); }

// One update of one slice from grad * scale. Same bits for every level and number of threads.
int adamw_cpu(const AdamSlice& slice, const AdamHyper& hyper, int64_t step, float scale, int threads, int simd);

// Sum of squares in fp64, in *sum. Same bits for every level and number of threads.
int square_sum_cpu(const float* grad, int64_t num, double* sum, int threads, int simd);

// Run work(part) for part = 0 .. parts - 1, the last one on this thread. Threads are started per call (tens of
// microseconds against milliseconds of work), since a pool would not survive a fork of the process.
template <typename Work>
void run_parts(int parts, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(parts);
  int started = 0;
  try {
    for (; started < parts - 1; ++started) others.emplace_back(work, started);
  } catch (const std::system_error&) {  // no more threads to be had: the rest runs here
  }
  for (int part = started; part < parts; ++part) work(part);
  for (std::thread& other : others) other.join();
}

// How many threads `num` elements deserve, so that starting them stays below the time they save.
inline int parts_for(int64_t num, int threads) {
  constexpr int64_t kGrain = 1 << 17;
  const int64_t useful = num / kGrain;
  return static_cast<int>(useful < 1 ? 1 : useful < threads ? useful : threads);
}

}  // namespace megalite
