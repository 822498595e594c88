// Waiting between processes: see shm_wait.h.
//
// No wake-up is lost: a sleeper counts itself, looks at the flag once more, and lets the kernel compare it again; the
// writer stores, then looks for sleepers. Both sides use sequentially consistent operations, so one sees the other.

#include "shm_wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>

#include "shm_pause.h"

namespace megalite {
namespace {

constexpr long kSleepNs = 50'000'000;  // a sleeper looks around this often
constexpr double kSuspect = 0.2;       // seconds after which the others' lives are doubted

using Clock = std::chrono::steady_clock;

void futex_sleep(uint32_t* word, uint32_t seen) {
  const timespec limit{0, kSleepNs};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void futex_wake_all(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// One look around: why to give up, or kOk to go on.
ShmState look_around(double waited, const ShmGroup& group, const ShmGoal& goal, const ShmPatience& patience) {
  if (__atomic_load_n(&group.header->failed, __ATOMIC_ACQUIRE) == 2) return ShmState::kFailed;
  for (int r = 0; waited > kSuspect && r < static_cast<int>(group.processes->size()); ++r) {
    if (r != group.rank && shm_died_before(group, r, goal)) return ShmState::kDead;
  }
  if (waited > patience.timeout_s) return ShmState::kLate;
  return patience.interrupted && patience.interrupted() ? ShmState::kInterrupted : ShmState::kOk;
}

ShmState sleep_until(const ShmGroup& group, int r, const ShmGoal& goal, const ShmPatience& patience) {
  ShmFlag* flag = &(group.ranks[r].*goal.flag);
  const auto begin = Clock::now();
  auto looked = begin;
  ShmState state = ShmState::kOk;
  __atomic_fetch_add(&flag->sleepers, 1, __ATOMIC_SEQ_CST);
  for (;;) {
    const uint32_t seen = shm_look(flag);
    if (shm_reached(seen, goal.value)) break;
    futex_sleep(&flag->value, seen);
    const auto now = Clock::now();
    if (now - looked < std::chrono::nanoseconds(kSleepNs) / 2) continue;
    looked = now;
    state = look_around(std::chrono::duration<double>(now - begin).count(), group, goal, patience);
    if (state == ShmState::kOk) continue;
    if (shm_reached(group, r, goal)) state = ShmState::kOk;
    break;
  }
  __atomic_fetch_sub(&flag->sleepers, 1, __ATOMIC_SEQ_CST);
  return state;
}

}  // namespace

bool process_alive(const ShmProcess& process) {
  char path[64], text[1024];
  std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(process.pid));
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return false;
  const size_t got = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[got] = 0;
  const char* rest = std::strrchr(text, ')');  // the name before may hold anything
  char state = 'X';
  long long start = -1;
  if (rest == nullptr) return false;
  constexpr const char* kFields = " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lld";
  const int found = std::sscanf(rest + 1, kFields, &state, &start);
  return found == 2 && state != 'Z' && state != 'X' && start == process.start;
}

void shm_post(ShmFlag* flag, uint32_t value) {
  __atomic_exchange_n(&flag->value, value, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&flag->sleepers, __ATOMIC_SEQ_CST) != 0) futex_wake_all(&flag->value);
}

bool shm_died_before(const ShmGroup& group, int r, const ShmGoal& goal) {
  if (shm_reached(group, r, goal) || process_alive((*group.processes)[r])) return false;
  return !shm_reached(group, r, goal);  // it may have got there just before it ended
}

ShmState shm_wait(const ShmGroup& group, int r, const ShmGoal& goal, const ShmPatience& patience) {
  for (int i = 0; i <= patience.spins; ++i) {
    if (shm_reached(group, r, goal)) return ShmState::kOk;
    cpu_pause();
  }
  for (int i = 0; i < patience.yields; ++i) {
    sched_yield();
    if (shm_reached(group, r, goal)) return ShmState::kOk;
  }
  return sleep_until(group, r, goal, patience);
}

}  // namespace megalite
