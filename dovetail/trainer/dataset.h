// Samples: windows of a token stream, and the tensors that a micro-batch is made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "dovetail/base/interval.h"
#include "dovetail/trainer/token_stream.h"

namespace dovetail::trainer {

inline constexpr int64_t kMasked = -100;  // target of a position that carries no loss

struct TokenBatch {
  at::Tensor inputs;   // [samples, length] int64
  at::Tensor targets;  // [samples, length] int64: the next token, or kMasked
  int64_t tokens = 0;  // targets that are not masked
};

// Sample j covers tokens [begin + j*length, begin + (j+1)*length] of the stream: `length` inputs
// and their targets; the last target is the first input of the next sample. Tokens after the last
// whole sample are not used.
class Dataset {
 public:
  Dataset(std::shared_ptr<const TokenStream> stream, Interval tokens, int64_t length);

  int64_t samples() const { return samples_; }
  int64_t length() const { return length_; }
  const TokenStream& stream() const { return *stream_; }

  // An index of -1 gives an empty sample: zeros, all masked.
  TokenBatch batch(std::span<const int64_t> samples) const;

 private:
  std::shared_ptr<const TokenStream> stream_;
  Interval tokens_;
  int64_t length_;
  int64_t samples_;
};

struct Split {
  Dataset train;
  Dataset validation;
};

// The last `validation_fraction` of the stream is for validation, the rest for training; the
// documents' order is that of the hash of their names. Throws ConfigError when either part is
// shorter than one sample (fraction 0: none is wanted).
// `key`: of the configuration, for messages.
Split split_dataset(std::shared_ptr<const TokenStream> stream, double validation_fraction,
                    int64_t length, const std::string& key = "data");

}  // namespace dovetail::trainer
