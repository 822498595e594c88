// Causal attention of a packed tensor of q, k and v heads, forward and backward, with the rotary embedding in the same
// pass. Nothing of S x S is kept: backward computes the weights again from the logarithms of their sums.
// Reference: Dao, arXiv:2307.08691, section 3.1 (the gradients); without its online softmax, since a few whole rows of
// scores fit into the caches of a CPU.
//
// [Note: blocks and strips] A head's scores are made for kBlock rows at a time, within these for kStrip rows on the
// columns that a strip sees together, rounded to whole vectors. What one row must not see there is set to minus infinity
// before the weights are made, so that its weight is zero; columns behind are never read. Strips and the order of every
// sum are the same for all vector levels, the tiles of registers that make them are not.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "host.h"
#include "host_kernels.h"
#include "layer_kernels.h"
#include "simd.h"

namespace megalite {
namespace {

constexpr int64_t kVector = 16;  // floats; head dims are padded to whole ones
constexpr int64_t kStrip = 8;    // rows of a product that is made at once
constexpr int64_t kBlock = 64;   // rows whose scores are held; sequences are padded to whole ones

constexpr float kLog2E = 1.44269504f;  // weights are powers of two: scores carry this factor

constexpr int64_t whole(int64_t n, int64_t part) { return (n + part - 1) / part * part; }

int64_t packed_heads(const Attention& op) { return op.heads + 2 * op.kv_heads; }

// One thread's memory. A head's rows are (length, width), turned (width, length); rows of scores lie `stride` apart.
struct Scratch {
  int64_t length, width, stride;
  float *q, *k, *v, *k_turned, *v_turned, *dout, *dk, *dv;
  float *scores, *dscores, *mixed;  // kBlock rows of scores, and of a head
  int64_t* first;                   // (seq_len,): the first position that each one sees
};

// The memory of one thread, and where its parts are. Forward needs fewer of them.
class Memory {
 public:
  explicit Memory(const Attention& op) {
    at.length = whole(op.seq_len, kBlock), at.width = whole(op.head_dim, kVector);
    at.stride = at.length + kVector;  // not a power of two, whose rows would share few lines of the cache
    const int64_t head = at.length * at.width, rows = kBlock * at.stride;
    float** const heads[] = {&at.q, &at.k_turned, &at.v, &at.k, &at.v_turned, &at.dout, &at.dk, &at.dv};
    const int num_heads = op.dout ? 8 : 3;
    floats_.reset(new float[num_heads * head + (op.dout ? 2 : 1) * rows + kBlock * at.width + kVector]);
    first_.reset(new int64_t[op.seq_len]);
    float* next = floats_.get();
    while (reinterpret_cast<uintptr_t>(next) % (kVector * sizeof(float))) ++next;
    for (int i = 0; i < 8; ++i) *heads[i] = i < num_heads ? next + i * head : nullptr;
    next += num_heads * head;
    at.mixed = next;
    at.scores = next + kBlock * at.width;
    at.dscores = op.dout ? at.scores + rows : nullptr;
    at.first = first_.get();
  }

  Scratch at{};

 private:
  std::unique_ptr<float[]> floats_;
  std::unique_ptr<int64_t[]> first_;
};

// The start of the run of equal documents that each position lies in.
void find_first(const Attention& op, int64_t sample, int64_t* first) {
  const int32_t* documents = op.documents ? op.documents + sample * op.seq_len : nullptr;
  int64_t start = 0;
  for (int64_t s = 0; s < op.seq_len; ++s) {
    if (documents && s > 0 && documents[s] != documents[s - 1]) start = s;
    first[s] = start;
  }
}

}  // namespace

#define MEGALITE_LOOP "attention_loop.h"
#include "each_target.h"

int attention_cpu(const Attention& op, const Run& run) {
  if (op.samples < 0 || op.seq_len < 0 || op.head_dim < 1 || op.kv_heads < 1 || op.heads < 1) return kBadArgument;
  if (op.heads % op.kv_heads || (op.cos && op.head_dim % 2) || !op.cos != !op.sin) return kBadArgument;
  if (!can_run(run.threads, run.simd)) return kBadArgument;
  const int64_t units = op.samples * op.kv_heads;
  if (units == 0 || op.seq_len == 0) return kOk;
  const int64_t work = op.samples * op.heads * op.seq_len * (op.seq_len / 8 + op.head_dim);
  const int parts = static_cast<int>(std::min<int64_t>(units, parts_for(work, run.threads)));
  std::vector<Memory> memory;  // made here: an allocation that fails on another thread would end the process
  for (int part = 0; part < parts; ++part) memory.emplace_back(op);
  run_parts(parts, [&](int part) {
    MEGALITE_PICK(attention_range, run.simd)
    (op, run.bf16, memory[part].at, units * part / parts, units * (part + 1) / parts);
  });
  return kOk;
}

}  // namespace megalite
