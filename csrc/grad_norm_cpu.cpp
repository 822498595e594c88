// Sum of squares of a flat gradient, accumulated in fp64 in an order that depends on the number of elements only.

#include <cstdint>
#include <vector>

#include "host_kernels.h"
#include "simd.h"

namespace megalite {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kBlock = 1 << 14;  // one partial sum; blocks are added in order

namespace scalar {
struct Lanes {
  double sums[kLanes] = {};
  void add(const float* p) {
    for (int i = 0; i < kLanes; ++i) sums[i] += static_cast<double>(p[i]) * p[i];
  }
  void store(double* out) const {
    for (int i = 0; i < kLanes; ++i) out[i] = sums[i];
  }
};
#include "square_sum_loop.h"
}  // namespace scalar

#ifdef MEGALITE_X86
MEGALITE_TARGET_BEGIN("avx2,fma")
namespace avx2 {
struct Lanes {
  static constexpr int kNum = kLanes / 4;
  __m256d sums[kNum];
  Lanes() {
    for (__m256d& sum : sums) sum = _mm256_setzero_pd();
  }
  void add(const float* p) {
    for (int i = 0; i < kNum; ++i) {
      const __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(p + 4 * i));
      sums[i] = _mm256_fmadd_pd(x, x, sums[i]);
    }
  }
  void store(double* out) const {
    for (int i = 0; i < kNum; ++i) _mm256_storeu_pd(out + 4 * i, sums[i]);
  }
};
#include "square_sum_loop.h"
}  // namespace avx2
MEGALITE_TARGET_END

MEGALITE_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace avx512 {
struct Lanes {
  static constexpr int kNum = kLanes / 8;
  __m512d sums[kNum];
  Lanes() {
    for (__m512d& sum : sums) sum = _mm512_setzero_pd();
  }
  void add(const float* p) {
    for (int i = 0; i < kNum; ++i) {
      const __m512d x = _mm512_cvtps_pd(_mm256_loadu_ps(p + 8 * i));
      sums[i] = _mm512_fmadd_pd(x, x, sums[i]);
    }
  }
  void store(double* out) const {
    for (int i = 0; i < kNum; ++i) _mm512_storeu_pd(out + 8 * i, sums[i]);
  }
};
#include "square_sum_loop.h"
}  // namespace avx512
MEGALITE_TARGET_END
#endif

double block_sum(const float* grad, int64_t num, int simd) {
#ifdef MEGALITE_X86
  if (simd == kAvx512) return avx512::block_sum(grad, num);
  if (simd == kAvx2) return avx2::block_sum(grad, num);
#endif
  (void)simd;
  return scalar::block_sum(grad, num);
}

}  // namespace

int square_sum_cpu(const float* grad, int64_t num, double* sum, int threads, int simd) {
  if (num < 0 || threads < 1 || simd < kScalar || simd > best_simd()) return 1;
  const int64_t blocks = (num + kBlock - 1) / kBlock;
  std::vector<double> partial(blocks);
  const int parts = parts_for(num, threads);
  run_parts(parts, [&](int part) {
    for (int64_t b = blocks * part / parts; b < blocks * (part + 1) / parts; ++b) {
      const int64_t begin = b * kBlock, size = num - begin < kBlock ? num - begin : kBlock;
      partial[b] = block_sum(grad + begin, size, simd);
    }
  });
  *sum = 0.0;
  for (const double one : partial) *sum += one;
  return 0;
}

}  // namespace megalite
