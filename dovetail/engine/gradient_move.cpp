#include "dovetail/engine/gradient_move.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dovetail/storage/page_heap.h"

namespace dovetail::engine_detail {
namespace {

// A tensor of the heap or, larger than malloc keeps at any setting of its threshold, one mapped alone.
constexpr size_t kMappedAlone = size_t{32} << 20;
constexpr size_t kChunk = size_t{4} << 20;
constexpr size_t kStreamed = size_t{64} << 10;  // beyond it, what was copied is not in the cache when it is read

// Whether nobody else can read the memory of `gradient`. Of a linear layer it lies in a view of the product that made
// it.
bool is_the_last(const at::Tensor& gradient, const at::Tensor& given) {
  const bool shared = given.defined() && given.is_alias_of(gradient);
  if (gradient.use_count() != 1 || (shared && given.use_count() != 1)) return false;
  const size_t holders = shared ? 2 : 1;
  const at::TensorBase* base = nullptr;
  size_t views = 0;
  for (const at::Tensor* t : {&gradient, &given}) {
    if ((t == &given && !shared) || !t->is_view()) continue;
    if (base != nullptr && !base->is_same(t->_base())) return false;
    base = &t->_base();
    ++views;
  }
  if (base != nullptr && base->use_count() != views) return false;
  return gradient.storage().use_count() == holders + (base != nullptr);
}

bool pages_can_go(const at::Tensor& gradient, const at::Tensor& given) {
  return gradient.nbytes() > kMappedAlone && is_the_last(gradient, given) &&
         gradient.storage().data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

bool plain(const at::Tensor& t) { return t.is_cpu() && t.layout() == at::kStrided && t.is_contiguous(); }

// A copy past the cache: ordinary stores would read every line of the target first.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
  size_t at = 0;
#ifdef __SSE2__
  if (bytes >= kStreamed && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; at + 64 <= bytes; at += 64) {
      const auto* source = reinterpret_cast<const __m128i*>(from + at);
      auto* target = reinterpret_cast<__m128i*>(to + at);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
    }
    _mm_sfence();
  }
#endif
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace

void move_gradient(const at::Tensor& gradient, const at::Tensor& given, const at::Tensor& target) {
  if (!plain(gradient) || !plain(target) || gradient.scalar_type() != target.scalar_type()) {
    target.copy_(gradient);
    return;
  }
  const size_t bytes = gradient.nbytes();
  const auto* from = static_cast<const std::byte*>(gradient.const_data_ptr());
  auto* to = static_cast<std::byte*>(target.mutable_data_ptr());
  if (!pages_can_go(gradient, given)) return stream(to, from, bytes);
  constexpr auto page = static_cast<uintptr_t>(PageHeap::kPage);  // less would split huge pages
  uintptr_t given_back = (reinterpret_cast<uintptr_t>(from) + page - 1) / page * page;
  for (size_t at = 0; at < bytes; at += kChunk) {
    const size_t n = std::min(kChunk, bytes - at);
    stream(to + at, from + at, n);
    const uintptr_t end = reinterpret_cast<uintptr_t>(from + at + n) / page * page;
    if (end <= given_back) continue;
    ::madvise(reinterpret_cast<void*>(given_back), end - given_back, MADV_DONTNEED);  // refusal costs only memory
    given_back = end;
  }
}

}  // namespace dovetail::engine_detail
