// The loop of AdamW over elements [begin, end) for the vector type `Wide` of the including region and, for the rest,
// single elements. Included once per target (see simd.h); it has no include guard on purpose. The wide loop does what
// adam_update does, lane by lane: that is why all targets agree to the bit.

#ifdef MEGALITE_WIDE
template <bool kCopy, bool kStream>
inline void update_wide(const AdamSlice& s, const AdamTerms& t, int64_t begin, int64_t end) {
  const Wide scale(t.scale), keep(t.keep), grad1(t.grad1), beta2(t.beta2), grad2(t.grad2), eps(t.eps);
  const Wide minus_step(-t.step_size);
  for (int64_t i = begin; i < end; i += Wide::kWidth) {
    const Wide grad = Wide::load(s.grad + i) * scale;
    const Wide old_avg = Wide::load(s.exp_avg + i);
    const Wide exp_avg = fma(grad1, grad - old_avg, old_avg);
    const Wide exp_avg_sq = fma(beta2, Wide::load(s.exp_avg_sq + i), (grad2 * grad) * grad);
    const Wide ratio = exp_avg / (sqrt(exp_avg_sq) + eps);
    const Wide main = fma(minus_step, ratio, Wide::load(s.main + i) * keep);
    exp_avg.store(s.exp_avg + i);
    exp_avg_sq.store(s.exp_avg_sq + i);
    main.store(s.main + i);
    if (kCopy) main.template store_bf16<kStream>(s.copy + i);
  }
  if (kStream) _mm_sfence();  // streaming stores are visible to the other threads before this one is joined
}
#endif

void update(const AdamSlice& s, const AdamTerms& t, int64_t begin, int64_t end) {
#ifdef MEGALITE_WIDE
  const int64_t wide_end = end - (end - begin) % Wide::kWidth;
  if (!s.copy) {
    update_wide<false, false>(s, t, begin, wide_end);
  } else if (reinterpret_cast<uintptr_t>(s.copy + begin) % (Wide::kWidth * sizeof(uint16_t)) == 0) {
    update_wide<true, true>(s, t, begin, wide_end);  // the copy is not read soon: it need not come through the caches
  } else {
    update_wide<true, false>(s, t, begin, wide_end);
  }
  begin = wide_end;
#endif
  for (int64_t i = begin; i < end; ++i) {
    AdamState state{s.main[i], s.exp_avg[i], s.exp_avg_sq[i]};
    adam_update(state, s.grad[i], t);
    s.main[i] = state.main;
    s.exp_avg[i] = state.exp_avg;
    s.exp_avg_sq[i] = state.exp_avg_sq;
    if (s.copy) {
      uint32_t bits;
      __builtin_memcpy(&bits, &state.main, sizeof bits);
      s.copy[i] = bf16_bits(bits);
    }
  }
}
