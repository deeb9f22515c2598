// The one order of samples, the same for any number of ranks.
//
// Index i of the order stands for sample permute(seed, epoch, i mod n) of epoch i/n: a pure
// function of (seed, i), where n is the number of samples. A *position* is the number of indices
// consumed so far; it is all that a checkpoint keeps of the data. A global batch of B samples at
// position p takes the indices p..p+B-1, but never reaches into the next epoch: what is left of an
// epoch is dropped, or makes one short batch, as configured.
//
// How ranks share a batch: micro-batch `a` of rank r of N covers the slots [(a*N + r)*m, (a*N + r +
// 1)*m), m samples each. So the batch of a step is the same set for all N, and N ranks with one
// micro-batch do what one rank does with N.
#pragma once

#include <cstdint>
#include <vector>

namespace dovetail::trainer {

class SampleOrder {
 public:
  // Throws ConfigError when there is no sample. shuffle = false: the natural order in every epoch.
  SampleOrder(int64_t samples, uint64_t seed, bool shuffle);

  int64_t samples() const { return samples_; }
  // The sample at index i >= 0.
  int64_t at(int64_t index) const;

 private:
  int64_t samples_;
  uint64_t seed_;
  bool shuffle_;
  int half_bits_;  // the permuted domain has 2*half_bits_ bits
};

// What happens to the samples at an epoch's end that do not fill a batch.
enum class LastBatch : uint8_t {
  drop,  // they are passed over
  keep   // they make a batch with empty slots, which ranks run with weight 0
};

struct GlobalBatch {
  int64_t first = 0;  // index of slot 0
  int64_t count = 0;  // slots filled; the others are empty
  int64_t next = 0;   // position after this batch
};

// The batch at a position. Throws ConfigError when dropping would leave no batch at all (batch >
// samples).
GlobalBatch batch_at(const SampleOrder& order, int64_t position, int64_t batch, LastBatch last);

struct RankShare {
  int64_t rank = 0, ranks = 1;
  int64_t micro_batches = 1;  // per rank and step
  int64_t samples = 1;        // per micro-batch
  int64_t batch() const { return ranks * micro_batches * samples; }
  // Number of micro-batch `a` of this rank among all of the step.
  int64_t global_micro_batch(int64_t a) const { return a * ranks + rank; }
};

// The samples of micro-batch `a`; -1 for an empty slot.
std::vector<int64_t> samples_of(const SampleOrder& order, const GlobalBatch& batch,
                                const RankShare& share, int64_t a);

}  // namespace dovetail::trainer
