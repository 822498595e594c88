// All-gather and broadcast over NVLink by stores into the peers' memory: (W-1) times the shard on the wire.

#include "exchange.cuh"

namespace megalite {
namespace {

template <typename Raw>
__global__ void __launch_bounds__(kSymmThreads, 1)
    gather_kernel(const __grid_constant__ SymmTeam team, const Raw* shard,
                  Raw* out, int64_t num, int64_t piece) {
  Exchange exchange(team, static_cast<int>(blockIdx.x));
  Raw* const own = out + team.rank * num;
  const bool whole_own = aligned(own, kVector);
  for (int64_t begin = blockIdx.x * piece; begin < num; begin += gridDim.x * piece) {
    const int64_t count = begin + piece < num ? piece : num - begin;
    if (exchange.alive()) exchange.step();
    for_loaded(shard + begin, count, [&](int64_t i, uint4 value) {
      if (exchange.alive()) push(exchange, team, value, i * sizeof(Raw));
      if (own != shard) store_some(own + begin + i, value, count - i, whole_own);
    });
    const bool met = exchange.alive() && exchange.meet();
    for (int turn = 1; turn < team.size; ++turn) {
      const int peer = nth_peer(team, turn);
      Raw* const to = out + peer * num + begin;
      if (!met) {
        fill_nan(to, count);
        continue;
      }
      const Raw* const from = reinterpret_cast<const Raw*>(exchange.slot(team.rank, peer));
      const bool whole = aligned(to, kVector);
      for_loaded(from, count, [&](int64_t i, uint4 value) { store_some(to + i, value, count - i, whole); });
    }
  }
  exchange.close();
}

template <typename Raw>
__global__ void __launch_bounds__(kSymmThreads, 1)
    broadcast_kernel(const __grid_constant__ SymmTeam team, Raw* data, int64_t num,
                     int64_t piece, int root) {
  Exchange exchange(team, static_cast<int>(blockIdx.x));
  const bool whole = aligned(data, kVector), sends = team.rank == root;
  for (int64_t begin = blockIdx.x * piece; begin < num; begin += gridDim.x * piece) {
    const int64_t count = begin + piece < num ? piece : num - begin;
    if (exchange.alive()) {
      exchange.step();
      if (sends) {
        for_loaded(data + begin, count,
                   [&](int64_t i, uint4 value) { push(exchange, team, value, i * sizeof(Raw)); });
      }
    }
    const bool met = exchange.alive() && exchange.meet();
    if (sends) continue;
    if (!met) {
      fill_nan(data + begin, count);
      continue;
    }
    const Raw* const from = reinterpret_cast<const Raw*>(exchange.slot(team.rank, root));
    for_loaded(from, count, [&](int64_t i, uint4 value) { store_some(data + begin + i, value, count - i, whole); });
  }
  exchange.close();
}

}  // namespace

int symm_all_gather(const SymmTeam& team, const void* shard, void* out, int64_t num, int format, CUstream_st* stream) {
  if (!usable(team) || num < 0) return kInvalidValue;
  if (num == 0) return 0;
  return for_format(format, [&](auto form) {
    using Raw = typename Numbers<decltype(form)::value>::Raw;  // only its width counts
    const Pieces pieces = cut(num, kVector / sizeof(Raw), Exchange::slot_bytes(team));
    return MEGALITE_LAUNCH(gather_kernel<Raw>, pieces.grid, kSymmThreads, stream, team,
                           static_cast<const Raw*>(shard), static_cast<Raw*>(out), num, pieces.piece);
  });
}

int symm_broadcast(const SymmTeam& team, void* data, int64_t num, int root, int format, CUstream_st* stream) {
  if (!usable(team) || num < 0 || root < 0 || root >= team.size) return kInvalidValue;
  if (num == 0) return 0;
  return for_format(format, [&](auto form) {
    using Raw = typename Numbers<decltype(form)::value>::Raw;  // only its width counts
    const Pieces pieces = cut(num, kVector / sizeof(Raw), Exchange::slot_bytes(team));
    return MEGALITE_LAUNCH(broadcast_kernel<Raw>, pieces.grid, kSymmThreads, stream, team, static_cast<Raw*>(data),
                           num, pieces.piece, root);
  });
}

}  // namespace megalite
