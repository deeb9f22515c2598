// Sums over ranks in one fixed order: a binary tree over global rank numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "dovetail/base/dtype.h"

namespace dovetail::comm {

// What becomes of a sum on its way to memory.
struct SumOutput {
  bool accumulate = false;  // added to what is there, instead of replacing it
  float scale = 1;          // multiplies the sum, in fp32, before it is added or written
  // Shown runs of the output that are final, while they are in cache; ascending, each element once.
  std::function<void(int64_t begin, std::span<const float> run)> finished = nullptr;
};

// The tree splits a set of ranks at the highest bit in which its smallest and largest differ: ((0+1)+(2+3)), and
// ((0+1)+2) for three. A sum over aligned runs of 2^k ranks is therefore a subtree of the sum over
// all, and reducing in stages (inner ranks first) gives the same bits as reducing at once.
class SumTree {
 public:
  // Ranks of the members, distinct, in any order.
  explicit SumTree(std::span<const int> ranks);

  // output[i] (+)= scale * the sum over members m of inputs[m][i], taken in fp32. Inputs hold output.size()
  // elements of `dtype` (fp32, or bf16 widened on the way), of any alignment; output overlaps none
  // of them. The bits of an element do not depend on where it lies.
  void sum(std::span<const std::byte* const> inputs, DType dtype, std::span<float> output,
           const SumOutput& how = {}) const;

  // The same tree over values of any kind: leaf(member) gives one, add(a, b) their sum.
  template <class Leaf, class Add>
  auto fold(Leaf&& leaf, Add&& add) const {
    return fold(0, static_cast<int>(members_.size()), leaf, add);
  }

 private:
  template <class Leaf, class Add>
  auto fold(int first, int last, Leaf& leaf, Add& add) const -> decltype(leaf(0)) {
    if (last - first == 1) return leaf(members_[first]);
    const int middle = split(ranks_, first, last);
    auto low = fold(first, middle, leaf, add);
    return add(std::move(low), fold(middle, last, leaf, add));
  }
  // The first of the upper half of ranks [first, last).
  static int split(std::span<const int> ranks, int first, int last);

  std::vector<int> members_;  // sorted by rank
  std::vector<int> ranks_;    // ascending
};

}  // namespace dovetail::comm
