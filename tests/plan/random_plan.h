// Random models and options, for tests of properties that all plans have.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "dovetail/plan/plan.h"

namespace dovetail::plan {

class RandomPlans {
 public:
  explicit RandomPlans(uint32_t seed) : random_(seed) {}

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }
  bool flip() { return pick(0, 1) == 1; }

  template <class T>
  const T& one_of(const std::vector<T>& list) {
    return list[pick(0, std::ssize(list) - 1)];
  }

  TensorSpec tensor(const std::string& name) {
    const int64_t heads = pick(1, 4);
    switch (pick(0, 6)) {
      case 0: return {name, {}, ParamKind::vector};
      case 1: return {name, {pick(0, 40)}, ParamKind::vector};
      case 2: return {name, {heads * pick(1, 8), pick(1, 20)}, ParamKind::matrix, heads, 0};
      case 3: return {name, {pick(1, 20), heads * pick(1, 8)}, ParamKind::matrix, heads, 1};
      case 4: return {name, {pick(0, 50), pick(1, 9)}, ParamKind::embedding};
      case 5: return {name, {pick(1, 4), pick(1, 6), pick(1, 6)}, ParamKind::expert};
      default: return {name, {pick(1, 8), pick(1, 4), 3, 3}, ParamKind::conv};
    }
  }

  std::vector<GroupSpec> groups() {
    std::vector<GroupSpec> groups;
    const int64_t blocks = pick(0, 5);
    for (int64_t g = 0; g < blocks; ++g) groups.push_back({"layers." + std::to_string(g), {}, pick(0, 4) > 0});
    if (blocks == 0 || flip()) groups.push_back({"", {}, flip()});
    for (GroupSpec& g : groups)
      for (int64_t t = pick(0, 5); t > 0; --t) g.tensors.push_back(tensor(g.name + " \"w\"." + std::to_string(t)));
    return groups;
  }

  PlanOptions options() {
    PlanOptions o;
    o.world = one_of<int64_t>({1, 2, 3, 4, 6, 8, 12});
    o.degrees = one_of(legal_chains(o.world));
    o.main = flip() ? DType::f32 : DType::bf16;
    o.format = flip() ? "fp32" : "bf16";
    o.block = one_of<BlockKind>({BlockKind::element, BlockKind::row, BlockKind::rows32, BlockKind::head,
                                 BlockKind::expert, BlockKind::matrix});
    o.alignment = one_of<int64_t>({1, 4, 16});
    o.segments = static_cast<int>(pick(1, 3));
    o.reshard_after_forward = flip();
    o.prefetch = static_cast<int>(pick(0, 3));
    o.pending_reductions = static_cast<int>(pick(0, 3));
    o.local_accumulation = flip();
    return o;
  }

 private:
  std::mt19937 random_;
};

}  // namespace dovetail::plan
