// The only Python-facing file: numpy arrays in, numpy arrays out, error codes to ValueError. One line per function.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

#include "host.h"

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("sample_index", &sample_index, py::arg("lengths"), py::arg("order"), py::arg("seq_len"));
  m.def("blend_index", &blend_index, py::arg("weights"), py::arg("num"));
  m.def("philox_words", &philox_words, py::arg("key0"), py::arg("key1"), py::arg("start"), py::arg("num"),
        py::arg("stream") = 0);
}
