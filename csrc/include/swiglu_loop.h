// SwiGLU of rows [begin, end); see each_target.h. With e = exp(-gate): sigmoid = 1 / (1 + e), and 1 - sigmoid is
// e * sigmoid, which does not cancel.

template <typename T>
void forward_rows(const Swiglu& op, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(op.gate_up) + row * op.stride;
    T* y = static_cast<T*>(op.out) + row * op.width;
    columns(op.width, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes g = load(gate + i, n), e = exponential(Lanes(0.0f) - g);
      store(g / (Lanes(1.0f) + e) * load(gate + op.width + i, n), y + i, n);
    });
  }
}

template <typename T>
void backward_rows(const Swiglu& op, int64_t begin, int64_t end) {
  const Lanes one = 1.0f, largest = 3.40282347e38f;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(op.gate_up) + row * op.stride;
    const T* dy = static_cast<const T*>(op.dy) + row * op.stride_dy;
    T* dgate = static_cast<T*>(op.out) + row * 2 * op.width;
    columns(op.width, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes g = load(gate + i, n), up = load(gate + op.width + i, n), grad = load(dy + i, n);
      const Lanes e = exponential(Lanes(0.0f) - g), sigmoid = one / (one + e);
      const Lanes silu = g * sigmoid, rest = at_most(largest, e) * sigmoid;  // infinity times 0 would be NaN
      store(grad * up * fma(silu, rest, sigmoid), dgate + i, n);
      store(grad * silu, dgate + op.width + i, n);
    });
  }
}

void swiglu_range(const Swiglu& op, bool bf16, int64_t begin, int64_t end) {
  if (op.dy) {
    bf16 ? backward_rows<Bf16>(op, begin, end) : backward_rows<float>(op, begin, end);
  } else {
    bf16 ? forward_rows<Bf16>(op, begin, end) : forward_rows<float>(op, begin, end);
  }
}
