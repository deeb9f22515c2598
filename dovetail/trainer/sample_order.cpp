#include "dovetail/trainer/sample_order.h"

#include <algorithm>

#include "dovetail/base/error.h"
#include "dovetail/base/philox.h"

namespace dovetail::trainer {
namespace {

constexpr int kRounds = 8;

// A Feistel network over 2*half_bits bits, with Philox as its round function.
uint64_t feistel(uint64_t value, int half_bits, uint64_t seed, uint64_t epoch) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits, right = value & mask;
  const std::array<uint32_t, 2> key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (uint32_t round = 0; round < kRounds; ++round) {
    const auto word = philox({static_cast<uint32_t>(right), static_cast<uint32_t>(epoch),
                              static_cast<uint32_t>(epoch >> 32), round},
                             key);
    const uint64_t next = left ^ (word[0] & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

}  // namespace

SampleOrder::SampleOrder(int64_t samples, uint64_t seed, bool shuffle)
    : samples_(samples), seed_(seed), shuffle_(shuffle), half_bits_(1) {
  if (samples < 1) raise<ConfigError>("data: wanted at least one training sample, got {}", samples);
  while (half_bits_ < 31 && int64_t{1} << (2 * half_bits_) < samples) ++half_bits_;
}

int64_t SampleOrder::at(int64_t index) const {
  DT_CHECK_GE(index, 0);
  const int64_t epoch = index / samples_;
  uint64_t value = static_cast<uint64_t>(index % samples_);
  if (!shuffle_) return static_cast<int64_t>(value);
  // The network permutes a domain of up to four times the size: walk until back among the samples.
  do value = feistel(value, half_bits_, seed_, static_cast<uint64_t>(epoch));
  while (static_cast<int64_t>(value) >= samples_);
  return static_cast<int64_t>(value);
}

GlobalBatch batch_at(const SampleOrder& order, int64_t position, int64_t batch, LastBatch last) {
  const int64_t n = order.samples();
  const int64_t left = n - position % n;
  if (left >= batch) return {position, batch, position + batch};
  if (last == LastBatch::keep) return {position, left, position + left};
  if (batch > n)
    raise<ConfigError>(
        "data: a step takes {} samples, but there are only {} (data.last_batch = \"keep\" runs "
        "them)",
        batch, n);
  return {position + left, batch, position + left + batch};
}

std::vector<int64_t> samples_of(const SampleOrder& order, const GlobalBatch& batch,
                                const RankShare& share, int64_t a) {
  std::vector<int64_t> samples(static_cast<size_t>(share.samples), -1);
  const int64_t begin = share.global_micro_batch(a) * share.samples;
  const int64_t filled = std::clamp<int64_t>(batch.count - begin, 0, share.samples);
  for (int64_t i = 0; i < filled; ++i)
    samples[static_cast<size_t>(i)] = order.at(batch.first + begin + i);
  return samples;
}

}  // namespace dovetail::trainer
