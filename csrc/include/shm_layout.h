// What lies in a group's shared segment: a header, one line of flags per rank and kind, and two slots per rank.
//
// [Note: chunks and flags] A call moves its tensor in chunks; chunk c of the channel's life (counted over all calls,
// wraps) uses buffer c % 2 of every rank. Rank r is the only writer of its flags, which count chunks:
//   ready  r has written chunk c into its slot           -> c + 1
//   taken  r has read all it needs of the others' slots  -> c + 1
//   done   r has read the others' results of chunk c     -> c + 1
// Before writing chunk c into its slot a rank waits for taken >= c - 1 of all others (chunk c - 2 had the buffer), and
// before writing a result for done >= c - 1. All ranks count all flags alike in every kind of call.
// A reduce_scatter may pause behind its first chunks (those that it need not wait for), while its rank computes: to the
// others that is a slow rank.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megalite {

constexpr size_t kLine = 128;  // two cache lines: x86 fetches them in pairs

// One flag and who sleeps on it. `value` is a futex word.
struct alignas(kLine) ShmFlag {
  uint32_t value;
  uint32_t sleepers;
};

// What a rank is calling; must be the same on all ranks. There are two, as the next call may begin before all have
// looked.
struct alignas(kLine) ShmCall {
  int64_t number, kind, element, reduce, root, count;
};

struct ShmRank {
  ShmFlag ready, taken, done;
  ShmCall calls[2];
};

constexpr int kTextBytes = 1024;

// The first failure of the group, for all ranks to read: 0 none, 1 being written, 2 there.
struct alignas(kLine) ShmHeader {
  uint32_t failed;
  char text[kTextBytes];
};

// Sizes and addresses within the segment.
struct ShmLayout {
  int size;
  int64_t slot_bytes;  // of one buffer; a multiple of kLine

  int64_t result_bytes() const { return (slot_bytes / size + kLine) / kLine * kLine + kLine; }
  int64_t ranks_at() const { return sizeof(ShmHeader); }
  int64_t slots_at() const { return ranks_at() + size * sizeof(ShmRank); }
  int64_t results_at() const { return slots_at() + 2 * size * slot_bytes; }
  int64_t total_bytes() const { return results_at() + 2 * size * result_bytes(); }
  int64_t slot_at(int rank, uint32_t chunk) const { return slots_at() + (2 * rank + (chunk & 1)) * slot_bytes; }
  int64_t result_at(int rank, uint32_t chunk) const { return results_at() + (2 * rank + (chunk & 1)) * result_bytes(); }
};

}  // namespace megalite
