// The Python module (shm_bindings.cpp adds the shared memory parts): numpy arrays in, numpy arrays out, error codes to
// ValueError. Kernels take the addresses of tensors as integers; what they point at is the caller's business.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host.h"
#include "host_kernels.h"
#include "layer_kernels.h"
#include "shm_bindings.h"
#include "symm_bindings.h"
#ifdef MEGALITE_CUDA
#include "cuda_kernels.h"
#endif

namespace py = pybind11;

namespace {

template <typename T>
using In = py::array_t<T, py::array::c_style | py::array::forcecast>;

void check(int error) {
  static const char* const kText[] = {
      "ok",
      "a size is out of range",
      "order names a document that does not exist",
      "a document has a negative length",
      "the documents hold fewer tokens than the samples need",
  };
  if (error != megalite::kOk) throw std::invalid_argument(kText[error]);  // ValueError in Python
}

template <typename T>
void check_vector(const In<T>& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must have one dim");
}

py::array_t<int64_t> sample_index(const In<int32_t>& lengths, const In<int64_t>& order, int64_t seq_len) {
  check_vector(lengths, "lengths");
  check_vector(order, "order");
  if (seq_len < 1) throw std::invalid_argument("seq_len must be at least 1");
  int64_t tokens = 0;
  check(megalite::count_tokens(lengths.data(), lengths.size(), order.data(), order.size(), &tokens));
  const int64_t samples = megalite::num_samples(tokens, seq_len);
  if (samples == 0) check(megalite::kTooFewTokens);
  py::array_t<int64_t> out({samples + 1, int64_t{2}});
  int64_t* rows = out.mutable_data();
  int error = 0;
  {
    py::gil_scoped_release release;
    error = megalite::sample_index(lengths.data(), order.data(), order.size(), seq_len, samples, rows);
  }
  check(error);
  return out;
}

py::tuple blend_index(const In<double>& weights, int64_t num) {
  check_vector(weights, "weights");
  if (num < 0) throw std::invalid_argument("num must be at least 0");
  py::array_t<int16_t> dataset(num);
  py::array_t<int64_t> sample(num);
  check(megalite::blend_index(weights.data(), weights.size(), num, dataset.mutable_data(), sample.mutable_data()));
  return py::make_tuple(dataset, sample);
}

py::tuple philox_words(uint32_t key0, uint32_t key1, uint64_t start, int64_t num, uint64_t stream) {
  if (num < 0) throw std::invalid_argument("num must be at least 0");
  py::array_t<uint32_t> word0(num);
  py::array_t<uint32_t> word1(num);
  check(megalite::philox_words(key0, key1, stream, start, num, word0.mutable_data(), word1.mutable_data()));
  return py::make_tuple(word0, word1);
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// slices: (num, 6) addresses of main, grad, exp_avg, exp_avg_sq, copy (0 for none), and the number of elements.
std::vector<megalite::AdamSlice> adam_slices(const In<int64_t>& slices, const In<double>& decays) {
  if (slices.ndim() != 2 || slices.shape(1) != 6 || decays.ndim() != 1 || decays.shape(0) != slices.shape(0))
    throw std::invalid_argument("slices must be (num, 6) and decays (num,)");
  std::vector<megalite::AdamSlice> found;
  for (py::ssize_t i = 0; i < slices.shape(0); ++i) {
    const int64_t* row = slices.data(i, 0);
    if (row[5] < 0) throw std::invalid_argument("a slice has a negative number of elements");
    found.push_back({pointer<float>(row[0]), pointer<const float>(row[1]), pointer<float>(row[2]), pointer<float>(row[3]),
                     pointer<uint16_t>(row[4]), row[5], decays.at(i)});
  }
  return found;
}

megalite::AdamHyper adam_hyper(const py::tuple& numbers) {
  if (numbers.size() != 4) throw std::invalid_argument("hyper must be (lr, beta1, beta2, eps)");
  return {numbers[0].cast<double>(), numbers[1].cast<double>(), numbers[2].cast<double>(), numbers[3].cast<double>()};
}

int simd_or_best(int simd) { return simd < 0 ? megalite::best_simd() : simd; }

megalite::Run how(bool bf16, int threads, int simd) { return {bf16, threads, simd_or_best(simd)}; }

// Rows that may be of a larger tensor: address and stride.
using Rows = std::pair<uintptr_t, int64_t>;

// runs: (num, 6) rows of address, heads, strides of sample, position and head in elements, and whether to rotate.
void rope(const In<int64_t>& runs, uintptr_t out, uintptr_t cos, uintptr_t sin, const std::array<int64_t, 3>& sizes,
          float sign, bool bf16, int threads, int simd) {
  if (runs.ndim() != 2 || runs.shape(1) != 6) throw std::invalid_argument("runs must be (num, 6)");
  std::vector<megalite::HeadRun> heads;
  for (py::ssize_t i = 0; i < runs.shape(0); ++i) {
    const int64_t* row = runs.data(i, 0);
    heads.push_back({pointer<const void>(row[0]), row[1], row[2], row[3], row[4], row[5] != 0});
  }
  const auto [tokens, seq_len, half] = sizes;
  const megalite::Rope op{heads.data(), static_cast<int>(heads.size()), pointer<void>(out), pointer<const float>(cos),
                          pointer<const float>(sin), tokens, seq_len, half, sign};
  const py::gil_scoped_release release;
  check(megalite::rope_cpu(op, how(bf16, threads, simd)));
}

// qkv: (address, strides of sample, position and head); angles: cos and sin, or 0; dout: (address, stride), 0 for
// forward; sizes: samples, positions, q heads, kv heads, head dim.
void attention(const std::array<int64_t, 4>& qkv, const std::array<uintptr_t, 2>& angles, uintptr_t documents,
               Rows dout, const std::array<uintptr_t, 2>& outputs, const std::array<int64_t, 5>& sizes, float scale,
               bool bf16, int threads, int simd) {
  const auto [samples, seq_len, heads, kv_heads, head_dim] = sizes;
  const auto [log_sums, out] = outputs;
  const megalite::Attention op{
      pointer<const void>(qkv[0]), qkv[1], qkv[2], qkv[3], pointer<const float>(angles[0]),
      pointer<const float>(angles[1]), pointer<const int32_t>(documents), pointer<const void>(dout.first), dout.second,
      pointer<float>(log_sums), pointer<void>(out), samples, seq_len, heads, kv_heads, head_dim, scale};
  const py::gil_scoped_release release;
  check(megalite::attention_cpu(op, how(bf16, threads, simd)));
}

// dy is 0 for forward.
void swiglu(uintptr_t dy, int64_t stride_dy, uintptr_t gate_up, int64_t stride, uintptr_t out,
            const std::array<int64_t, 2>& sizes, bool bf16, int threads, int simd) {
  const auto [rows, width] = sizes;
  const megalite::Swiglu op{pointer<const void>(dy), pointer<const void>(gate_up), pointer<void>(out), rows, width,
                            stride_dy, stride};
  const py::gil_scoped_release release;
  check(megalite::swiglu_cpu(op, how(bf16, threads, simd)));
}

// residual and total are 0 where there is none.
void rmsnorm(Rows x, Rows residual, uintptr_t weight, const std::array<uintptr_t, 3>& outputs,
             const std::array<int64_t, 2>& sizes, float eps, bool bf16, int threads, int simd) {
  const auto [y, total, rstd] = outputs;
  const megalite::NormForward op{pointer<const void>(x.first), pointer<const void>(residual.first),
                                 pointer<const float>(weight), pointer<void>(y), pointer<void>(total),
                                 pointer<float>(rstd), sizes[0], sizes[1], x.second, residual.second, eps};
  const py::gil_scoped_release release;
  check(megalite::rmsnorm_cpu(op, how(bf16, threads, simd)));
}

void rmsnorm_backward(const std::array<Rows, 3>& inputs, uintptr_t weight, uintptr_t rstd,
                      const std::array<uintptr_t, 2>& outputs, const std::array<int64_t, 2>& sizes, bool bf16,
                      int threads, int simd) {
  const auto& [dy, dtotal, x] = inputs;
  const auto [dx, dweight] = outputs;
  const megalite::NormBackward op{
      pointer<const void>(dy.first), pointer<const void>(dtotal.first), pointer<const void>(x.first),
      pointer<const float>(weight), pointer<const float>(rstd), pointer<void>(dx),
      pointer<float>(dweight), sizes[0], sizes[1], dy.second, dtotal.second, x.second};
  const py::gil_scoped_release release;
  check(megalite::rmsnorm_backward_cpu(op, how(bf16, threads, simd)));
}

void adamw(const In<int64_t>& slices, const In<double>& decays, const py::tuple& hyper, int64_t step, float scale,
           int threads, int simd) {
  const std::vector<megalite::AdamSlice> all = adam_slices(slices, decays);
  const megalite::AdamHyper numbers = adam_hyper(hyper);
  int error = 0;
  {
    py::gil_scoped_release release;
    for (const megalite::AdamSlice& one : all)
      error = std::max(error, megalite::adamw_cpu(one, numbers, step, scale, threads, simd_or_best(simd)));
  }
  check(error);
}

double square_sum(uintptr_t grad, int64_t num, int threads, int simd) {
  double sum = 0.0;
  int error = 0;
  {
    py::gil_scoped_release release;
    error = megalite::square_sum_cpu(pointer<const float>(grad), num, &sum, threads, simd_or_best(simd));
  }
  check(error);
  return sum;
}

#ifdef MEGALITE_CUDA
void check_cuda(int error) {
  if (error) throw std::runtime_error(std::string("CUDA: ") + megalite::cuda_error_text(error));
}

void adamw_cuda(const In<int64_t>& slices, const In<double>& decays, const py::tuple& hyper, uintptr_t step,
                uintptr_t scale, uintptr_t stream) {
  const std::vector<megalite::AdamSlice> all = adam_slices(slices, decays);
  check_cuda(megalite::adamw_cuda(all.data(), static_cast<int>(all.size()), adam_hyper(hyper),
                                  pointer<const int64_t>(step), pointer<const float>(scale),
                                  pointer<CUstream_st>(stream)));
}

void square_sum_cuda(uintptr_t grad, int64_t num, uintptr_t scratch, uintptr_t sum, uintptr_t stream) {
  check_cuda(megalite::square_sum_cuda(pointer<const float>(grad), num, pointer<double>(scratch), pointer<double>(sum),
                                       pointer<CUstream_st>(stream)));
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("sample_index", &sample_index, py::arg("lengths"), py::arg("order"), py::arg("seq_len"));
  m.def("blend_index", &blend_index, py::arg("weights"), py::arg("num"));
  m.def("philox_words", &philox_words, py::arg("key0"), py::arg("key1"), py::arg("start"), py::arg("num"),
        py::arg("stream") = 0);
  m.def("simd_level", [] { return static_cast<int>(megalite::best_simd()); });
  m.def("rope", &rope, py::arg("runs"), py::arg("out"), py::arg("cos"), py::arg("sin"), py::arg("sizes"),
        py::arg("sign"), py::arg("bf16"), py::arg("threads"), py::arg("simd") = -1);
  m.def("attention", &attention, py::arg("qkv"), py::arg("angles"), py::arg("documents"), py::arg("dout"),
        py::arg("outputs"), py::arg("sizes"), py::arg("scale"), py::arg("bf16"), py::arg("threads"),
        py::arg("simd") = -1);
  m.def("swiglu", &swiglu, py::arg("dy"), py::arg("stride_dy"), py::arg("gate_up"), py::arg("stride"), py::arg("out"),
        py::arg("sizes"), py::arg("bf16"), py::arg("threads"), py::arg("simd") = -1);
  m.def("rmsnorm", &rmsnorm, py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("outputs"),
        py::arg("sizes"), py::arg("eps"), py::arg("bf16"), py::arg("threads"), py::arg("simd") = -1);
  m.def("rmsnorm_backward", &rmsnorm_backward, py::arg("inputs"), py::arg("weight"), py::arg("rstd"),
        py::arg("outputs"), py::arg("sizes"), py::arg("bf16"), py::arg("threads"), py::arg("simd") = -1);
  m.def("adamw", &adamw, py::arg("slices"), py::arg("decays"), py::arg("hyper"), py::arg("step"), py::arg("scale"),
        py::arg("threads"), py::arg("simd") = -1);
  m.def("square_sum", &square_sum, py::arg("grad"), py::arg("num"), py::arg("threads"), py::arg("simd") = -1);
  megalite::bind_shm(m);
  megalite::bind_symm(m);
#ifdef MEGALITE_CUDA
  m.attr("SQUARE_SUM_SCRATCH") = megalite::kSquareSumScratch;
  m.def("adamw_cuda", &adamw_cuda, py::arg("slices"), py::arg("decays"), py::arg("hyper"), py::arg("step"),
        py::arg("scale"), py::arg("stream"));
  m.def("square_sum_cuda", &square_sum_cuda, py::arg("grad"), py::arg("num"), py::arg("scratch"), py::arg("sum"),
        py::arg("stream"));
#endif
}
