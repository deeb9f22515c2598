// Memory of one device that the ranks of a host address in place: one symmetric allocation of torch per rank, made and
// mapped once; its own rank alone gives out what lies in it. So an operand is named by a rank and an offset, and ranks
// need not allocate alike.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "dovetail/base/first_fit.h"
#include "dovetail/comm/group.h"

namespace dovetail::comm {

// Elements at an address, as a tensor; nothing is owned. A peer's memory counts as the own device's.
at::Tensor tensor_at(const void* data, int64_t count, at::ScalarType type, at::Device device);
// On the current stream, without waiting; none for no bytes.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes, at::Device device);

// Used by one thread at a time. Pieces may outlive the world, not their device.
class SymmetricArena final : public SharedMemory, public std::enable_shared_from_this<SymmetricArena> {
 public:
  using Allocator = c10::intrusive_ptr<::c10d::symmetric_memory::SymmetricMemoryAllocator>;
  using Mapping = c10::intrusive_ptr<::c10d::symmetric_memory::SymmetricMemory>;

  // `capacity` bytes, rounded up to pages, all of which count at once. Throws what torch throws.
  SymmetricArena(Allocator allocator, at::Device device, int64_t capacity);
  ~SymmetricArena() override;
  SymmetricArena(const SymmetricArena&) = delete;

  // Maps the arenas of all ranks that torch knows under the name. Collective, once. Throws what torch throws.
  void map(const std::string& group);

  // In order of the caller's current stream: where a piece is released, what uses it has been enqueued there, and the
  // next piece in its place is zeroed after that. StateError names the bytes wanted and left.
  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  void zero(std::byte* data, int64_t bytes) noexcept override;
  // The same, not zeroed.
  std::shared_ptr<std::byte> allocate_raw(int64_t bytes);

  at::Device device() const { return device_; }
  int64_t capacity() const { return capacity_; }
  bool holds(const std::byte* data, int64_t bytes) const;
  int64_t offset_of(const std::byte* data) const { return data - base_; }
  // Where a rank's bytes lie for this one. To be read by the device only.
  const std::byte* at(int rank, int64_t offset, int64_t bytes) const;
  // Signals between two ranks, on the current stream of the device. A signal is put once the last one was waited for.
  ::c10d::symmetric_memory::SymmetricMemory& signals() const { return *mapping_; }
  // Channels for signals that the pads have room for.
  int channels() const;

 private:
  const Allocator allocator_;
  const at::Device device_;
  const int64_t capacity_;
  std::byte* const base_;
  FirstFit free_;
  Mapping mapping_;
  std::vector<std::byte*> bases_;  // per rank
};

}  // namespace dovetail::comm
