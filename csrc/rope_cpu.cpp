// Rotary embedding in one pass from heads of any strides into one packed tensor: forward from q, k, v as they lie in
// the projection's output, backward from the three gradients of the attention.

#include <cmath>
#include <cstdint>

#include "host.h"
#include "host_kernels.h"
#include "layer_kernels.h"
#include "simd.h"

namespace megalite {

#define MEGALITE_LOOP "rope_loop.h"
#include "each_target.h"

int rope_cpu(const Rope& rope, const Run& run) {
  if (rope.tokens < 0 || rope.seq_len < 1 || rope.half < 0 || !can_run(run.threads, run.simd)) return kBadArgument;
  int64_t num_heads = 0;
  for (int i = 0; i < rope.num_runs; ++i) {
    if (rope.runs[i].heads < 0) return kBadArgument;
    num_heads += rope.runs[i].heads;
  }
  const int parts = parts_for(rope.tokens * num_heads * rope.half * 2, run.threads);
  run_parts(parts, [&](int part) {
    MEGALITE_PICK(rope_range, run.simd)
    (rope, run.bf16, rope.tokens * part / parts, rope.tokens * (part + 1) / parts);
  });
  return kOk;
}

}  // namespace megalite
