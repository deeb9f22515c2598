#include "dovetail/models/lm/sample.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dovetail/base/error.h"
#include "dovetail/base/philox.h"

namespace dovetail::models {
namespace {

// In [0, 1).
double uniform(uint64_t seed, uint64_t position) {
  const auto bits =
      philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
             {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return static_cast<double>((uint64_t{bits[0]} << 21) ^ (bits[1] >> 11)) * 0x1p-53;
}

// Candidates in order of falling logit, the lower token first among equals.
std::vector<int64_t> candidates(const std::vector<float>& logits, int64_t top_k) {
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto count =
      top_k > 0 ? std::min<size_t>(static_cast<size_t>(top_k), order.size()) : order.size();
  std::partial_sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(),
      [&](int64_t a, int64_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
  order.resize(count);
  return order;
}

int64_t draw(const std::vector<float>& logits, const SampleOptions& options, uint64_t position) {
  const auto order = candidates(logits, options.temperature == 0 ? 1 : options.top_k);
  if (order.size() == 1) return order.front();
  std::vector<double> reached;
  double total = 0;
  for (int64_t token : order) {
    total += std::exp((double{logits[token]} - logits[order.front()]) / options.temperature);
    reached.push_back(total);
  }
  const double point = uniform(options.seed, position) * total;
  const auto it = std::upper_bound(reached.begin(), reached.end(), point);
  return order[std::min<size_t>(static_cast<size_t>(it - reached.begin()), order.size() - 1)];
}

std::vector<float> next_logits(Model& model, const std::vector<int64_t>& tokens) {
  const int64_t length = std::min<int64_t>(static_cast<int64_t>(tokens.size()), model.context());
  at::Tensor window = at::empty({1, length}, at::kLong);
  std::copy(tokens.end() - length, tokens.end(), window.mutable_data_ptr<int64_t>());
  const at::Tensor last = model.logits(window)[0][length - 1].to(at::kFloat).contiguous();
  const float* data = last.const_data_ptr<float>();
  std::vector<float> out(data, data + last.numel());
  for (float value : out)
    if (std::isnan(value)) raise<StateError>("sample: the model's logits are NaN");
  return out;
}

}  // namespace

std::vector<int64_t> sample(Model& model, const std::vector<int64_t>& prompt, int64_t count,
                            const SampleOptions& options) {
  if (prompt.empty()) raise<ConfigError>("sample: the prompt is empty");
  if (!(options.temperature >= 0))
    raise<ConfigError>("temperature: wanted at least 0, got {}", options.temperature);
  if (options.top_k < 0) raise<ConfigError>("top_k: wanted at least 0, got {}", options.top_k);
  const at::NoGradGuard no_grad;
  std::vector<int64_t> tokens = prompt;
  for (int64_t i = 0; i < count; ++i)
    tokens.push_back(draw(next_logits(model, tokens), options, tokens.size()));
  tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()));
  return tokens;
}

std::vector<int64_t> tokens_of_bytes(std::string_view text) {
  std::vector<int64_t> out;
  for (char c : text) out.push_back(static_cast<unsigned char>(c));
  return out;
}

std::string bytes_of_tokens(const std::vector<int64_t>& tokens) {
  std::string out;
  for (int64_t token : tokens) {
    if (token < 0 || token > 255) raise<ConfigError>("token {} is not a byte", token);
    out.push_back(static_cast<char>(static_cast<unsigned char>(token)));
  }
  return out;
}

}  // namespace dovetail::models
