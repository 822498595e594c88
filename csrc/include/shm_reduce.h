// Element-wise reduction of several arrays, one per rank, in rank order. Raw pointers in; the caller owns all memory.
#pragma once

#include <cstdint>

namespace megalite {

enum class Element : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3, kInt32 = 4, kInt64 = 5 };
enum class Reduce : int { kSum = 0, kMax = 1, kMin = 2 };
constexpr int kNumElements = 6, kNumReduces = 3;

// Bytes of one element.
int64_t element_bytes(Element element);

// dst[i] = sources[0][i] op sources[1][i] op ... for i < count, and the same in `copy` unless it is null.
// Two-byte floats are accumulated in fp32 and rounded once. max and min give NaN where any source has NaN. dst may be
// one of the sources.
using ReduceLoop = void (*)(const void* const* sources, int num_sources, void* dst, void* copy, int64_t count);

// The loop for these types at a vector level of simd.h; all levels give the same bits.
ReduceLoop reduce_loop(Element element, Reduce reduce, int simd);

}  // namespace megalite
