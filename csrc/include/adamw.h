// The arithmetic of AdamW that the CPU and CUDA kernels share, so that they give the same bits. Every operation is
// rounded once (IEEE; build with -ffp-contract=off on the host) and the order is fixed: an element's result does not
// depend on where it lies in a shard, on vector width or on threads.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define MEGALITE_BOTH __host__ __device__ __forceinline__
#else
#define MEGALITE_BOTH inline
#endif

namespace megalite {

// What a caller chooses.
struct AdamHyper {
  double lr, beta1, beta2, eps;
};

// Main params, gradient and moments of one run of elements with one weight decay; copy (bf16) may be null.
struct AdamSlice {
  float* main;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  uint16_t* copy;
  int64_t num;
  double weight_decay;
};

// The numbers of one update. With c = sqrt(1 - beta2^t) the textbook step lr / (1 - beta1^t) * m / (sqrt(v) / c + eps)
// is step_size * m / (sqrt(v) + eps) with c taken into step_size and eps: one division per element less.
struct AdamTerms {
  float scale, keep, grad1, beta2, grad2, step_size, eps;
};

struct AdamState {
  float main, exp_avg, exp_avg_sq;
};

// Products that the device compiler may not contract with a sum that follows.
MEGALITE_BOTH double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

MEGALITE_BOTH float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// base^exponent by multiplication only, so that host and device agree to the bit.
MEGALITE_BOTH double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base = product(base, base)) {
    if (exponent & 1) result = product(result, base);
  }
  return result;
}

// step counts from 1; scale multiplies the gradient; keep is set per slice, see adam_keep.
MEGALITE_BOTH AdamTerms adam_terms(const AdamHyper& hyper, int64_t step, float scale) {
  const double correction1 = 1.0 - power(hyper.beta1, step), correction2 = sqrt(1.0 - power(hyper.beta2, step));
  AdamTerms terms;
  terms.scale = scale;
  terms.keep = 1.0f;
  terms.grad1 = static_cast<float>(1.0 - hyper.beta1);
  terms.beta2 = static_cast<float>(hyper.beta2);
  terms.grad2 = static_cast<float>(1.0 - hyper.beta2);
  terms.step_size = static_cast<float>(hyper.lr / correction1 * correction2);
  terms.eps = static_cast<float>(hyper.eps * correction2);
  return terms;
}

// What decoupled decay leaves of a parameter.
MEGALITE_BOTH float adam_keep(const AdamHyper& hyper, double weight_decay) {
  return static_cast<float>(1.0 - product(hyper.lr, weight_decay));
}

// One element; the vector loops in adamw_loop.h do the same, lane by lane.
MEGALITE_BOTH void adam_update(AdamState& s, float grad, const AdamTerms& t) {
  grad = product(grad, t.scale);
  s.exp_avg = fmaf(t.grad1, grad - s.exp_avg, s.exp_avg);
  s.exp_avg_sq = fmaf(t.beta2, s.exp_avg_sq, (t.grad2 * grad) * grad);
  const float ratio = s.exp_avg / (sqrtf(s.exp_avg_sq) + t.eps);
  s.main = fmaf(-t.step_size, ratio, s.main * t.keep);
}

// Bits of an fp32 number -> bf16, round to nearest even; NaN becomes the quiet NaN 0x7fc0 (as in torch).
MEGALITE_BOTH uint16_t bf16_bits(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace megalite
