// Sixteen floats at a time for the target of the including region, whatever its vectors' width: one register of
// AVX-512, two of AVX2, an array without either. Included once per target by each_target.h with MEGALITE_LEVEL set; it
// has no include guard on purpose. Every operation is rounded once and sums fold the same halves, so that all targets
// give the same bits.

constexpr int kLanes = 16;

#if MEGALITE_LEVEL == 2
struct Lanes {
  __m512 v;
  Lanes() {}
  Lanes(float x) : v(_mm512_set1_ps(x)) {}
  Lanes(__m512 x) : v(x) {}
  static Lanes load(const float* p) { return _mm512_loadu_ps(p); }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
};
inline Lanes operator+(Lanes a, Lanes b) { return _mm512_add_ps(a.v, b.v); }
inline Lanes operator-(Lanes a, Lanes b) { return _mm512_sub_ps(a.v, b.v); }
inline Lanes operator*(Lanes a, Lanes b) { return _mm512_mul_ps(a.v, b.v); }
inline Lanes operator/(Lanes a, Lanes b) { return _mm512_div_ps(a.v, b.v); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
// The limit comes first: a NaN in the second operand passes.
inline Lanes at_most(Lanes limit, Lanes x) { return _mm512_min_ps(limit.v, x.v); }
inline Lanes at_least(Lanes limit, Lanes x) { return _mm512_max_ps(limit.v, x.v); }
// 2^n of the integers n in the low bits of x, for n of -127 (0) to 127.
inline Lanes power_of_two(Lanes x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(127)), 23));
}
inline Lanes widen(const Bf16* p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline __m256 low_half(Lanes x) { return _mm512_castps512_ps256(x.v); }
inline __m256 high_half(Lanes x) { return _mm512_extractf32x8_ps(x.v, 1); }
#elif MEGALITE_LEVEL == 1
struct Lanes {
  __m256 low, high;
  Lanes() {}
  Lanes(float x) : low(_mm256_set1_ps(x)), high(low) {}
  Lanes(__m256 a, __m256 b) : low(a), high(b) {}
  static Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  void store(float* p) const {
    _mm256_storeu_ps(p, low);
    _mm256_storeu_ps(p + 8, high);
  }
};
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes at_most(Lanes limit, Lanes x) {
  return {_mm256_min_ps(limit.low, x.low), _mm256_min_ps(limit.high, x.high)};
}
inline Lanes at_least(Lanes limit, Lanes x) {
  return {_mm256_max_ps(limit.low, x.low), _mm256_max_ps(limit.high, x.high)};
}
inline __m256 power_of_two(__m256 x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127)), 23));
}
inline Lanes power_of_two(Lanes x) { return {power_of_two(x.low), power_of_two(x.high)}; }
inline __m256 widen(__m128i half) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Lanes widen(const Bf16* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(halves)), widen(_mm_loadu_si128(halves + 1))};
}
inline __m256 low_half(Lanes x) { return x.low; }
inline __m256 high_half(Lanes x) { return x.high; }
#else
struct Lanes {
  float v[kLanes];
  Lanes() {}
  Lanes(float x) {
    for (float& one : v) one = x;
  }
  static Lanes load(const float* p) {
    Lanes out;
    for (int i = 0; i < kLanes; ++i) out.v[i] = p[i];
    return out;
  }
  void store(float* p) const {
    for (int i = 0; i < kLanes; ++i) p[i] = v[i];
  }
};
template <typename F>
inline Lanes each(const F& f) {
  Lanes out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = f(i);
  return out;
}
inline Lanes operator+(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Lanes operator-(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Lanes operator*(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Lanes operator/(const Lanes& a, const Lanes& b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return each([&](int i) { return fmaf(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes at_most(const Lanes& limit, const Lanes& x) {
  return each([&](int i) { return limit.v[i] < x.v[i] ? limit.v[i] : x.v[i]; });
}
inline Lanes at_least(const Lanes& limit, const Lanes& x) {
  return each([&](int i) { return limit.v[i] > x.v[i] ? limit.v[i] : x.v[i]; });
}
inline Lanes power_of_two(const Lanes& x) {
  return each([&](int i) { return from_bits((to_bits(x.v[i]) + 127u) << 23); });
}
inline Lanes widen(const Bf16* p) {
  return each([&](int i) { return from_bits(static_cast<uint32_t>(p[i].bits) << 16); });
}
#endif

#if MEGALITE_LEVEL > 0
inline float sum(Lanes x) {
  const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float largest(Lanes x) {
  const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
template <typename F>
inline float fold(const Lanes& x, const F& f) {
  float all[kLanes];
  x.store(all);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) all[i] = f(all[i], all[i + half]);
  }
  return all[0];
}
inline float sum(const Lanes& x) {
  return fold(x, [](float a, float b) { return a + b; });
}
inline float largest(const Lanes& x) {
  return fold(x, [](float a, float b) { return a > b ? a : b; });
}
#endif

inline Lanes load(const float* p) { return Lanes::load(p); }
inline Lanes load(const Bf16* p) { return widen(p); }
inline void store(Lanes x, float* p) { x.store(p); }
inline void store(Lanes x, Bf16* p) {
  float wide[kLanes];
  x.store(wide);
  for (int i = 0; i < kLanes; ++i) p[i].bits = bf16_bits(to_bits(wide[i]));  // the compiler makes vectors of it
}

// The first n elements, zeros behind them; nothing beyond is touched.
template <typename T>
inline Lanes load(const T* p, int64_t n) {
  if (n == kLanes) return load(p);
  T part[kLanes] = {};
  __builtin_memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <typename T>
inline void store(Lanes x, T* p, int64_t n) {
  if (n == kLanes) return store(x, p);
  T part[kLanes];
  store(x, part);
  __builtin_memcpy(p, part, n * sizeof(T));
}

// body(first column, how many) over a row, sixteen columns at a time and then the rest.
template <typename F>
inline void columns(int64_t width, const F& body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, width - i);
}

// e^x to about one unit of the last place: 0 below -104, infinity above 88.8, NaN stays.
// x = n ln 2 + r with |r| <= ln(2)/2; Taylor's series of e^r leaves 5e-9. 2^n goes in as two factors: it may be outside
// of what fp32 holds.
inline Lanes exponential(Lanes x) {
  x = at_least(-105.0f, at_most(89.0f, x));
  const Lanes shift = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to an integer, which its low bits hold
  const Lanes n = fma(x, 1.44269504f, shift) - shift;
  const Lanes r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));  // ln 2 in two parts; n times the first is exact
  Lanes y = 1.0f / 5040.0f;
  y = fma(y, r, 1.0f / 720.0f);
  y = fma(y, r, 1.0f / 120.0f);
  y = fma(y, r, 1.0f / 24.0f);
  y = fma(y, r, 1.0f / 6.0f);
  y = fma(y, r, 0.5f);
  y = fma(y, r, 1.0f);
  y = fma(y, r, 1.0f);
  const Lanes half = fma(n, 0.5f, shift) - shift;
  return y * power_of_two(half + shift) * power_of_two((n - half) + shift);
}

// 2^x to about one unit of the last place: 0 below -126.5, NaN stays; x is at most 127. The polynomial's relative error
// is 2e-9 on [-1/2, 1/2], the least that this degree allows (Remez). Nothing here makes a number too small to be normal
// on the way to 0, which would take a CPU a hundred cycles.
inline Lanes power(Lanes x) {
  x = at_least(-127.0f, x);
  const Lanes shift = 12582912.0f;  // see exponential
  const Lanes whole = x + shift, r = x - (whole - shift);
  Lanes y = 1.53458121587e-4f;
  y = fma(y, r, 1.33999312095e-3f);
  y = fma(y, r, 9.61848895656e-3f);
  y = fma(y, r, 5.550328777e-2f);
  y = fma(y, r, 0.240226468906f);
  y = fma(y, r, 0.693147205737f);
  y = fma(y, r, 1.0f);
  return y * power_of_two(whole);
}
