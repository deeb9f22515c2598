// Autoregressive sampling through full forwards. Only the model's logits() is called, without
// gradients, so the parameters may be managed by an engine; then every rank calls it with the same
// arguments and gets the same tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/models/common/model.h"

namespace dovetail::models {

struct SampleOptions {
  double temperature = 1.0;  // 0: always the most likely token
  int64_t top_k = 0;         // draw among that many most likely tokens; 0: among all
  uint64_t seed = 0;         // draws are Philox's, a function of (seed, position)
};

// `count` tokens that continue `prompt`, which must not be empty; the model sees the last context()
// tokens. Throws ConfigError for options out of range and tokens outside the vocabulary.
std::vector<int64_t> sample(Model& model, const std::vector<int64_t>& prompt, int64_t count,
                            const SampleOptions& options = {});

// Byte models: a token is a byte.
std::vector<int64_t> tokens_of_bytes(std::string_view text);
std::string bytes_of_tokens(const std::vector<int64_t>& tokens);

}  // namespace dovetail::models
