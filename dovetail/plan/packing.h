// Decides whether tensors fit into given shards, and in which order. Exact where it says so;
// bounded by counts, never by time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dovetail/plan/grid.h"
#include "dovetail/plan/tensor_types.h"

namespace dovetail::plan {

enum class Verdict : uint8_t {
  fits,     // an order was found
  refused,  // proved: no order fits
  unknown,  // no order was found by a search that was cut short
};

// Steps of search: transitions tried. One per placement of a tensor (or of a run of equal ones)
// after a partial order.
struct SearchEffort {
  int64_t steps = 0;
  int64_t limit = 60'000;  // past it only fixed orders and the shard packer are tried
  bool spent() const { return steps >= limit; }
};

struct Packing {
  Verdict verdict = Verdict::unknown;
  std::vector<int> order;  // tensor indices in order of their offset, when it fits
};

// Tensors against `periods` periods of a grid.
class Packer {
 public:
  // `tensors` and `types` outlive the packer; types were grouped from tensors.
  Packer(std::span<const RaggedTensor> tensors, const TensorTypes& types, int64_t periods);

  // Fixed orders only: as given, block descending, extent descending.
  Packing pack_fixed(const Grid& grid, SearchEffort& effort) const;

  // Fixed orders first, then the search over type counts, then (rigid tensors) shard by shard.
  Packing pack(const Grid& grid, SearchEffort& effort) const;

 private:
  std::span<const RaggedTensor> tensors_;
  const TensorTypes& types_;
  int64_t periods_;
  std::vector<int> given_;  // all tensors, ascending
};

}  // namespace dovetail::plan
