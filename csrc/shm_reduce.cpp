// Sums over ranks with the vector level chosen at run time: see shm_reduce.h.

#include "shm_reduce.h"

#include <cstdint>
#include <cstring>

#include "host_kernels.h"
#include "simd.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors pass between inlined functions of one target only
#endif

namespace megalite {
namespace {

// fp16 by integer arithmetic, where the machine has no instruction for it.
float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
  uint32_t bits;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    if (exponent == 31 && mantissa) bits |= 0x400000u;  // a quiet NaN, as the instruction makes it
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and more
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits at the end, rounded to even
    float shifted;
    std::memcpy(&shifted, &magnitude, sizeof shifted);
    shifted += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &shifted, sizeof rounded);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u;  // may carry into infinity
  return static_cast<uint16_t>(sign | rounded >> 13);
}

namespace scalar {
constexpr int kBytes = 16;
struct Float16 {
  using Stored = uint16_t;
  typedef float Vector __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = 4;
  static Vector load(const Stored* p) {
    return Vector{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
  }
  static void store(Stored* p, const Vector& v) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(v[i]);
  }
};
#include "shm_reduce_loop.h"
}  // namespace scalar

#ifdef MEGALITE_X86
MEGALITE_TARGET_BEGIN("avx2,fma,f16c")  // every CPU with avx2 has f16c
namespace avx2 {
constexpr int kBytes = 32;
struct Float16 {
  using Stored = uint16_t;
  typedef float Vector __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = 8;
  static Vector load(const Stored* p) {
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(Stored* p, const Vector& v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
};
#include "shm_reduce_loop.h"
}  // namespace avx2
MEGALITE_TARGET_END

MEGALITE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace avx512 {
constexpr int kBytes = 64;
struct Float16 {
  using Stored = uint16_t;
  typedef float Vector __attribute__((vector_size(kBytes)));
  static constexpr int kLanes = 16;
  static Vector load(const Stored* p) {
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(Stored* p, const Vector& v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
};
#include "shm_reduce_loop.h"
}  // namespace avx512
MEGALITE_TARGET_END
#endif

}  // namespace

int64_t element_bytes(Element element) {
  constexpr int64_t kSizes[kNumElements] = {4, 8, 2, 2, 4, 8};
  return kSizes[static_cast<int>(element)];
}

ReduceLoop reduce_loop(Element element, Reduce reduce, int simd) {
#ifdef MEGALITE_X86
  if (simd == kAvx512) return avx512::loop_for(element, reduce);
  if (simd == kAvx2) return avx2::loop_for(element, reduce);
#endif
  (void)simd;
  return scalar::loop_for(element, reduce);
}

}  // namespace megalite
