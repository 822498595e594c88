// Flags between processes: see shm_flags.h. What waits here may be woken by a store of any program (a Triton kernel in
// the interpreter, say), so the wait polls.

#include "shm_flags.h"

#include <sched.h>
#include <time.h>

#include <chrono>

#include "shm_pause.h"

namespace megalite {

void flag_store(int32_t* flag, int32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

int32_t flag_load(const int32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

bool flag_wait(const int32_t* flag, int32_t value, double timeout_s) {
  constexpr int kSpins = 2000, kYields = 200;
  for (int i = 0; i < kSpins; ++i) {
    if (flag_reached(flag_load(flag), value)) return true;
    cpu_pause();
  }
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int64_t i = 0; !flag_reached(flag_load(flag), value); ++i) {
    if (std::chrono::steady_clock::now() >= limit) return false;
    if (i < kYields) {
      sched_yield();
    } else {
      const timespec step{0, 50'000};
      nanosleep(&step, nullptr);
    }
  }
  return true;
}

}  // namespace megalite
