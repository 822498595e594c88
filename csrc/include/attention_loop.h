// Causal attention of sequences' kv heads [begin, end); see each_target.h and [Note: blocks and strips] in
// attention_cpu.cpp. Head dims are padded with zeros to whole vectors and sequences to whole tiles, so products have no
// rests.

// A tile of a product that stays in registers: rows by vectors.
constexpr int kTileRows = MEGALITE_LEVEL == 2 ? 8 : 4;
constexpr int kTileVectors = MEGALITE_LEVEL == 2 ? 3 : 1;

// c (R, 16 * C) = a b, plus c if `add`: a is (R, num) of strides `row` and `col`, b is (num, 16 * C). Terms are added in
// their order, whatever the tile.
template <int R, int C>
void tile(const float* a, int64_t row, int64_t col, const float* b, int64_t stride_b, int64_t num, float* c,
          int64_t stride_c, bool add) {
  Lanes sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int i = 0; i < C; ++i) sums[r][i] = add ? load(c + r * stride_c + i * kLanes) : Lanes(0.0f);
  }
  for (int64_t k = 0; k < num; ++k) {
    Lanes right[C];
#pragma GCC unroll 3
    for (int i = 0; i < C; ++i) right[i] = load(b + k * stride_b + i * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Lanes left = a[r * row + k * col];
#pragma GCC unroll 3
      for (int i = 0; i < C; ++i) sums[r][i] = fma(left, right[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int i = 0; i < C; ++i) store(sums[r][i], c + r * stride_c + i * kLanes);
  }
}

// As `tile` for kStrip rows and `width` columns, whole vectors.
inline void strip(const float* a, int64_t row, int64_t col, const float* b, int64_t stride_b, int64_t num, float* c,
                  int64_t stride_c, int64_t width, bool add) {
  constexpr int64_t kWide = kTileVectors * kLanes;
  for (int r = 0; r < kStrip; r += kTileRows, a += kTileRows * row, c += kTileRows * stride_c) {
    int64_t i = 0;
    for (; i + kWide <= width; i += kWide)
      tile<kTileRows, kTileVectors>(a, row, col, b + i, stride_b, num, c + i, stride_c, add);
    if (i + 2 * kLanes <= width) {
      tile<kTileRows, kTileVectors == 3 ? 2 : 1>(a, row, col, b + i, stride_b, num, c + i, stride_c, add);
      i += 2 * kLanes;
    }
    if (i < width) tile<kTileRows, 1>(a, row, col, b + i, stride_b, num, c + i, stride_c, add);
  }
}

// Heads as they lie in the packed tensor, or of a gradient.
template <typename T>
struct Tokens {
  T* data;
  int64_t stride;
};

// Rows of a head lie far from each other, so the CPU does not fetch the next ones by itself.
constexpr int64_t kAhead = 8;

template <int Write, typename T>
void fetch_ahead(const T* row, int64_t stride, int64_t size) {
  const char* next = reinterpret_cast<const char*>(row + kAhead * stride);
  for (int64_t i = 0; i < size * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(next + i, Write);
}

// One head of a sequence, rotated if asked for and times `scale`, into rows of at.width floats; zeros around it.
template <typename T>
void unpack(const Attention& op, const Scratch& at, Tokens<const T> from, bool rotated, float scale, float* to) {
  const int64_t size = op.head_dim, width = at.width, half = size / 2;
  for (int64_t s = 0; s < at.length; ++s, to += width) {
    for (int64_t i = s < op.seq_len ? size / kLanes * kLanes : 0; i < width; i += kLanes) store(Lanes(0.0f), to + i);
    if (s >= op.seq_len) continue;
    const T* x = from.data + s * from.stride;
    fetch_ahead<0>(x, from.stride, size);
    if (!rotated) {
      columns(size, [&](int64_t i, int64_t n) MEGALITE_INLINE { store(load(x + i, n) * scale, to + i, n); });
      continue;
    }
    const float *cos = op.cos + s * half, *sin = op.sin + s * half;
    columns(half, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes first = load(x + i, n), second = load(x + half + i, n), c = load(cos + i, n), d = load(sin + i, n);
      store(fma(Lanes(0.0f) - second, d, first * c) * scale, to + i, n);
      store(fma(first, d, second * c) * scale, to + half + i, n);
    });
  }
}

// Rows of gradients back into the packed tensor, times `scale` and turned back.
template <typename T>
void pack(const Attention& op, const Scratch& at, const float* from, int64_t begin, int64_t end, bool rotated,
          float scale, Tokens<T> to) {
  const int64_t half = op.head_dim / 2;
  for (int64_t s = begin; s < end; ++s, from += at.width) {
    T* x = to.data + s * to.stride;
    fetch_ahead<1>(x, to.stride, op.head_dim);
    if (!rotated) {
      columns(op.head_dim, [&](int64_t i, int64_t n) MEGALITE_INLINE { store(load(from + i, n) * scale, x + i, n); });
      continue;
    }
    const float *cos = op.cos + s * half, *sin = op.sin + s * half;
    columns(half, [&](int64_t i, int64_t n) MEGALITE_INLINE {
      const Lanes first = load(from + i, n), second = load(from + half + i, n);
      const Lanes c = load(cos + i, n), d = load(sin + i, n);
      store(fma(second, d, first * c) * scale, x + i, n);
      store(fma(Lanes(0.0f) - first, d, second * c) * scale, x + half + i, n);
    });
  }
}

// (rows, width) -> (width, rows), both whole vectors.
inline void transpose(const float* from, int64_t rows, int64_t width, float* to) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    for (int64_t i = 0; i < width; ++i) {
      float* out = to + i * rows + row;
      for (int64_t j = 0; j < kLanes; ++j) out[j] = from[(row + j) * width + i];
    }
  }
}

// The columns [low, high) that rows [s, s + num) see, in whole vectors.
struct Span {
  int64_t low, high;
};

inline Span span(const Scratch& at, int64_t s, int64_t num) {
  return {at.first[s] / kLanes * kLanes, whole(s + num, kLanes)};
}

inline void clear(float* row, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; ++j) row[j] = 0.0f;
}

// a (kBlock, width) times a turned head: the columns of `block`, as far as a strip sees them. The columns of a tile stay
// in the nearest cache while the strips pass.
inline void times_turned(const Scratch& at, const float* a, const float* turned, int64_t s, const Span& block, float* c) {
  constexpr int64_t kWide = 3 * kLanes;
  for (int64_t j = block.low; j < block.high; j += kWide) {
    for (int64_t r = 0; r < kBlock; r += kStrip) {
      const int64_t end = whole(s + r + kStrip, kLanes), width = (end < j + kWide ? end : j + kWide) - j;
      if (width > 0)
        strip(a + r * at.width, at.width, 1, turned + j, at.length, at.width, c + r * at.stride + j, at.stride, width,
              false);
    }
  }
}

// c (kBlock, width) = scores times a head's rows, likewise; rows are taken kDeep at a time.
inline void times_rows(const Scratch& at, const float* scores, const float* rows, int64_t s, const Span& block, float* c) {
  constexpr int64_t kDeep = 128;
  for (int64_t j = block.low; j < block.high; j += kDeep) {
    for (int64_t r = 0; r < kBlock; r += kStrip) {
      const int64_t end = s + r + kStrip, num = (end < j + kDeep ? end : j + kDeep) - j;
      if (num > 0)
        strip(scores + r * at.stride + j, at.stride, 1, rows + j * at.width, at.width, num, c + r * at.width, at.width,
              at.width, j > block.low);
    }
  }
}

// Hides what position s must not see in its first and last vector, NaN too: returns the vectors that it sees. A NaN that
// it does see becomes an infinity, of which weights are NaN.
inline Span hide(float* scores, int64_t first, int64_t s) {
  static constexpr float kInf = INFINITY;
  static constexpr float kLimits[3 * kLanes] = {-kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf,
                                                -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, kInf,  kInf,  kInf,  kInf,
                                                kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,  kInf,
                                                kInf,  kInf,  -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf,
                                                -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf};
  const Span seen{first / kLanes * kLanes, whole(s + 1, kLanes)};
  float *front = scores + seen.low, *back = scores + seen.high - kLanes;
  store(at_most(load(front), load(kLimits + kLanes - (first - seen.low))), front);
  store(at_most(load(back), load(kLimits + kLanes + (seen.high - 1 - s))), back);
  return seen;
}

// Scores -> 2^(scores - their maximum), of which it returns the sum.
inline float weigh(float* scores, const Span& seen, float* maximum) {
  Lanes most = -INFINITY, total = 0.0f;
  for (int64_t j = seen.low; j < seen.high; j += kLanes) most = at_least(most, load(scores + j));
  *maximum = largest(most);
  for (int64_t j = seen.low; j < seen.high; j += kLanes) {
    const Lanes weight = power(load(scores + j) - *maximum);
    store(weight, scores + j);
    total = total + weight;
  }
  return sum(total);
}

// Scores -> weights, their gradients -> the scores', in place.
inline void differentiate(float* scores, float* grads, const Span& seen, float log_sum) {
  Lanes products = 0.0f;
  for (int64_t j = seen.low; j < seen.high; j += kLanes) {
    const Lanes weight = power(load(scores + j) - log_sum);
    store(weight, scores + j);
    products = fma(weight, load(grads + j), products);
  }
  const Lanes mean = sum(products);
  for (int64_t j = seen.low; j < seen.high; j += kLanes) store(load(scores + j) * (load(grads + j) - mean), grads + j);
}

template <typename T>
Tokens<const T> head(const Attention& op, int64_t sample, int64_t index) {
  return {static_cast<const T*>(op.qkv) + sample * op.stride_b + index * op.stride_h, op.stride_s};
}

template <typename T>
void forward_head(const Attention& op, int64_t sample, int64_t index, const Scratch& at) {
  const int64_t token = op.heads * op.head_dim;
  T* out = static_cast<T*>(op.out) + sample * op.seq_len * token + index * op.head_dim;
  float* log_sums = op.log_sums + (sample * op.heads + index) * op.seq_len;
  unpack(op, at, head<T>(op, sample, index), op.cos != nullptr, op.scale * kLog2E, at.q);
  for (int64_t s = 0; s < op.seq_len; s += kBlock) {
    const Span block = span(at, s, kBlock);
    const int64_t rows = op.seq_len - s < kBlock ? op.seq_len - s : kBlock;
    times_turned(at, at.q + s * at.width, at.k_turned, s, block, at.scores);
    float inverse[kBlock];
    for (int64_t r = 0; r < rows; ++r) {
      float *scores = at.scores + r * at.stride, maximum = 0.0f;
      const Span seen = hide(scores, at.first[s + r], s + r);
      const float total = weigh(scores, seen, &maximum);
      inverse[r] = 1.0f / total;
      log_sums[s + r] = maximum + log2f(total);
      clear(scores, block.low, seen.low);
    }
    times_rows(at, at.scores, at.v, s, block, at.mixed);
    for (int64_t r = 0; r < rows; ++r) {
      columns(op.head_dim, [&](int64_t i, int64_t n) MEGALITE_INLINE {
        store(load(at.mixed + r * at.width + i, n) * inverse[r], out + (s + r) * token + i, n);
      });
    }
  }
}

template <typename T>
void forward_kv_heads(const Attention& op, const Scratch& at, int64_t begin, int64_t end) {
  const int64_t group = op.heads / op.kv_heads;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / op.kv_heads, kv = unit % op.kv_heads;
    find_first(op, sample, at.first);
    unpack(op, at, head<T>(op, sample, op.heads + kv), op.cos != nullptr, 1.0f, at.v);
    transpose(at.v, at.length, at.width, at.k_turned);
    unpack(op, at, head<T>(op, sample, op.heads + op.kv_heads + kv), false, 1.0f, at.v);
    for (int64_t index = kv * group; index < (kv + 1) * group; ++index) forward_head<T>(op, sample, index, at);
  }
}

// Weights and the gradients of scores of rows [s, s + kBlock), up to the last column that each one sees. Rows behind the
// sequence are zeros times zeros.
inline void block_scores(const Attention& op, const float* log_sums, int64_t s, const Span& block, const Scratch& at) {
  times_turned(at, at.q + s * at.width, at.k_turned, s, block, at.scores);
  times_turned(at, at.dout + s * at.width, at.v_turned, s, block, at.dscores);
  for (int64_t r = 0; r < kBlock && s + r < op.seq_len; ++r) {
    float *scores = at.scores + r * at.stride, *dscores = at.dscores + r * at.stride;
    const Span seen = hide(scores, at.first[s + r], s + r);
    differentiate(scores, dscores, seen, log_sums[s + r]);
    clear(scores, block.low, seen.low);
    clear(dscores, block.low, seen.low);
  }
}

// Adds what rows [s, s + kBlock) give to dk and dv; rows before a strip of columns do not see it.
inline void block_keys(int64_t s, const Span& block, const Scratch& at) {
  for (int64_t j = block.low; j < block.high; j += kStrip) {
    const int64_t skipped = j > s ? j - s : 0, num = kBlock - skipped;
    const int64_t from = skipped * at.stride + j, row = (s + skipped) * at.width, to = j * at.width;
    strip(at.scores + from, 1, at.stride, at.dout + row, at.width, num, at.dv + to, at.width, at.width, true);
    strip(at.dscores + from, 1, at.stride, at.q + row, at.width, num, at.dk + to, at.width, at.width, true);
  }
}

template <typename T>
void backward_head(const Attention& op, int64_t sample, int64_t index, const Scratch& at) {
  const int64_t size = op.head_dim, token = packed_heads(op) * size;
  const bool rotated = op.cos != nullptr;
  const T* dout = static_cast<const T*>(op.dout) + sample * op.seq_len * op.stride_dout + index * size;
  const float* log_sums = op.log_sums + (sample * op.heads + index) * op.seq_len;
  const Tokens<T> dq{static_cast<T*>(op.out) + sample * op.seq_len * token + index * size, token};
  unpack(op, at, head<T>(op, sample, index), rotated, op.scale * kLog2E, at.q);
  unpack(op, at, Tokens<const T>{dout, op.stride_dout}, false, 1.0f, at.dout);
  for (int64_t s = 0; s < op.seq_len; s += kBlock) {
    const Span block = span(at, s, kBlock);
    block_scores(op, log_sums, s, block, at);
    block_keys(s, block, at);
    times_rows(at, at.dscores, at.k, s, block, at.mixed);
    pack(op, at, at.mixed, s, s + kBlock < op.seq_len ? s + kBlock : op.seq_len, rotated, op.scale, dq);
  }
}

template <typename T>
void backward_kv_heads(const Attention& op, const Scratch& at, int64_t begin, int64_t end) {
  const int64_t group = op.heads / op.kv_heads, length = at.length, width = at.width;
  const int64_t size = op.head_dim, token = packed_heads(op) * size;
  const bool rotated = op.cos != nullptr;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t sample = unit / op.kv_heads, kv = unit % op.kv_heads;
    find_first(op, sample, at.first);
    unpack(op, at, head<T>(op, sample, op.heads + op.kv_heads + kv), false, 1.0f, at.k);
    transpose(at.k, length, width, at.v_turned);
    unpack(op, at, head<T>(op, sample, op.heads + kv), rotated, 1.0f, at.k);
    transpose(at.k, length, width, at.k_turned);
    clear(at.dk, 0, length * width);
    clear(at.dv, 0, length * width);
    for (int64_t index = kv * group; index < (kv + 1) * group; ++index) backward_head<T>(op, sample, index, at);
    T* dk = static_cast<T*>(op.out) + sample * op.seq_len * token + (op.heads + kv) * size;
    pack(op, at, at.dk, 0, op.seq_len, rotated, 1.0f / kLog2E, Tokens<T>{dk, token});
    pack(op, at, at.dv, 0, op.seq_len, false, 1.0f, Tokens<T>{dk + op.kv_heads * size, token});
  }
}

void attention_range(const Attention& op, bool bf16, const Scratch& at, int64_t begin, int64_t end) {
  if (op.dout) {
    bf16 ? backward_kv_heads<Bf16>(op, at, begin, end) : backward_kv_heads<float>(op, at, begin, end);
  } else {
    bf16 ? forward_kv_heads<Bf16>(op, at, begin, end) : forward_kv_heads<float>(op, at, begin, end);
  }
}
