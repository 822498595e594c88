// The rotation of tokens [begin, end); see each_target.h.

template <typename T>
void rotate_head(const T* from, T* to, const float* cos, const float* sin, const Rope& rope) {
  columns(rope.half, [&](int64_t i, int64_t n) MEGALITE_INLINE {
    const Lanes first = load(from + i, n), second = load(from + rope.half + i, n);
    const Lanes c = load(cos + i, n), s = load(sin + i, n) * rope.sign;
    store(fma(Lanes(0.0f) - second, s, first * c), to + i, n);
    store(fma(first, s, second * c), to + rope.half + i, n);
  });
}

template <typename T>
void rope_tokens(const Rope& rope, int64_t begin, int64_t end) {
  int64_t num_heads = 0;
  for (int i = 0; i < rope.num_runs; ++i) num_heads += rope.runs[i].heads;
  const int64_t size = 2 * rope.half;
  T* out = static_cast<T*>(rope.out) + begin * num_heads * size;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t sample = token / rope.seq_len, position = token % rope.seq_len;
    const float *cos = rope.cos + position * rope.half, *sin = rope.sin + position * rope.half;
    for (int i = 0; i < rope.num_runs; ++i) {
      const HeadRun& run = rope.runs[i];
      const T* from = static_cast<const T*>(run.data) + sample * run.stride_b + position * run.stride_s;
      for (int64_t head = 0; head < run.heads; ++head, from += run.stride_h, out += size) {
        if (run.rotated) {
          rotate_head(from, out, cos, sin, rope);
        } else {
          __builtin_memcpy(out, from, size * sizeof(T));
        }
      }
    }
  }
}

void rope_range(const Rope& rope, bool bf16, int64_t begin, int64_t end) {
  bf16 ? rope_tokens<Bf16>(rope, begin, end) : rope_tokens<float>(rope, begin, end);
}
