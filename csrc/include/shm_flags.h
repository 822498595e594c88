// Flags in memory that several processes or threads share: 32-bit epochs with one writer each, compared as a signed
// difference, so that they may wrap. A store releases what was written before it, a load acquires it.
#pragma once

#include <cstdint>

namespace megalite {

void flag_store(int32_t* flag, int32_t value);

int32_t flag_load(const int32_t* flag);

// Whether `value` was reached: flag - value >= 0, also past the wrap.
inline bool flag_reached(int32_t flag, int32_t value) {
  return static_cast<int32_t>(static_cast<uint32_t>(flag) - static_cast<uint32_t>(value)) >= 0;
}

// Wait until the flag reached `value`: spins, then yields the core, then sleeps in short steps. False after timeout_s.
bool flag_wait(const int32_t* flag, int32_t value, double timeout_s);

}  // namespace megalite
