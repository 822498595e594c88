// Collectives over a symmetric heap on the GPU: a team, device pointers and a stream in, a cudaError_t out (0 is
// success). They return at once. What a call moves is the same on all ranks of a team, and so is the order of calls; calls
// of one team run one after the other (one stream).
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace megalite {

// Ranks that share NVLink; the tables travel in the kernel's arguments.
constexpr int kMaxTeam = 16;
// Blocks of a grid at most: enough to fill the links, and few enough to leave SMs to a GEMM.
#ifndef MEGALITE_CHANNELS
#define MEGALITE_CHANNELS 36
#endif
constexpr int kChannels = MEGALITE_CHANNELS;

// Columns of a row of flags. Row s of a rank's flags is written by rank s: columns 0 .. kChannels - 1 hold the last epoch
// that the block of that number announced, and the own row what the own blocks have begun.
enum FlagColumn : int { kBarrierColumn = kChannels, kFailedColumn = kChannels + 1, kFlagColumns = kChannels + 2 };

// What is written into `error` when a peer does not come in time; the first word is 2 when the others are there.
enum ErrorWord : int { kErrorState, kErrorRank, kErrorBlock, kErrorPeer, kErrorExpected, kErrorGot, kErrorWords };

// A rank's view of its group: the same buffers and flags on all ranks, by their addresses here.
struct SymmTeam {
  int rank, size;
  int row_flags;                   // columns of a row of flags, kFlagColumns or more
  int64_t buffer_bytes;            // of each of the two buffers of a rank
  uint64_t timeout_ns;             // of one wait
  uint32_t* error;                 // (kErrorWords,) of pinned host memory, zero
  char* buffers[2][kMaxTeam];      // 16-byte aligned
  char* multicast[2];              // the buffers' multicast addresses, or null
  uint32_t* flags[kMaxTeam];       // (size, row_flags) of each rank
};

// From addresses in rank order, those of buffer 0 before those of buffer 1; multicast: two addresses or zeros.
inline SymmTeam make_team(int rank, int size, int row_flags, int64_t buffer_bytes, double timeout_s, int64_t error,
                          const int64_t* buffers, const int64_t* multicast, const int64_t* flags) {
  SymmTeam team{};
  team.rank = rank;
  team.size = size;
  team.row_flags = row_flags;
  team.buffer_bytes = buffer_bytes;
  team.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  team.error = reinterpret_cast<uint32_t*>(error);
  for (int b = 0; b < 2; ++b) {
    team.multicast[b] = reinterpret_cast<char*>(multicast[b]);
    for (int r = 0; r < size; ++r) team.buffers[b][r] = reinterpret_cast<char*>(buffers[b * size + r]);
  }
  for (int r = 0; r < size; ++r) team.flags[r] = reinterpret_cast<uint32_t*>(flags[r]);
  return team;
}

// format: 0 fp32, 1 bf16, 2 fp16. reduction: 0 sum, 1 max, 2 min. x may be out. All sums in fp32 in rank order with one
// rounding, so all ranks get the same bits; after a failure what was not received is NaN.
int symm_barrier(const SymmTeam& team, CUstream_st* stream);
int symm_all_reduce_one_shot(const SymmTeam& team, const void* x, void* out, int64_t num, int format, int reduction,
                             CUstream_st* stream);
int symm_all_reduce_two_shot(const SymmTeam& team, const void* x, void* out, int64_t num, int format, int reduction,
                             CUstream_st* stream);
// Sum only, sm_90 with multicast addresses; the switch adds in fp32 in its own order, once for all ranks.
int symm_all_reduce_multimem(const SymmTeam& team, const void* x, void* out, int64_t num, int format,
                             CUstream_st* stream);
// out (size * num) <- every rank's shard (num); shard may lie in its place in out.
int symm_all_gather(const SymmTeam& team, const void* shard, void* out, int64_t num, int format, CUstream_st* stream);
// out (num) <- this rank's part of the sum of every rank's full (size * num); out may lie in its place in full.
int symm_reduce_scatter(const SymmTeam& team, const void* full, void* out, int64_t num, int format,
                        CUstream_st* stream);
int symm_broadcast(const SymmTeam& team, void* data, int64_t num, int root, int format, CUstream_st* stream);

}  // namespace megalite
