// The hint to the core that this is a waiting loop.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megalite {

inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace megalite
