// All-reduce through the switch (NVLink SHARP, sm_90): every rank puts its tensor into its buffer, an owner per part
// loads the sum of all buffers from the multicast address and stores it into all of them. (1 + 1/W) times the tensor on a
// rank's link, no matter how many ranks.

#include "exchange.cuh"

namespace megalite {
namespace {

// [Note: one buffer for both steps]
// Steps e and e + 1 use the buffer of e + 1: in e it takes the own tensor, which no peer writes to (the buffer was read
// for e - 1 by this block itself, and peers' sums for e - 1 came before their flags of e - 1); between the flags of e and
// of e + 1 the owners read and write it; then it is read, as buffers of step e + 1 are.
template <int kFormat>
__global__ void __launch_bounds__(kSymmThreads, 1)
    multimem_kernel(const __grid_constant__ SymmTeam team, const typename Numbers<kFormat>::Raw* x,
                    typename Numbers<kFormat>::Raw* out, int64_t num, int64_t piece) {
#ifdef MEGALITE_MULTIMEM
  using Raw = typename Numbers<kFormat>::Raw;
  constexpr int kLanes = Numbers<kFormat>::kLanes;
  Exchange exchange(team, static_cast<int>(blockIdx.x));
  const bool whole_out = aligned(out, kVector);
  for (int64_t begin = blockIdx.x * piece; begin < num; begin += gridDim.x * piece) {
    const int64_t count = begin + piece < num ? piece : num - begin;
    char* stage = nullptr;
    if (exchange.alive()) {
      exchange.step();
      stage = exchange.place(team.rank, 1);
      for_loaded(x + begin, count,
                 [&](int64_t i, uint4 value) { *reinterpret_cast<uint4*>(stage + i * sizeof(Raw)) = value; });
      if (exchange.meet()) {
        char* const all = exchange.multicast(1);
        const int64_t vectors = (count + kLanes - 1) / kLanes, each = (vectors + team.size - 1) / team.size;
        const int64_t first = team.rank * each, rest = vectors - first;
        for_vectors<1>(rest < each ? rest : each, [&](int64_t i) {
          const int64_t at = exchange.offset() + (first + i) * kVector;
          multimem_store(all, at, multimem_sum<kFormat>(all, at));
        });
        exchange.step();
        exchange.meet();
      }
    }
    if (exchange.alive()) {
      for_loaded(reinterpret_cast<const Raw*>(stage), count,
                 [&](int64_t i, uint4 value) { store_some(out + begin + i, value, count - i, whole_out); });
    } else {
      fill_nan(out + begin, count);
    }
  }
  exchange.close();
#endif
}

}  // namespace

int symm_all_reduce_multimem(const SymmTeam& team, const void* x, void* out, int64_t num, int format,
                             CUstream_st* stream) {
  if (!usable(team) || num < 0) return kInvalidValue;
  if (!team.multicast[0] || !team.multicast[1]) return kNotSupported;
  if (num == 0) return 0;
  return for_format(format, [&](auto form) {
    constexpr int kFormat = decltype(form)::value;
    using Raw = typename Numbers<kFormat>::Raw;
    const Pieces pieces = cut(num, Numbers<kFormat>::kLanes, Exchange::channel_bytes(team));
    return MEGALITE_LAUNCH(multimem_kernel<kFormat>, pieces.grid, kSymmThreads, stream, team,
                           static_cast<const Raw*>(x), static_cast<Raw*>(out), num, pieces.piece);
  });
}

}  // namespace megalite
