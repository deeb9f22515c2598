#include "dovetail/plan/tensor_types.h"

#include <algorithm>
#include <map>
#include <utility>

namespace dovetail::plan {

TensorTypes group_by_type(std::span<const RaggedTensor> tensors, std::span<const int> chosen,
                          int max_types) {
  TensorTypes r;
  std::map<std::pair<int64_t, int64_t>, std::vector<int>> groups;
  for (int i : chosen) {
    const RaggedTensor t = tensors[i];
    if (t.extent == 0) continue;
    groups[{-t.block, -t.extent}].push_back(i);
    r.total += t.extent;
  }
  r.lumped = groups.size() > static_cast<size_t>(max_types);
  TensorType lump{{0, 1}, 1, {}};
  for (auto& [key, members] : groups) {
    const RaggedTensor shape{-key.second, -key.first};
    const int64_t count = static_cast<int64_t>(members.size());
    if (r.lumped && shape.block == 1) {
      lump.shape.extent += shape.extent * count;
      lump.members.insert(lump.members.end(), members.begin(), members.end());
    } else {
      r.types.push_back({shape, count, std::move(members)});
    }
  }
  if (!lump.members.empty()) r.types.push_back(std::move(lump));
  return r;
}

}  // namespace dovetail::plan
