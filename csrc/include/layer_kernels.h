// Kernels of a model's layers on the host, in fp32 or bf16 with fp32 inside. Addresses and sizes in, an error code out;
// the caller owns all memory and outputs are written whole. Strides count elements; a row's columns are contiguous.
// Results have the same bits for every level of vector instructions and every number of threads.
#pragma once

#include <cstdint>

namespace megalite {

// How to run: `bf16` is the dtype of activations (else fp32), `simd` a level of host_kernels.h.
struct Run {
  bool bf16;
  int threads, simd;
};

// Heads of every token of (B, S, heads, H), to be rotated or copied.
struct HeadRun {
  const void* data;
  int64_t heads, stride_b, stride_s, stride_h;
  bool rotated;
};

// The heads of all runs side by side, into out (tokens, sum of heads, 2 * half); cos and sin are (seq_len, half), and
// `sign` is 1 to rotate and -1 to turn back.
struct Rope {
  const HeadRun* runs;
  int num_runs;
  void* out;
  const float* cos;
  const float* sin;
  int64_t tokens, seq_len, half;
  float sign;
};
int rope_cpu(const Rope& rope, const Run& run);

// Causal attention of (samples, seq_len, heads + 2 * kv_heads, head_dim): q, then k, then v heads, strides in elements.
// With cos and sin, (seq_len, head_dim / 2) each, q and k are rotated first. With documents, (samples, seq_len), whose
// equal numbers stand together, a position sees its own document only.
// Forward, with dout null: out (samples, seq_len, heads, head_dim), and log_sums (samples, heads, seq_len), logarithms to
// base 2 of the sums of exp(scores). Backward, from log_sums and dout, whose tokens lie stride_dout apart: out is the
// gradient of the packed tensor, of its shape.
struct Attention {
  const void* qkv;
  int64_t stride_b, stride_s, stride_h;
  const float* cos;
  const float* sin;
  const int32_t* documents;
  const void* dout;
  int64_t stride_dout;
  float* log_sums;
  void* out;
  int64_t samples, seq_len, heads, kv_heads, head_dim;
  float scale;
};
int attention_cpu(const Attention& attention, const Run& run);

// gate_up has rows of 2 * width. Forward, with dy null: out (rows, width). Backward: out (rows, 2 * width).
struct Swiglu {
  const void* dy;
  const void* gate_up;
  void* out;
  int64_t rows, width, stride_dy, stride;
};
int swiglu_cpu(const Swiglu& swiglu, const Run& run);

// y and rstd (rows,) of x, or of x + residual, which goes to `total` then; residual and total may be null.
struct NormForward {
  const void* x;
  const void* residual;
  const float* weight;
  void* y;
  void* total;
  float* rstd;
  int64_t rows, width, stride_x, stride_residual;
  float eps;
};
int rmsnorm_cpu(const NormForward& norm, const Run& run);

// dx, plus dtotal unless it is null, and dweight (width,).
struct NormBackward {
  const void* dy;
  const void* dtotal;
  const void* x;
  const float* weight;
  const float* rstd;
  void* dx;
  float* dweight;
  int64_t rows, width, stride_dy, stride_dtotal, stride_x;
};
int rmsnorm_backward_cpu(const NormBackward& norm, const Run& run);

}  // namespace megalite
