#include "dovetail/trainer/dataset.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "dovetail/base/error.h"

namespace dovetail::trainer {

Dataset::Dataset(std::shared_ptr<const TokenStream> stream, Interval tokens, int64_t length)
    : stream_(std::move(stream)),
      tokens_(tokens),
      length_(length),
      samples_(std::max<int64_t>(0, (tokens.size() - 1) / length)) {}

TokenBatch Dataset::batch(std::span<const int64_t> samples) const {
  const auto rows = static_cast<int64_t>(samples.size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  TokenBatch batch{at::empty({rows, length_}, options), at::empty({rows, length_}, options)};
  auto* inputs = batch.inputs.mutable_data_ptr<int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> window(static_cast<size_t>(length_) + 1);
  for (const int64_t sample : samples) {
    if (sample < 0) {
      std::fill_n(inputs, length_, 0);
      std::fill_n(targets, length_, kMasked);
    } else {
      DT_CHECK_LT(sample, samples_);
      stream_->read(tokens_.begin + sample * length_, window);
      std::copy_n(window.begin(), length_, inputs);
      std::copy_n(window.begin() + 1, length_, targets);
      batch.tokens += length_;
    }
    inputs += length_;
    targets += length_;
  }
  return batch;
}

Split split_dataset(std::shared_ptr<const TokenStream> stream, double validation_fraction,
                    int64_t length, const std::string& key) {
  const int64_t size = stream->size();
  const auto cut =
      size - static_cast<int64_t>(std::llround(validation_fraction * static_cast<double>(size)));
  Split split{Dataset(stream, {0, cut}, length), Dataset(stream, {cut, size}, length)};
  if (split.train.samples() < 1)
    raise<ConfigError>(
        "{}: {} {} tokens are less than one sample of {} (data.sequence) and its target", key, cut,
        key == "data.validation" ? "validation" : "training", length);
  if (validation_fraction > 0 && split.validation.samples() < 1)
    raise<ConfigError>(
        "data: {} validation tokens are less than one sample of {} (data.sequence) and its target",
        size - cut, length);
  return split;
}

}  // namespace dovetail::trainer
