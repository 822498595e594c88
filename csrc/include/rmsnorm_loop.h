// RMSNorm of rows [begin, end); see each_target.h. A row is read twice, the second time from the nearest cache.

template <typename T>
void add_row(const T* a, const T* b, T* total, int64_t width) {
  columns(width, [&](int64_t i, int64_t n) MEGALITE_INLINE { store(load(a + i, n) + load(b + i, n), total + i, n); });
}

template <typename T>
void norm_rows(const NormForward& op, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(op.x) + row * op.stride_x;
    if (op.residual) {
      T* total = static_cast<T*>(op.total) + row * op.width;
      add_row(x, static_cast<const T*>(op.residual) + row * op.stride_residual, total, op.width);
      x = total;
    }
    Lanes squares = 0.0f;
    columns(op.width, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes value = load(x + i, n);
      squares = fma(value, value, squares);
    });
    const float rstd = 1.0f / sqrtf(sum(squares) / static_cast<float>(op.width) + op.eps);
    op.rstd[row] = rstd;
    T* y = static_cast<T*>(op.y) + row * op.width;
    columns(op.width, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      store(load(x + i, n) * rstd * load(op.weight + i, n), y + i, n);
    });
  }
}

void norm_range(const NormForward& op, bool bf16, int64_t begin, int64_t end) {
  bf16 ? norm_rows<Bf16>(op, begin, end) : norm_rows<float>(op, begin, end);
}

// Adds these rows' share of dweight to `partial` (width,).
template <typename T>
void norm_backward_rows(const NormBackward& op, float* partial, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* dy = static_cast<const T*>(op.dy) + row * op.stride_dy;
    const T* x = static_cast<const T*>(op.x) + row * op.stride_x;
    const T* dtotal = op.dtotal ? static_cast<const T*>(op.dtotal) + row * op.stride_dtotal : nullptr;
    T* dx = static_cast<T*>(op.dx) + row * op.width;
    const Lanes rstd = op.rstd[row];
    Lanes products = 0.0f;
    columns(op.width, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes scaled = load(dy + i, n) * (load(x + i, n) * rstd);
      store(load(partial + i, n) + scaled, partial + i, n);
      products = fma(scaled, load(op.weight + i, n), products);
    });
    const Lanes minus_mean = -(sum(products) / static_cast<float>(op.width));
    columns(op.width, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes normed = load(x + i, n) * rstd;
      const Lanes inner = fma(normed, minus_mean, load(dy + i, n) * load(op.weight + i, n));
      store(dtotal ? fma(inner, rstd, load(dtotal + i, n)) : inner * rstd, dx + i, n);
    });
  }
}

void norm_backward_range(const NormBackward& op, bool bf16, float* partial, int64_t begin, int64_t end) {
  bf16 ? norm_backward_rows<Bf16>(op, partial, begin, end) : norm_backward_rows<float>(op, partial, begin, end);
}
