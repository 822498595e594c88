// AdamW in one pass over a flat shard: scale, moments, decay, update and the bf16 copy, 28 bytes per element (30 with
// the copy). The vector level is chosen at run time, so the build is portable.

#include <cstdint>

#include "host_kernels.h"
#include "simd.h"

namespace megalite {

namespace scalar {
#include "adamw_loop.h"
}  // namespace scalar

#ifdef MEGALITE_X86
#define MEGALITE_WIDE 1

MEGALITE_TARGET_BEGIN("avx2,fma")
namespace avx2 {

struct Wide {
  static constexpr int kWidth = 8;
  __m256 v;
  explicit Wide(float x) : v(_mm256_set1_ps(x)) {}
  Wide(__m256 x) : v(x) {}
  static Wide load(const float* p) { return _mm256_loadu_ps(p); }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  template <bool kStream>
  void store_bf16(uint16_t* p) const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i half = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
    const __m128i low = _mm256_castsi256_si128(packed);
    kStream ? _mm_stream_si128(reinterpret_cast<__m128i*>(p), low)
            : _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low);
  }
};
inline Wide operator+(Wide a, Wide b) { return _mm256_add_ps(a.v, b.v); }
inline Wide operator-(Wide a, Wide b) { return _mm256_sub_ps(a.v, b.v); }
inline Wide operator*(Wide a, Wide b) { return _mm256_mul_ps(a.v, b.v); }
inline Wide operator/(Wide a, Wide b) { return _mm256_div_ps(a.v, b.v); }
inline Wide fma(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
inline Wide sqrt(Wide a) { return _mm256_sqrt_ps(a.v); }

#include "adamw_loop.h"
}  // namespace avx2
MEGALITE_TARGET_END

MEGALITE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {

struct Wide {
  static constexpr int kWidth = 16;
  __m512 v;
  explicit Wide(float x) : v(_mm512_set1_ps(x)) {}
  Wide(__m512 x) : v(x) {}
  static Wide load(const float* p) { return _mm512_loadu_ps(p); }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  template <bool kStream>
  void store_bf16(uint16_t* p) const {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i half = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0));
    const __m256i packed = _mm512_cvtepi32_epi16(half);
    kStream ? _mm256_stream_si256(reinterpret_cast<__m256i*>(p), packed)
            : _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
  }
};
inline Wide operator+(Wide a, Wide b) { return _mm512_add_ps(a.v, b.v); }
inline Wide operator-(Wide a, Wide b) { return _mm512_sub_ps(a.v, b.v); }
inline Wide operator*(Wide a, Wide b) { return _mm512_mul_ps(a.v, b.v); }
inline Wide operator/(Wide a, Wide b) { return _mm512_div_ps(a.v, b.v); }
inline Wide fma(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
inline Wide sqrt(Wide a) { return _mm512_sqrt_ps(a.v); }

#include "adamw_loop.h"
}  // namespace avx512
MEGALITE_TARGET_END
#endif

Simd best_simd() {
#ifdef MEGALITE_X86
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2) return avx512 ? kAvx512 : kAvx2;
#endif
  return kScalar;
}

namespace {

using Update = void (*)(const AdamSlice&, const AdamTerms&, int64_t, int64_t);

Update update_for(int simd) {
#ifdef MEGALITE_X86
  if (simd == kAvx512) return avx512::update;
  if (simd == kAvx2) return avx2::update;
#endif
  (void)simd;
  return scalar::update;
}

}  // namespace

int adamw_cpu(const AdamSlice& slice, const AdamHyper& hyper, int64_t step, float scale, int threads, int simd) {
  if (slice.num < 0 || step < 1 || threads < 1 || simd < kScalar || simd > best_simd()) return 1;
  AdamTerms terms = adam_terms(hyper, step, scale);
  terms.keep = adam_keep(hyper, slice.weight_decay);
  const Update update = update_for(simd);
  const int parts = parts_for(slice.num, threads);
  const int64_t length = slice.num / parts / 64 * 64;  // whole cache lines, so that threads share few
  run_parts(parts, [&](int part) {
    update(slice, terms, part * length, part == parts - 1 ? slice.num : (part + 1) * length);
  });
  return 0;
}

}  // namespace megalite
