// Flags and the shared memory channel for Python. Addresses of tensors come as integers; what they point at is the
// caller's business. Calls let other threads run, and answer signals while they wait.

#include "shm_bindings.h"

#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host_kernels.h"
#include "shm_channel.h"
#include "shm_flags.h"

namespace py = pybind11;

namespace megalite {
namespace {

using Processes = std::vector<std::pair<int64_t, int64_t>>;
using Answer = std::pair<int, std::vector<int>>;  // ShmState and the ranks that it is about

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

bool signal_raised() {
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

template <typename Work>
Answer call(const Work& work) {
  ShmEnd end;
  {
    py::gil_scoped_release release;
    end = work();
  }
  if (end.state == ShmState::kInterrupted) throw py::error_already_set();
  return {static_cast<int>(end.state), std::move(end.ranks)};
}

Element element_of(int code) {
  if (code < 0 || code >= kNumElements) throw std::invalid_argument("no such element type");
  return static_cast<Element>(code);
}

Reduce reduce_of(int code) {
  if (code < 0 || code >= kNumReduces) throw std::invalid_argument("no such reduction");
  return static_cast<Reduce>(code);
}

int64_t segment_bytes(int size, int64_t slot_bytes) {
  if (size < 2 || slot_bytes < size * int64_t{64} || slot_bytes % kLine)
    throw std::invalid_argument("slot_bytes must be a multiple of 128, with 64 bytes for each of at least 2 ranks");
  return ShmLayout{size, slot_bytes}.total_bytes();
}

// processes: (pid, start) of each rank; patience: spins, yields, timeout_s.
std::unique_ptr<ShmChannel> make_channel(uintptr_t segment, int rank, const Processes& processes,
                                         int64_t slot_bytes, int64_t one_shot_max,
                                         const std::tuple<int, int, double>& patience, uint32_t first_chunk, int simd) {
  segment_bytes(static_cast<int>(processes.size()), slot_bytes);  // checks
  if (rank < 0 || rank >= static_cast<int>(processes.size())) throw std::invalid_argument("no such rank");
  if (simd > best_simd()) throw std::invalid_argument("this machine has no such vector level");
  std::vector<ShmProcess> all;
  for (const auto& [pid, start] : processes) all.push_back({pid, start});
  const auto& [spins, yields, timeout_s] = patience;
  return std::make_unique<ShmChannel>(pointer<void>(segment), rank, std::move(all),
                                      ShmOptions{slot_bytes, one_shot_max, first_chunk, simd < 0 ? best_simd() : simd},
                                      ShmPatience{spins, yields, timeout_s, signal_raised});
}

void bind_channel(py::module_& m) {
  using C = ShmChannel;
  py::class_<C>(m, "ShmChannel")
      .def(py::init(&make_channel), py::arg("segment"), py::arg("rank"), py::arg("processes"), py::arg("slot_bytes"),
           py::arg("one_shot_max"), py::arg("patience"), py::arg("first_chunk") = 0, py::arg("simd") = -1)
      .def("barrier", [](C& c) { return call([&] { return c.barrier(); }); })
      .def("all_reduce",
           [](C& c, uintptr_t data, int64_t count, int element, int reduce) {
             return call(
                 [&] { return c.all_reduce(pointer<void>(data), count, element_of(element), reduce_of(reduce)); });
           })
      .def("reduce_scatter",
           [](C& c, uintptr_t out, uintptr_t full, int64_t count, int element) {
             return call([&] {
               return c.reduce_scatter(pointer<void>(out), pointer<const void>(full), count, element_of(element));
             });
           })
      .def("begin_reduce_scatter",
           [](C& c, uintptr_t out, uintptr_t full, int64_t count, int element) {
             return call([&] {
               return c.begin_reduce_scatter(pointer<void>(out), pointer<const void>(full), count, element_of(element));
             });
           })
      .def("finish_reduce_scatter", [](C& c) { return call([&] { return c.finish_reduce_scatter(); }); })
      .def("all_gather",
           [](C& c, uintptr_t out, uintptr_t shard, int64_t bytes) {
             return call([&] { return c.all_gather(pointer<void>(out), pointer<const void>(shard), bytes); });
           })
      .def("broadcast",
           [](C& c, uintptr_t data, int64_t bytes, int root) {
             return call([&] { return c.broadcast(pointer<void>(data), bytes, root); });
           })
      .def("fail", &C::fail)
      .def("failure", &C::failure);
}

}  // namespace

void bind_shm(py::module_& m) {
  m.def("flag_store", [](uintptr_t flag, int32_t value) { flag_store(pointer<int32_t>(flag), value); },
        py::arg("address"), py::arg("value"));
  m.def("flag_load", [](uintptr_t flag) { return flag_load(pointer<const int32_t>(flag)); }, py::arg("address"));
  m.def("flag_wait",
        [](uintptr_t flag, int32_t value, double timeout_s) {
          py::gil_scoped_release release;
          return flag_wait(pointer<const int32_t>(flag), value, timeout_s);
        },
        py::arg("address"), py::arg("value"), py::arg("timeout_s"));
  m.def("shm_segment_bytes", &segment_bytes, py::arg("size"), py::arg("slot_bytes"));
  bind_channel(m);
}

}  // namespace megalite
