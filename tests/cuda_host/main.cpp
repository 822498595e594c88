// The optimizer's .cu files on host threads; arrays are raw files of a folder. LINE is that of a __syncthreads() to leave
// out, 0 for none.
//   LINE adamw FOLDER lr beta1 beta2 eps step scale num copies decay:offset:num ...
//   LINE square_sum FOLDER num offset

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "adamw.cu"
#include "grad_norm.cu"

namespace {

template <typename T>
std::vector<T> read(const std::string& path, size_t num) {
  std::vector<T> values(num);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(num * sizeof(T)));
  if (static_cast<size_t>(file.gcount()) != num * sizeof(T)) {
    std::cerr << path << " is too short\n";
    std::exit(2);
  }
  return values;
}

template <typename T>
void write(const std::string& path, const std::vector<T>& values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
}

int adamw(const std::string& folder, char** words, int num_words) {
  const megalite::AdamHyper hyper{std::atof(words[0]), std::atof(words[1]), std::atof(words[2]), std::atof(words[3])};
  const int64_t step = std::atoll(words[4]);
  const float scale = std::strtof(words[5], nullptr);
  const size_t num = static_cast<size_t>(std::atoll(words[6]));
  const bool copies = std::atoi(words[7]) != 0;
  auto main = read<float>(folder + "/main", num), grad = read<float>(folder + "/grad", num);
  auto exp_avg = read<float>(folder + "/exp_avg", num), exp_avg_sq = read<float>(folder + "/exp_avg_sq", num);
  std::vector<uint16_t> copy(num, 0xffff);
  std::vector<megalite::AdamSlice> slices;
  for (int i = 8; i < num_words; ++i) {
    double decay;
    long offset, length;
    if (std::sscanf(words[i], "%lf:%ld:%ld", &decay, &offset, &length) != 3) return 2;
    slices.push_back({main.data() + offset, grad.data() + offset, exp_avg.data() + offset, exp_avg_sq.data() + offset,
                      copies ? copy.data() + offset : nullptr, length, decay});
  }
  const int error = megalite::adamw_cuda(slices.data(), static_cast<int>(slices.size()), hyper, &step, &scale, nullptr);
  write(folder + "/main.out", main);
  write(folder + "/exp_avg.out", exp_avg);
  write(folder + "/exp_avg_sq.out", exp_avg_sq);
  write(folder + "/copy.out", copy);
  return error;
}

int square_sum(const std::string& folder, size_t num, size_t offset) {
  const auto grad = read<float>(folder + "/grad", num + offset);
  std::vector<double> scratch(megalite::kSquareSumScratch), sum(1);
  const int error =
      megalite::square_sum_cuda(grad.data() + offset, static_cast<int64_t>(num), scratch.data(), sum.data(), nullptr);
  write(folder + "/sum.out", sum);
  return error;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  emulator::dropped_line = std::atoi(argv[1]);
  const std::string command = argv[2], folder = argv[3];
  if (command == "adamw" && argc >= 12) return adamw(folder, argv + 4, argc - 4);
  if (command == "square_sum" && argc == 6) return square_sum(folder, std::atoll(argv[4]), std::atoll(argv[5]));
  return 2;
}
