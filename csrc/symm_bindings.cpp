// Symmetric collectives for Python: teams from addresses, tensors as addresses, error codes to RuntimeError. Without nvcc
// there is nothing here.

#include "symm_bindings.h"

#ifdef MEGALITE_CUDA
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_kernels.h"
#include "symm_kernels.h"
#endif

namespace megalite {

#ifdef MEGALITE_CUDA
namespace {

namespace py = pybind11;

SymmTeam team_of(int rank, int row_flags, int64_t buffer_bytes, double timeout_s, int64_t error,
                 const std::vector<int64_t>& buffers, const std::vector<int64_t>& multicast,
                 const std::vector<int64_t>& flags) {
  const auto size = static_cast<int>(flags.size());
  if (size < 1 || size > kMaxTeam || buffers.size() != 2 * flags.size() || multicast.size() != 2)
    throw std::invalid_argument("a team has 1 to 16 ranks, two buffers of each and two multicast addresses");
  return make_team(rank, size, row_flags, buffer_bytes, timeout_s, error, buffers.data(), multicast.data(),
                   flags.data());
}

void check(int error) {
  if (error) throw std::runtime_error(std::string("CUDA: ") + cuda_error_text(error));
}

template <typename T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void all_reduce(const SymmTeam& team, const std::string& kind, uintptr_t x, uintptr_t out, int64_t num, int format,
                int reduction, uintptr_t stream) {
  auto* const on = at<CUstream_st>(stream);
  if (kind == "one_shot") {
    check(symm_all_reduce_one_shot(team, at(x), at(out), num, format, reduction, on));
  } else if (kind == "two_shot") {
    check(symm_all_reduce_two_shot(team, at(x), at(out), num, format, reduction, on));
  } else if (kind == "multimem" && reduction == 0) {
    check(symm_all_reduce_multimem(team, at(x), at(out), num, format, on));
  } else {
    throw std::invalid_argument("kind must be one_shot, two_shot, or multimem for a sum");
  }
}

}  // namespace

void bind_symm(py::module_& m) {
  py::class_<SymmTeam>(m, "SymmTeam");
  m.attr("SYMM_FLAG_COLUMNS") = static_cast<int>(kFlagColumns);
  m.def("symm_team", &team_of, py::arg("rank"), py::arg("row_flags"), py::arg("buffer_bytes"), py::arg("timeout_s"),
        py::arg("error"), py::arg("buffers"), py::arg("multicast"), py::arg("flags"));
  m.def("symm_all_reduce", &all_reduce);
  m.def("symm_all_gather",
        [](const SymmTeam& team, uintptr_t shard, uintptr_t out, int64_t num, int format, uintptr_t stream) {
          check(symm_all_gather(team, at(shard), at(out), num, format, at<CUstream_st>(stream)));
        });
  m.def("symm_reduce_scatter",
        [](const SymmTeam& team, uintptr_t full, uintptr_t out, int64_t num, int format, uintptr_t stream) {
          check(symm_reduce_scatter(team, at(full), at(out), num, format, at<CUstream_st>(stream)));
        });
  m.def("symm_broadcast",
        [](const SymmTeam& team, uintptr_t data, int64_t num, int root, int format, uintptr_t stream) {
          check(symm_broadcast(team, at(data), num, root, format, at<CUstream_st>(stream)));
        });
  m.def("symm_barrier",
        [](const SymmTeam& team, uintptr_t stream) { check(symm_barrier(team, at<CUstream_st>(stream))); });
}
#else
void bind_symm(pybind11::module_&) {}
#endif

}  // namespace megalite
