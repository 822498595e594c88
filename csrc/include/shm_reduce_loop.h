// The reduction of shm_reduce.h for vectors of kBytes bytes and the fp16 conversions of the including region.
// Included once per target (see simd.h); it has no include guard on purpose.

template <typename T>
struct Pack {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <typename T>
struct HalfPack {
  typedef T type __attribute__((vector_size(kBytes / 2)));
};

template <typename Vector>
inline Vector load_bytes(const void* p) {
  Vector v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

// Types that are added as they are stored.
template <typename T>
struct Plain {
  using Stored = T;
  using Vector = typename Pack<T>::type;
  static constexpr int kLanes = kBytes / sizeof(T);
  static Vector load(const Stored* p) { return load_bytes<Vector>(p); }
  static void store(Stored* p, const Vector& v) { __builtin_memcpy(p, &v, sizeof v); }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Vector = Pack<float>::type;
  using Bits = Pack<uint32_t>::type;
  using Packed = HalfPack<uint16_t>::type;
  static constexpr int kLanes = kBytes / 4;
  static Vector load(const Stored* p) {
    return reinterpret_cast<Vector>(__builtin_convertvector(load_bytes<Packed>(p), Bits) << 16);
  }
  static void store(Stored* p, const Vector& v) {  // to nearest even; NaN stays NaN
    const Bits bits = reinterpret_cast<Bits>(v);
    const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Bits nan = reinterpret_cast<Bits>(v != v);
    const Packed packed = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), Packed);
    __builtin_memcpy(p, &packed, sizeof packed);
  }
};

struct Sum {
  template <typename Vector>
  static Vector join(const Vector& a, const Vector& b) {
    return a + b;
  }
};
struct Max {
  template <typename Vector>
  static Vector join(const Vector& a, const Vector& b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct Min {
  template <typename Vector>
  static Vector join(const Vector& a, const Vector& b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};

// kVectors vectors from element `at` on.
template <typename Type, typename Op, int kVectors>
inline void reduce_run(const void* const* sources, int num_sources, void* dst, void* copy, int64_t at) {
  using Stored = typename Type::Stored;
  typename Type::Vector sums[kVectors];
  const Stored* first = static_cast<const Stored*>(sources[0]) + at;
  for (int k = 0; k < kVectors; ++k) sums[k] = Type::load(first + k * Type::kLanes);
  for (int s = 1; s < num_sources; ++s) {
    const Stored* source = static_cast<const Stored*>(sources[s]) + at;
    for (int k = 0; k < kVectors; ++k) sums[k] = Op::join(sums[k], Type::load(source + k * Type::kLanes));
  }
  for (int k = 0; k < kVectors; ++k) Type::store(static_cast<Stored*>(dst) + at + k * Type::kLanes, sums[k]);
  if (copy == nullptr) return;
  for (int k = 0; k < kVectors; ++k) Type::store(static_cast<Stored*>(copy) + at + k * Type::kLanes, sums[k]);
}

// The last `num` elements, fewer than a vector, through padded copies.
template <typename Type, typename Op>
inline void reduce_tail(const void* const* sources, int num_sources, void* dst, void* copy, int64_t at, int64_t num) {
  using Stored = typename Type::Stored;
  Stored padded[Type::kLanes] = {};
  const size_t bytes = num * sizeof(Stored);
  std::memcpy(padded, static_cast<const Stored*>(sources[0]) + at, bytes);
  typename Type::Vector sum = Type::load(padded);
  for (int s = 1; s < num_sources; ++s) {
    std::memcpy(padded, static_cast<const Stored*>(sources[s]) + at, bytes);
    sum = Op::join(sum, Type::load(padded));
  }
  Type::store(padded, sum);
  std::memcpy(static_cast<Stored*>(dst) + at, padded, bytes);
  if (copy != nullptr) std::memcpy(static_cast<Stored*>(copy) + at, padded, bytes);
}

template <typename Type, typename Op>
void reduce_all(const void* const* sources, int num_sources, void* dst, void* copy, int64_t count) {
  constexpr int kLanes = Type::kLanes;
  int64_t at = 0;
  for (; at + 4 * kLanes <= count; at += 4 * kLanes) reduce_run<Type, Op, 4>(sources, num_sources, dst, copy, at);
  for (; at + kLanes <= count; at += kLanes) reduce_run<Type, Op, 1>(sources, num_sources, dst, copy, at);
  if (at < count) reduce_tail<Type, Op>(sources, num_sources, dst, copy, at, count - at);
}

template <typename Type>
ReduceLoop loop_of(Reduce reduce) {
  switch (reduce) {
    case Reduce::kSum: return reduce_all<Type, Sum>;
    case Reduce::kMax: return reduce_all<Type, Max>;
    case Reduce::kMin: return reduce_all<Type, Min>;
  }
  return nullptr;
}

inline ReduceLoop loop_for(Element element, Reduce reduce) {
  switch (element) {
    case Element::kFloat32: return loop_of<Plain<float>>(reduce);
    case Element::kFloat64: return loop_of<Plain<double>>(reduce);
    case Element::kBFloat16: return loop_of<BFloat16>(reduce);
    case Element::kFloat16: return loop_of<Float16>(reduce);
    case Element::kInt32: return loop_of<Plain<int32_t>>(reduce);
    case Element::kInt64: return loop_of<Plain<int64_t>>(reduce);
  }
  return nullptr;
}
