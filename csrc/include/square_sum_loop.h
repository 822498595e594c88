// Sum of squares of up to kBlock elements for the vector type `Lanes` (kLanes doubles) of the including region.
// Included once per target (see simd.h); it has no include guard on purpose. A square of an fp32 number is exact in
// fp64, and lane i always takes elements i, i + kLanes, ...: that is why all targets agree to the bit.

double block_sum(const float* grad, int64_t num) {
  Lanes lanes;
  const int64_t whole = num / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) lanes.add(grad + i);
  double sums[kLanes];
  lanes.store(sums);
  for (int64_t i = whole; i < num; ++i) sums[i - whole] += static_cast<double>(grad[i]) * grad[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}
