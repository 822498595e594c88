// Host helpers of the data pipeline and of weight initialisation. Raw pointers and sizes in, an error code out;
// nothing here knows Python or torch. The caller owns all memory.
#pragma once

#include <cstdint>

namespace megalite {

enum Error : int { kOk = 0, kBadArgument = 1, kDocumentOutOfRange = 2, kNegativeLength = 3, kTooFewTokens = 4 };

// Number of samples of seq_len + 1 tokens (neighbours share one token) in `tokens` tokens.
int64_t num_samples(int64_t tokens, int64_t seq_len);

// Sum of lengths[order[i]], in *tokens.
int count_tokens(const int32_t* lengths, int64_t num_documents, const int64_t* order, int64_t num_order,
                 int64_t* tokens);

// out: (samples + 1, 2) rows of (position in order, token offset within that document).
int sample_index(const int32_t* lengths, const int64_t* order, int64_t num_order, int64_t seq_len, int64_t samples,
                 int64_t* out);

// Greedy blend: at k the dataset whose share lags most. dataset: int16[num], sample: int64[num].
int blend_index(const double* weights, int64_t num_datasets, int64_t num, int16_t* dataset, int64_t* sample);

// Words 0 and 1 of Philox4x32-10 for counters (lo32(c), hi32(c), stream_lo, stream_hi), c = start .. start + num - 1.
int philox_words(uint32_t key0, uint32_t key1, uint64_t stream, uint64_t start, int64_t num, uint32_t* word0,
                 uint32_t* word1);

}  // namespace megalite
