// Collectives between the CPU ranks of one host over a shared segment. Every rank of the group makes one ShmChannel on
// the same segment of zeros (shm_layout.h) and calls the same collectives in the same order. Blocking, but for the
// first half of a reduce_scatter. Results are the same bits on all ranks and in all runs: sums are made in rank order,
// two-byte floats in fp32 with one rounding.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shm_layout.h"
#include "shm_reduce.h"
#include "shm_wait.h"

namespace megalite {

enum class ShmKind : int { kBarrier = 0, kAllReduce = 1, kReduceScatter = 2, kAllGather = 3, kBroadcast = 4 };

// How a call ended. `ranks` (of the group): who did not come, died, or called something else.
struct ShmEnd {
  ShmState state = ShmState::kOk;
  std::vector<int> ranks;
};

struct ShmOptions {
  int64_t slot_bytes;    // of one buffer, a multiple of kLine
  int64_t one_shot_max;  // all_reduce: tensors up to these bytes are read whole by every rank
  uint32_t first_chunk;  // where all counters start; not 0 only in tests of the wrap
  int simd;              // vector level of the sums
};

class ShmChannel {
 public:
  // `segment`: ShmLayout::total_bytes() of shared zeros, aligned to kLine, that outlive the channel.
  ShmChannel(void* segment, int rank, std::vector<ShmProcess> processes, const ShmOptions& options,
             ShmPatience patience);

  ShmEnd barrier();
  // In place. `count` elements.
  ShmEnd all_reduce(void* data, int64_t count, Element element, Reduce reduce);
  // `full`: size * count elements; `out`: count of them, outside of `full` or exactly this rank's place in it.
  ShmEnd reduce_scatter(void* out, const void* full, int64_t count, Element element);
  // The same in two halves. The first shows the others what fits into free slots and waits for nobody; the second does
  // the rest. In between this rank leaves `full` and `out` alone and makes no other call, which ends with kUnfinished.
  // Throws std::logic_error for a second half without a first.
  ShmEnd begin_reduce_scatter(void* out, const void* full, int64_t count, Element element);
  ShmEnd finish_reduce_scatter();
  // `shard`: `bytes`; `out`: size * bytes. `shard` may be this rank's place in `out`.
  ShmEnd all_gather(void* out, const void* shard, int64_t bytes);
  ShmEnd broadcast(void* data, int64_t bytes, int root);

  // Make every later call of every rank fail with this text, unless an earlier failure did.
  void fail(const std::string& text);
  // The group's first failure, or nothing.
  std::string failure() const;

 private:
  struct Call {
    ShmKind kind;
    int64_t element, reduce, root, count;
  };
  struct Part {
    int64_t at, bytes;
  };
  using Bytes = unsigned char;
  struct Scatter {  // between its halves
    Call call;
    Bytes* out;
    const Bytes* full;
    int64_t each, part, num_chunks, published;  // bytes of `out`; of a chunk, for each rank
  };

  ShmEnd one_shot(Bytes* data, int64_t count, Element element, Reduce reduce);
  ShmEnd two_shot(Bytes* data, int64_t count, Element element, Reduce reduce);
  template <typename Publish, typename Take>
  ShmEnd run(const Call& call, int64_t num_chunks, const Publish& publish, const Take& take);
  template <typename Publish>
  int64_t publish_free(int64_t num_chunks, const Publish& publish);
  template <typename Publish, typename Take>
  ShmEnd finish(const Call& call, int64_t num_chunks, int64_t published, const Publish& publish, const Take& take);
  void publish_scatter(const Scatter& scatter, int64_t c, uint32_t chunk) const;
  ShmEnd begin(const Call& call);
  bool reached(ShmFlag ShmRank::*flag, uint32_t value) const;
  ShmEnd await(ShmFlag ShmRank::*flag, uint32_t value) const;
  ShmEnd give_up(const ShmGroup& group, const ShmGoal& goal, ShmState state) const;
  ShmEnd compare(const Call& call) const;
  void post(ShmFlag ShmRank::*flag, uint32_t value) { shm_post(&(ranks_[rank_].*flag), value); }
  Bytes* slot(int rank, uint32_t chunk) const { return base_ + layout_.slot_at(rank, chunk); }
  Bytes* result(int rank, uint32_t chunk) const { return base_ + layout_.result_at(rank, chunk); }
  ShmCall* call_of(int rank) const { return &ranks_[rank].calls[calls_ & 1]; }

  const ShmLayout layout_;
  const int rank_;
  Bytes* const base_;
  ShmHeader* const header_;
  ShmRank* const ranks_;
  const std::vector<ShmProcess> processes_;
  const ShmOptions options_;
  const ShmPatience patience_;
  uint32_t chunks_;  // of all calls so far
  int64_t calls_ = 0;
  std::optional<Scatter> begun_;
};

}  // namespace megalite
