// Reduce-scatter over NVLink: every rank stores each peer's part there, and the owner adds in fp32 in rank order.
// (W-1)/W of the tensor on the wire.

#include "exchange.cuh"

namespace megalite {
namespace {

template <int kFormat>
__global__ void __launch_bounds__(kSymmThreads, 1)
    scatter_kernel(const __grid_constant__ SymmTeam team, const typename Numbers<kFormat>::Raw* full,
                   typename Numbers<kFormat>::Raw* out, int64_t num, int64_t piece) {
  using Raw = typename Numbers<kFormat>::Raw;
  constexpr int kLanes = Numbers<kFormat>::kLanes;
  Exchange exchange(team, static_cast<int>(blockIdx.x));
  const Raw* const own = full + team.rank * num;
  const bool whole_own = aligned(own, kVector), whole_out = aligned(out, kVector);
  for (int64_t begin = blockIdx.x * piece; begin < num; begin += gridDim.x * piece) {
    const int64_t count = begin + piece < num ? piece : num - begin;
    if (exchange.alive()) {
      exchange.step();
      for (int turn = 1; turn < team.size; ++turn) {
        const int peer = nth_peer(team, turn);
        char* const to = exchange.slot(peer, team.rank);
        for_loaded(full + peer * num + begin, count,
                   [&](int64_t i, uint4 value) { *reinterpret_cast<uint4*>(to + i * sizeof(Raw)) = value; });
      }
    }
    if (!exchange.alive() || !exchange.meet()) {
      fill_nan(out + begin, count);
      continue;
    }
    for_vectors<kLanes>(count, [&](int64_t i) {
      const uint4 mine = load_some(own + begin + i, count - i, whole_own);
      const uint4 sum = reduce_slots<kFormat>(exchange, team, mine, i * sizeof(Raw), kSum);
      store_some(out + begin + i, sum, count - i, whole_out);
    });
  }
  exchange.close();
}

}  // namespace

int symm_reduce_scatter(const SymmTeam& team, const void* full, void* out, int64_t num, int format,
                        CUstream_st* stream) {
  if (!usable(team) || num < 0) return kInvalidValue;
  if (num == 0) return 0;
  return for_format(format, [&](auto form) {
    constexpr int kFormat = decltype(form)::value;
    using Raw = typename Numbers<kFormat>::Raw;
    const Pieces pieces = cut(num, Numbers<kFormat>::kLanes, Exchange::slot_bytes(team));
    return MEGALITE_LAUNCH(scatter_kernel<kFormat>, pieces.grid, kSymmThreads, stream, team,
                           static_cast<const Raw*>(full), static_cast<Raw*>(out), num, pieces.piece);
  });
}

}  // namespace megalite
