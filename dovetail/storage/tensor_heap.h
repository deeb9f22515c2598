// torch's CPU tensors out of a PageHeap. malloc gives the pages of a large tensor back as soon as it is freed, at the
// latest beyond 32 MiB and often beyond 128 KiB, so that a training step faults in its activations anew
// (benchmarks/results/heap.txt).
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <memory>

#include "dovetail/storage/page_heap.h"

namespace dovetail {

// The process's allocator of CPU tensors once installed. It serves those of kLarge bytes and more; smaller ones, and
// all where the heap is off or full, come from where torch's own allocator has them. Tensors made before stay as they
// are. Any thread may use it; a child of fork() too.
class TensorHeap final : public c10::Allocator {
 public:
  static constexpr size_t kLarge = size_t{128} << 10;

  // Installs it for the rest of the process, switched on; a second call finds the first one. Null where the system
  // has no addresses for it (a limit on virtual memory) or under the address sanitizer, which could not see into it.
  static TensorHeap* install();
  // Null where there is none, or another library has installed its own allocator since.
  static TensorHeap* installed();

  // Off: tensors made from now on are as without it, and free pages go back to the system.
  void switch_on(bool on);
  bool is_on() const { return on_; }
  PageHeap& pages() { return *pages_; }

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

 private:
  explicit TensorHeap(std::unique_ptr<PageHeap> pages) : pages_(std::move(pages)) {}

  std::unique_ptr<PageHeap> pages_;
  std::atomic<bool> on_{true};
};

}  // namespace dovetail
