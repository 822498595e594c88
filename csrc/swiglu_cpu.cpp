// SwiGLU of a packed (gate, up) tensor, forward and backward in one pass each, with an exponential of its own.

#include <cmath>
#include <cstdint>

#include "host.h"
#include "host_kernels.h"
#include "layer_kernels.h"
#include "simd.h"

namespace megalite {

#define MEGALITE_LOOP "swiglu_loop.h"
#include "each_target.h"

int swiglu_cpu(const Swiglu& swiglu, const Run& run) {
  if (swiglu.rows < 0 || swiglu.width < 0 || !can_run(run.threads, run.simd)) return kBadArgument;
  const int parts = parts_for(swiglu.rows * swiglu.width * 2, run.threads);
  run_parts(parts, [&](int part) {
    MEGALITE_PICK(swiglu_range, run.simd)
    (swiglu, run.bf16, swiglu.rows * part / parts, swiglu.rows * (part + 1) / parts);
  });
  return kOk;
}

}  // namespace megalite
