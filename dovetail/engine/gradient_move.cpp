#include "dovetail/engine/gradient_move.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dovetail::engine_detail {
namespace {

// glibc maps larger allocations alone, at any setting of its threshold: their pages leave when they are freed.
constexpr size_t kMappedAlone = size_t{32} << 20;
constexpr size_t kChunk = size_t{4} << 20;

bool only_ours(const at::Tensor& gradient, const at::Tensor& given) {
  const bool shared = given.defined() && given.is_alias_of(gradient);
  return gradient.use_count() == 1 && (!shared || given.use_count() == 1) &&
         gradient.storage().use_count() == (shared ? 2u : 1u);
}

bool plain(const at::Tensor& t) { return t.is_cpu() && t.layout() == at::kStrided && t.is_contiguous(); }

}  // namespace

bool move_gradient(const at::Tensor& gradient, const at::Tensor& given, const at::Tensor& target) {
  if (!plain(gradient) || !plain(target) || gradient.scalar_type() != target.scalar_type()) return false;
  const size_t bytes = gradient.nbytes();
  if (bytes <= kMappedAlone || bytes != target.nbytes() || !only_ours(gradient, given)) return false;
  if (gradient.storage().data_ptr().get_deleter() != c10::GetCPUAllocator()->raw_deleter()) return false;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto* source = static_cast<const std::byte*>(gradient.const_data_ptr());
  auto* to = static_cast<std::byte*>(target.mutable_data_ptr());
  uintptr_t given_back = (reinterpret_cast<uintptr_t>(source) + page - 1) / page * page;
  for (size_t at = 0; at < bytes; at += kChunk) {
    const size_t n = std::min(kChunk, bytes - at);
    std::memcpy(to + at, source + at, n);
    const uintptr_t end = reinterpret_cast<uintptr_t>(source + at + n) / page * page;
    if (end <= given_back) continue;
    ::madvise(reinterpret_cast<void*>(given_back), end - given_back, MADV_DONTNEED);  // refusal costs only memory
    given_back = end;
  }
  return true;
}

}  // namespace dovetail::engine_detail
