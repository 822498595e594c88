// Which dataset each sample of a blend comes from: at k the one with the largest w_i * max(k, 1) - count_i, the lowest
// index on ties. The first n entries do not depend on how many follow. Same rule as Megatron-LM's blended dataset.

#include <vector>

#include "host.h"

namespace megalite {

int blend_index(const double* weights, int64_t num_datasets, int64_t num, int16_t* dataset, int64_t* sample) {
  if (num_datasets < 1 || num_datasets > 32767 || num < 0) return kBadArgument;
  std::vector<int64_t> count(num_datasets, 0);
  for (int64_t k = 0; k < num; ++k) {
    const double position = k > 0 ? static_cast<double>(k) : 1.0;
    int64_t best = 0;
    double largest = weights[0] * position - static_cast<double>(count[0]);
    for (int64_t i = 1; i < num_datasets; ++i) {
      const double lag = weights[i] * position - static_cast<double>(count[i]);
      if (lag > largest) {
        largest = lag;
        best = i;
      }
    }
    dataset[k] = static_cast<int16_t>(best);
    sample[k] = count[best]++;
  }
  return kOk;
}

}  // namespace megalite
