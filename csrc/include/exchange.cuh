// One step of every symmetric collective: a block writes into its peers' buffers, says so, and waits until they all did.
//
// [Note: two buffers and one flag]
// Block b of a rank talks to block b of every other rank only, through its own part of the buffers (a channel) and its own
// column of flags. Step e = 1, 2, ... (uint32, wraps) of a channel uses buffer e % 2:
//   write into the peers' buffers; barrier of the block; flag := e at every peer (release); wait for every peer's
//   flag >= e (acquire, signed difference); barrier of the block; read the own buffer.
// Buffer e % 2 of peer p is written again in step e + 2. Its writer has then seen p's flag >= e + 1, which p set behind a
// barrier that all its threads reached after reading for step e: a peer's flag of e + 1 is its word that it is done with
// e. So there is no second flag, no reset, and no step needs the previous call to have ended elsewhere. The epoch lies in
// device memory (the own row of flags), so that a captured graph counts on. A block waits for its namesakes only: since
// blocks start in order, one resident block per rank is enough. tests/protocols/ explores all interleavings of this.
#pragma once

#include <type_traits>

#include "formats.cuh"
#include "symm_kernels.h"

#ifndef MEGALITE_SYMM_THREADS
#define MEGALITE_SYMM_THREADS 512
#endif

namespace megalite {

constexpr int kSymmThreads = MEGALITE_SYMM_THREADS;
constexpr int kVector = 16;
static_assert(kSymmThreads % 32 == 0 && kSymmThreads >= kMaxTeam, "a thread for each peer");

class Exchange {
 public:
  // Uniform over the block: whether it may take part; no channel of a team that failed moves again.
  __device__ Exchange(const SymmTeam& team, int column)
      : team_(team), column_(column), offset_(column * channel_bytes(team)), slot_(slot_bytes(team)) {
    epoch_ = row(team.rank, team.rank)[column];
    const bool failed = threadIdx.x == 0 && load_acquire(row(team.rank, team.rank) + kFailedColumn) != 0;
    alive_ = !__syncthreads_or(failed);
  }

  __device__ bool alive() const { return alive_; }

  // Begin the next step.
  __device__ void step() { ++epoch_; }

  // Bytes of this channel in a buffer, and its part for one source.
  static __host__ __device__ int64_t channel_bytes(const SymmTeam& team) {
    return team.buffer_bytes / kChannels / kVector * kVector;
  }
  static __host__ __device__ int64_t slot_bytes(const SymmTeam& team) {
    return channel_bytes(team) / team.size / kVector * kVector;
  }

  // This channel in rank owner's buffer of the step that is `ahead` of the present one.
  __device__ char* place(int owner, int ahead = 0) const {
    return team_.buffers[(epoch_ + ahead) % 2][owner] + offset_;
  }
  __device__ int64_t offset() const { return offset_; }
  __device__ char* multicast(int ahead) const { return team_.multicast[(epoch_ + ahead) % 2]; }

  // Where `source` writes for `owner`.
  __device__ char* slot(int owner, int source, int ahead = 0) const {
    return place(owner, ahead) + source * slot_;
  }

  // Bytes from one source's slot to the next.
  __device__ int64_t stride() const { return slot_; }

  // Announce this step to all peers and wait for theirs; false when one did not come in time.
  __device__ bool meet() {
    __syncthreads();
    const int peer = static_cast<int>(threadIdx.x);
    bool late = false;
    if (peer < team_.size && peer != team_.rank) {
      store_release(row(peer, team_.rank) + column_, epoch_);
      late = !wait(peer);
    }
    alive_ = !__syncthreads_or(late);
    return alive_;
  }

  // Keep the epoch for the next call; behind the last meet().
  __device__ void close() const {
    if (threadIdx.x == 0) row(team_.rank, team_.rank)[column_] = epoch_;
  }

 private:
  // Rank owner's flags that rank writer sets.
  __device__ uint32_t* row(int owner, int writer) const {
    return team_.flags[owner] + static_cast<int64_t>(writer) * team_.row_flags;
  }

  __device__ bool wait(int peer) const {
    const uint32_t* flag = row(team_.rank, peer) + column_;
    uint32_t got = load_acquire(flag);
    if (static_cast<int32_t>(got - epoch_) >= 0) return true;
    const uint64_t began = now_ns();
    for (uint32_t looks = 1;; ++looks) {
      got = load_acquire(flag);
      if (static_cast<int32_t>(got - epoch_) >= 0) return true;
      if (looks % 64 == 0 && now_ns() - began > team_.timeout_ns) break;
      relax();
    }
    report(peer, got);
    return false;
  }

  __device__ void report(int peer, uint32_t got) const {
    if (!claim(row(team_.rank, team_.rank) + kFailedColumn)) return;
    team_.error[kErrorRank] = static_cast<uint32_t>(team_.rank);
    team_.error[kErrorBlock] = blockIdx.x;
    team_.error[kErrorPeer] = static_cast<uint32_t>(peer);
    team_.error[kErrorExpected] = epoch_;
    team_.error[kErrorGot] = got;
    store_release(team_.error + kErrorState, 2);
  }

  const SymmTeam& team_;
  const int column_;
  const int64_t offset_, slot_;
  uint32_t epoch_;
  bool alive_;
};

// Elements [0, num) shared out over the block: body(index of a vector's first element).
template <int kLanes, typename Body>
__device__ __forceinline__ void for_vectors(int64_t num, const Body& body) {
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kLanes; i < num; i += kSymmThreads * kLanes) body(i);
}

// The same for what lies in memory, with several loads in flight: store(index of the vector's first element, vector).
template <typename Raw, typename Store>
__device__ __forceinline__ void for_loaded(const Raw* from, int64_t num, const Store& store) {
  constexpr int kLanes = kVector / sizeof(Raw), kBatch = 4;
  constexpr int64_t kStride = kSymmThreads * kLanes;
  const bool whole = aligned(from, kVector);
  int64_t i = static_cast<int64_t>(threadIdx.x) * kLanes;
  if (whole) {
    for (; i + (kBatch - 1) * kStride + kLanes <= num; i += kBatch * kStride) {
      uint4 values[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) values[k] = *reinterpret_cast<const uint4*>(from + i + k * kStride);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) store(i + k * kStride, values[k]);
    }
  }
  for (; i < num; i += kStride) store(i, load_some(from + i, num - i, whole));
}

// The 16 bytes of all ranks `at` bytes into their slots as one, in rank order; `own` never went through a buffer.
template <int kFormat>
__device__ __forceinline__ uint4 reduce_slots(const Exchange& exchange, const SymmTeam& team, uint4 own, int64_t at,
                                              int reduction) {
  using Form = Numbers<kFormat>;
  const char* const slots = exchange.slot(team.rank, 0) + at;
  const int64_t stride = exchange.stride();
  float sum[Form::kLanes], next[Form::kLanes];
  Form::unpack(team.rank == 0 ? own : *reinterpret_cast<const uint4*>(slots), sum);
#pragma unroll 4
  for (int source = 1; source < team.size; ++source) {
    const bool mine = source == team.rank;
    Form::unpack(mine ? own : *reinterpret_cast<const uint4*>(slots + source * stride), next);
#pragma unroll
    for (int lane = 0; lane < Form::kLanes; ++lane) sum[lane] = reduce_two(sum[lane], next[lane], reduction);
  }
  return Form::pack(sum);
}

// The rank `turn` behind this one: all start with another peer, so that they spread over the links.
__device__ __forceinline__ int nth_peer(const SymmTeam& team, int turn) {
  const int peer = team.rank + turn;
  return peer < team.size ? peer : peer - team.size;
}

// Write 16 bytes into the slot of this rank at every peer.
__device__ __forceinline__ void push(const Exchange& exchange, const SymmTeam& team, uint4 value, int64_t at,
                                     int ahead = 0) {
  for (int turn = 1; turn < team.size; ++turn) {
    const int peer = nth_peer(team, turn);
    *reinterpret_cast<uint4*>(exchange.slot(peer, team.rank, ahead) + at) = value;
  }
}

// All bits set is NaN in every format.
template <typename Raw>
__device__ void fill_nan(Raw* out, int64_t num) {
  for_vectors<1>(num, [&](int64_t i) { out[i] = static_cast<Raw>(~0u); });
}

// How a call is cut: block b takes the pieces b, b + grid, ... of `piece` elements.
struct Pieces {
  unsigned grid;
  int64_t piece;
};

inline Pieces cut(int64_t num, int lanes, int64_t limit_bytes) {
  const int64_t vectors = (num + lanes - 1) / lanes, wanted = (vectors + kSymmThreads - 1) / kSymmThreads;
  const int64_t grid = wanted < kChannels ? wanted : kChannels;
  const int64_t each = (vectors + grid - 1) / grid, most = limit_bytes / kVector;
  return {static_cast<unsigned>(grid), (each < most ? each : most) * lanes};
}

inline bool usable(const SymmTeam& team) {
  return team.size >= 1 && team.size <= kMaxTeam && team.rank >= 0 && team.rank < team.size &&
         team.row_flags >= kFlagColumns && Exchange::slot_bytes(team) >= kVector;
}

// cudaErrorInvalidValue and cudaErrorNotSupported, which the host build has no header for.
constexpr int kInvalidValue = 1, kNotSupported = 801;

// call(integral constant) for a format that is known at run time only.
template <typename Call>
int for_format(int format, const Call& call) {
  switch (format) {
    case kFp32:
      return call(std::integral_constant<int, kFp32>{});
    case kBf16:
      return call(std::integral_constant<int, kBf16>{});
    case kFp16:
      return call(std::integral_constant<int, kFp16>{});
    default:
      return kInvalidValue;
  }
}

}  // namespace megalite
