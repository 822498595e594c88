// All-reduce over NVLink by stores into the peers' memory. One-shot: everybody gets everything and reduces all of it (one
// trip; (W-1) times the tensor on the wire). Two-shot: everybody reduces its part and hands it out (two trips; 2 (W-1)/W).
// Both add in fp32 in rank order, so all ranks hold the same bits, and the two agree to the bit.

#include "exchange.cuh"

namespace megalite {
namespace {

template <int kFormat>
__global__ void __launch_bounds__(kSymmThreads, 1)
    one_shot_kernel(const __grid_constant__ SymmTeam team, const typename Numbers<kFormat>::Raw* x,
                    typename Numbers<kFormat>::Raw* out, int64_t num, int64_t piece, int reduction) {
  using Raw = typename Numbers<kFormat>::Raw;
  constexpr int kLanes = Numbers<kFormat>::kLanes;
  Exchange exchange(team, static_cast<int>(blockIdx.x));
  const bool whole_x = aligned(x, kVector), whole_out = aligned(out, kVector);
  for (int64_t begin = blockIdx.x * piece; begin < num; begin += gridDim.x * piece) {
    const int64_t count = begin + piece < num ? piece : num - begin;
    if (exchange.alive()) {
      exchange.step();
      for_loaded(x + begin, count, [&](int64_t i, uint4 value) { push(exchange, team, value, i * sizeof(Raw)); });
    }
    if (!exchange.alive() || !exchange.meet()) {
      fill_nan(out + begin, count);
      continue;
    }
    for_vectors<kLanes>(count, [&](int64_t i) {
      const uint4 own = load_some(x + begin + i, count - i, whole_x);
      const uint4 sum = reduce_slots<kFormat>(exchange, team, own, i * sizeof(Raw), reduction);
      store_some(out + begin + i, sum, count - i, whole_out);
    });
  }
  exchange.close();
}

// What a block of the two-shot kernel works on; rank p's part is [p * part, p * part + part).
template <typename Raw>
struct Parts {
  const Raw* x;
  Raw* out;
  int64_t num, part;
  bool whole_x, whole_out;

  // Elements of rank p's part in [begin, begin + piece), none where the tensor is too short.
  __device__ int64_t count(int p, int64_t begin, int64_t piece) const {
    const int64_t first = p * part + begin, in_part = part - begin < piece ? part - begin : piece;
    return num - first < in_part ? (num > first ? num - first : 0) : in_part;
  }
};

template <typename Raw>
__device__ __forceinline__ void scatter_parts(const Exchange& exchange, const SymmTeam& team, const Parts<Raw>& parts,
                                              int64_t begin, int64_t piece) {
  for (int turn = 1; turn < team.size; ++turn) {
    const int peer = nth_peer(team, turn);
    const Raw* from = parts.x + peer * parts.part + begin;
    char* to = exchange.slot(peer, team.rank);
    for_loaded(from, parts.count(peer, begin, piece),
               [&](int64_t i, uint4 value) { *reinterpret_cast<uint4*>(to + i * sizeof(Raw)) = value; });
  }
}

// Sum the own part and hand it out at once: the buffer of the next step is free since this step's flags came.
template <int kFormat, typename Raw>
__device__ __forceinline__ void reduce_part(const Exchange& exchange, const SymmTeam& team, const Parts<Raw>& parts,
                                            int64_t begin, int64_t piece, int reduction) {
  const int64_t first = team.rank * parts.part + begin, count = parts.count(team.rank, begin, piece);
  for_vectors<Numbers<kFormat>::kLanes>(count, [&](int64_t i) {
    const uint4 own = load_some(parts.x + first + i, count - i, parts.whole_x);
    const uint4 sum = reduce_slots<kFormat>(exchange, team, own, i * sizeof(Raw), reduction);
    push(exchange, team, sum, i * sizeof(Raw), 1);
    store_some(parts.out + first + i, sum, count - i, parts.whole_out);
  });
}

template <typename Raw>
__device__ __forceinline__ void gather_parts(const Exchange& exchange, const SymmTeam& team, const Parts<Raw>& parts,
                                             int64_t begin, int64_t piece) {
  for (int turn = 1; turn < team.size; ++turn) {
    const int peer = nth_peer(team, turn);
    Raw* to = parts.out + peer * parts.part + begin;
    const Raw* from = reinterpret_cast<const Raw*>(exchange.slot(team.rank, peer));
    const int64_t count = parts.count(peer, begin, piece);
    for_loaded(from, count, [&](int64_t i, uint4 value) { store_some(to + i, value, count - i, parts.whole_out); });
  }
}

template <int kFormat>
__global__ void __launch_bounds__(kSymmThreads, 1)
    two_shot_kernel(const __grid_constant__ SymmTeam team, const typename Numbers<kFormat>::Raw* x,
                    typename Numbers<kFormat>::Raw* out, int64_t num, int64_t part, int64_t piece, int reduction) {
  using Raw = typename Numbers<kFormat>::Raw;
  Exchange exchange(team, static_cast<int>(blockIdx.x));
  const Parts<Raw> parts{x, out, num, part, aligned(x, kVector), aligned(out, kVector)};
  for (int64_t begin = blockIdx.x * piece; begin < part; begin += gridDim.x * piece) {
    if (exchange.alive()) {
      exchange.step();
      scatter_parts(exchange, team, parts, begin, piece);
      if (exchange.meet()) {
        reduce_part<kFormat>(exchange, team, parts, begin, piece, reduction);
        exchange.step();
        exchange.meet();
      }
    }
    if (exchange.alive()) {
      gather_parts(exchange, team, parts, begin, piece);
    } else {
      for (int p = 0; p < team.size; ++p) fill_nan(out + p * part + begin, parts.count(p, begin, piece));
    }
  }
  exchange.close();
}

}  // namespace

int symm_all_reduce_one_shot(const SymmTeam& team, const void* x, void* out, int64_t num, int format, int reduction,
                             CUstream_st* stream) {
  if (!usable(team) || num < 0) return kInvalidValue;
  if (num == 0) return 0;
  return for_format(format, [&](auto form) {
    constexpr int kFormat = decltype(form)::value;
    using Raw = typename Numbers<kFormat>::Raw;
    const Pieces pieces = cut(num, Numbers<kFormat>::kLanes, Exchange::slot_bytes(team));
    return MEGALITE_LAUNCH(one_shot_kernel<kFormat>, pieces.grid, kSymmThreads, stream, team,
                           static_cast<const Raw*>(x), static_cast<Raw*>(out), num, pieces.piece, reduction);
  });
}

int symm_all_reduce_two_shot(const SymmTeam& team, const void* x, void* out, int64_t num, int format, int reduction,
                             CUstream_st* stream) {
  if (!usable(team) || num < 0) return kInvalidValue;
  if (num == 0) return 0;
  return for_format(format, [&](auto form) {
    constexpr int kFormat = decltype(form)::value, kLanes = Numbers<kFormat>::kLanes;
    using Raw = typename Numbers<kFormat>::Raw;
    const int64_t each = (num + team.size - 1) / team.size, part = (each + kLanes - 1) / kLanes * kLanes;
    const Pieces pieces = cut(part, kLanes, Exchange::slot_bytes(team));
    return MEGALITE_LAUNCH(two_shot_kernel<kFormat>, pieces.grid, kSymmThreads, stream, team,
                           static_cast<const Raw*>(x), static_cast<Raw*>(out), num, part, pieces.piece, reduction);
  });
}

}  // namespace megalite
