// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) for a run of 64-bit counters.
// A word depends on key, stream and counter only, so any shard can draw exactly what the whole tensor would hold.

#include "host.h"

namespace megalite {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;

inline void philox(uint32_t key0, uint32_t key1, uint32_t word[4]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kMultiplier0) * word[0];
    const uint64_t product1 = static_cast<uint64_t>(kMultiplier1) * word[2];
    word[0] = static_cast<uint32_t>(product1 >> 32) ^ word[1] ^ key0;
    word[1] = static_cast<uint32_t>(product1);
    word[2] = static_cast<uint32_t>(product0 >> 32) ^ word[3] ^ key1;
    word[3] = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
}

}  // namespace

int philox_words(uint32_t key0, uint32_t key1, uint64_t stream, uint64_t start, int64_t num, uint32_t* word0,
                 uint32_t* word1) {
  if (num < 0) return kBadArgument;
  for (int64_t i = 0; i < num; ++i) {
    const uint64_t counter = start + static_cast<uint64_t>(i);
    uint32_t word[4] = {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                        static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)};
    philox(key0, key1, word);
    word0[i] = word[0];
    word1[i] = word[1];
  }
  return kOk;
}

}  // namespace megalite
