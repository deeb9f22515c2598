#include "dovetail/base/first_fit.h"

#include <algorithm>
#include <iterator>

namespace dovetail {

FirstFit::FirstFit(int64_t begin, int64_t end) {
  if (begin < end) free_[begin] = end - begin;
}

std::optional<int64_t> FirstFit::take(int64_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < bytes) continue;
    const auto [offset, size] = *it;
    free_.erase(it);
    if (size > bytes) free_[offset + bytes] = size - bytes;
    return offset;
  }
  return std::nullopt;
}

void FirstFit::give(int64_t offset, int64_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

int64_t FirstFit::left() const {
  int64_t bytes = 0;
  for (const auto& [offset, size] : free_) bytes += size;
  return bytes;
}

int64_t FirstFit::largest() const {
  int64_t bytes = 0;
  for (const auto& [offset, size] : free_) bytes = std::max(bytes, size);
  return bytes;
}

}  // namespace dovetail
