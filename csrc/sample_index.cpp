// Where each training sample starts. Documents are read one after another in `order`; sample i covers the tokens
// [i * seq_len, (i + 1) * seq_len], so neighbours share one token (the last label is the next first input).
// All token counts are int64: a corpus passes 2^31 tokens long before it is large.

#include "host.h"

namespace megalite {

int64_t num_samples(int64_t tokens, int64_t seq_len) { return tokens > 1 ? (tokens - 1) / seq_len : 0; }

int count_tokens(const int32_t* lengths, int64_t num_documents, const int64_t* order, int64_t num_order,
                 int64_t* tokens) {
  int64_t sum = 0;
  for (int64_t i = 0; i < num_order; ++i) {
    if (order[i] < 0 || order[i] >= num_documents) return kDocumentOutOfRange;
    if (lengths[order[i]] < 0) return kNegativeLength;
    sum += lengths[order[i]];
  }
  *tokens = sum;
  return kOk;
}

int sample_index(const int32_t* lengths, const int64_t* order, int64_t num_order, int64_t seq_len, int64_t samples,
                 int64_t* out) {
  if (seq_len < 1 || samples < 0) return kBadArgument;
  int64_t position = 0;
  int64_t first = 0;  // tokens before document order[position]
  for (int64_t i = 0; i <= samples; ++i) {
    const int64_t token = i * seq_len;
    while (position < num_order && token >= first + lengths[order[position]]) {
      first += lengths[order[position]];
      ++position;
    }
    if (position == num_order) return kTooFewTokens;
    out[2 * i] = position;
    out[2 * i + 1] = token - first;
  }
  return kOk;
}

}  // namespace megalite
