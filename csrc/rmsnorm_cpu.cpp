// RMSNorm, with the residual add before it, forward and backward. The weight's gradient is summed in fp32 over blocks
// of rows, and these in order, so that it does not depend on the number of threads.

#include <cmath>
#include <cstdint>
#include <vector>

#include "host.h"
#include "host_kernels.h"
#include "layer_kernels.h"
#include "simd.h"

namespace megalite {

#define MEGALITE_LOOP "rmsnorm_loop.h"
#include "each_target.h"

namespace {

constexpr int64_t kBlock = 64;  // rows whose share of dweight is one partial sum

}  // namespace

int rmsnorm_cpu(const NormForward& norm, const Run& run) {
  if (norm.rows < 0 || norm.width < 0 || !norm.residual != !norm.total) return kBadArgument;
  if (!can_run(run.threads, run.simd)) return kBadArgument;
  const int parts = parts_for(norm.rows * norm.width, run.threads);
  run_parts(parts, [&](int part) {
    MEGALITE_PICK(norm_range, run.simd)
    (norm, run.bf16, norm.rows * part / parts, norm.rows * (part + 1) / parts);
  });
  return kOk;
}

int rmsnorm_backward_cpu(const NormBackward& norm, const Run& run) {
  if (norm.rows < 0 || norm.width < 0 || !can_run(run.threads, run.simd)) return kBadArgument;
  const int64_t blocks = (norm.rows + kBlock - 1) / kBlock;
  std::vector<float> partials(blocks * norm.width);
  const int parts = parts_for(norm.rows * norm.width * 2, run.threads);
  run_parts(parts, [&](int part) {
    for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
      const int64_t begin = block * kBlock, end = begin + kBlock < norm.rows ? begin + kBlock : norm.rows;
      MEGALITE_PICK(norm_backward_range, run.simd)
      (norm, run.bf16, partials.data() + block * norm.width, begin, end);
    }
  });
  for (int64_t i = 0; i < norm.width; ++i) norm.dweight[i] = 0.0f;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < norm.width; ++i) norm.dweight[i] += partials[block * norm.width + i];
  }
  return kOk;
}

}  // namespace megalite
