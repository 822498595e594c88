// Compile a region of code for more than the build's baseline; the caller checks at run time that the machine has it.
//   MEGALITE_TARGET_BEGIN("avx2,fma") ... MEGALITE_TARGET_END
// Code that is meant for several targets lies in a file that each region includes. Include system headers before.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define MEGALITE_X86 1
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_ps() and the like
#endif

#define MEGALITE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define MEGALITE_TARGET_BEGIN(names) \
  MEGALITE_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define MEGALITE_TARGET_END _Pragma("clang attribute pop")
#else
#define MEGALITE_TARGET_BEGIN(names) _Pragma("GCC push_options") MEGALITE_PRAGMA(GCC target(names))
#define MEGALITE_TARGET_END _Pragma("GCC pop_options")
#endif

// For a lambda's body that is called twice: with the whole width of a vector as a constant, and with the rest.
#define MEGALITE_INLINE __attribute__((always_inline))
