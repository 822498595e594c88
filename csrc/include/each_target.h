// Compile the file MEGALITE_LOOP, written in terms of lanes.h, for every target, in the namespaces scalar, avx2 and
// avx512. MEGALITE_PICK(f, simd) is the function f of a level that the machine has. Included once by a .cpp file,
// inside namespace megalite, after the system headers.

namespace {

struct Bf16 {
  uint16_t bits;
};

inline uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

#define MEGALITE_LEVEL 0
namespace scalar {
#include "lanes.h"
#include MEGALITE_LOOP
}  // namespace scalar
#undef MEGALITE_LEVEL

#ifdef MEGALITE_X86
#define MEGALITE_LEVEL 1
MEGALITE_TARGET_BEGIN("avx2,fma")
namespace avx2 {
#include "lanes.h"
#include MEGALITE_LOOP
}  // namespace avx2
MEGALITE_TARGET_END
#undef MEGALITE_LEVEL

#define MEGALITE_LEVEL 2
MEGALITE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
#include "lanes.h"
#include MEGALITE_LOOP
}  // namespace avx512
MEGALITE_TARGET_END
#undef MEGALITE_LEVEL

#define MEGALITE_PICK(f, simd) ((simd) == kAvx512 ? avx512::f : (simd) == kAvx2 ? avx2::f : scalar::f)
#else
#define MEGALITE_PICK(f, simd) (scalar::f)
#endif

}  // namespace
