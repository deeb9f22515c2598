#include "dovetail/ops/workspace.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "dovetail/base/error.h"

namespace dovetail::ops {
namespace {

at::Tensor allocate(int64_t elements) { return at::empty({elements}, at::kFloat); }

}  // namespace

Workspace::Lease::Lease(std::shared_ptr<Workspace> owner, at::Tensor memory)
    : owner_(std::move(owner)), memory_(std::move(memory)) {}

Workspace::Lease::~Lease() {
  if (owner_) owner_->give_back(std::move(memory_));
}

at::Tensor Workspace::Lease::matrix(int64_t rows, int64_t columns) const {
  DT_CHECK_LE(rows * columns, memory_.numel(), "a matrix outside its lease");
  return memory_.as_strided({rows, columns}, {columns, 1});
}

Workspace::Lease Workspace::borrow(const std::shared_ptr<Workspace>& workspace, int64_t elements) {
  return {workspace, workspace ? workspace->take(elements) : allocate(elements)};
}

int64_t Workspace::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

at::Tensor Workspace::take(int64_t elements) {
  const std::lock_guard lock(mutex_);
  const auto by_size = [](const at::Tensor& a, const at::Tensor& b) {
    return a.numel() < b.numel();
  };
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it)
    if (it->numel() >= elements && (best == free_.end() || by_size(*it, *best))) best = it;
  // Nothing free is large enough: the largest makes way, so that the pool never outgrows what is in
  // use at once.
  if (best == free_.end()) {
    if (auto largest = std::max_element(free_.begin(), free_.end(), by_size);
        largest != free_.end()) {
      bytes_ -= largest->nbytes();
      free_.erase(largest);
    }
    at::Tensor memory = allocate(elements);
    bytes_ += memory.nbytes();
    return memory;
  }
  at::Tensor memory = std::move(*best);
  free_.erase(best);
  return memory;
}

void Workspace::give_back(at::Tensor memory) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

}  // namespace dovetail::ops
