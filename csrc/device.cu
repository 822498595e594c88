// What the bindings, which know no CUDA headers, need of the runtime.

#include <cuda_runtime.h>

#include "cuda_kernels.h"

namespace megalite {

const char* cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace megalite
