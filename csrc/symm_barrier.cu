// A barrier of all ranks of a team: one block, one flag per peer.

#include "exchange.cuh"

namespace megalite {
namespace {

__global__ void __launch_bounds__(kSymmThreads, 1) symm_barrier_kernel(const __grid_constant__ SymmTeam team) {
  Exchange exchange(team, kBarrierColumn);
  if (!exchange.alive()) return;
  exchange.step();
  exchange.meet();
  exchange.close();
}

}  // namespace

int symm_barrier(const SymmTeam& team, CUstream_st* stream) {
  if (!usable(team)) return kInvalidValue;
  return MEGALITE_LAUNCH(symm_barrier_kernel, 1u, kSymmThreads, stream, team);
}

}  // namespace megalite
