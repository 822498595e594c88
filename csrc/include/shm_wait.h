// Waiting for a flag of another rank: spin, yield, then sleep on a futex that the writer wakes. Bounded, and while it
// sleeps it looks whether the others still live.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "shm_layout.h"

namespace megalite {

// kUnfinished: the call stands between the halves of another one of the same rank.
enum class ShmState : int {
  kOk = 0, kLate = 1, kDead = 2, kMismatch = 3, kFailed = 4, kUnfinished = 5, kInterrupted = 6
};

// A process, told from a later one with the same pid by its start.
struct ShmProcess {
  int64_t pid, start;
};

// Whether it runs: there, of that start, and no zombie.
bool process_alive(const ShmProcess& process);

// How this rank waits.
struct ShmPatience {
  int spins;         // looks before the core is given away
  int yields;        // times it is given away before sleeping
  double timeout_s;  // of one wait
  std::function<bool()> interrupted;  // asked now and then while sleeping
};

// What all ranks of a group wait for: one kind of flag to reach `value`.
struct ShmGoal {
  ShmFlag ShmRank::*flag;
  uint32_t value;
};

// The group as one of its ranks sees it.
struct ShmGroup {
  const ShmHeader* header;
  ShmRank* ranks;
  const std::vector<ShmProcess>* processes;
  int rank;
};

// Set a flag that only the caller writes, and wake who sleeps on it.
void shm_post(ShmFlag* flag, uint32_t value);

inline uint32_t shm_look(const ShmFlag* flag) { return __atomic_load_n(&flag->value, __ATOMIC_SEQ_CST); }

inline bool shm_reached(uint32_t flag, uint32_t value) { return static_cast<int32_t>(flag - value) >= 0; }

// Whether rank r of the group has got there.
inline bool shm_reached(const ShmGroup& group, int r, const ShmGoal& goal) {
  return shm_reached(shm_look(&(group.ranks[r].*goal.flag)), goal.value);
}

// Whether rank r ended before it got there.
bool shm_died_before(const ShmGroup& group, int r, const ShmGoal& goal);

// Wait until rank r has got there.
ShmState shm_wait(const ShmGroup& group, int r, const ShmGoal& goal, const ShmPatience& patience);

}  // namespace megalite
