#include "dovetail/comm/c10d/symmetric_arena.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zero.h>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/base/pages.h"

namespace dovetail::comm {

at::Tensor tensor_at(const void* data, int64_t count, at::ScalarType type, at::Device device) {
  // With a target device torch does not ask the driver, which would name a peer's device for a peer's memory.
  return at::for_blob(const_cast<void*>(data), {count})
      .options(at::TensorOptions().dtype(type).device(device))
      .target_device(device)
      .make_tensor();
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes, at::Device device) {
  if (bytes > 0) tensor_at(to, bytes, at::kByte, device).copy_(tensor_at(from, bytes, at::kByte, device), true);
}

SymmetricArena::SymmetricArena(Allocator allocator, at::Device device, int64_t capacity)
    : allocator_(std::move(allocator)),
      device_(device),
      capacity_(round_up(capacity, kPageBytes)),
      base_(static_cast<std::byte*>(
          allocator_->alloc(static_cast<size_t>(capacity_), std::max<int>(device.index(), 0), std::nullopt))),
      free_(0, capacity_) {}

SymmetricArena::~SymmetricArena() {
  mapping_.reset();
  allocator_->free(base_);
}

void SymmetricArena::map(const std::string& group) {
  mapping_ = allocator_->rendezvous(base_, group);
  for (void* base : mapping_->get_buffer_ptrs()) bases_.push_back(static_cast<std::byte*>(base));
}

std::shared_ptr<std::byte> SymmetricArena::allocate_raw(int64_t bytes) {
  if (bytes == 0) return nullptr;
  const int64_t size = round_up(bytes, kPageBytes);
  const std::optional<int64_t> offset = free_.take(size);
  if (!offset)
    raise<StateError>("symmetric memory: wanted {} bytes, got an arena of {} with {} left, {} of them in one piece",
                      bytes, capacity_, free_.left(), free_.largest());
  return {base_ + *offset,
          [self = shared_from_this(), at = *offset, size](std::byte*) { self->free_.give(at, size); }};
}

std::shared_ptr<std::byte> SymmetricArena::allocate(int64_t bytes) {
  std::shared_ptr<std::byte> piece = allocate_raw(bytes);
  if (bytes > 0) tensor_at(piece.get(), bytes, at::kByte, device_).zero_();
  return piece;
}

void SymmetricArena::zero(std::byte* data, int64_t bytes) noexcept {
  if (bytes > 0) tensor_at(data, bytes, at::kByte, device_).zero_();
}

bool SymmetricArena::holds(const std::byte* data, int64_t bytes) const {
  return data >= base_ && data - base_ <= capacity_ - bytes;
}

const std::byte* SymmetricArena::at(int rank, int64_t offset, int64_t bytes) const {
  DT_CHECK(offset >= 0 && bytes >= 0 && offset <= capacity_ - bytes,
           "bytes [{}, {}) in the arena of rank {}, of {} bytes", offset, offset + bytes, rank, capacity_);
  return bases_.at(rank) + offset;
}

int SymmetricArena::channels() const {
  return static_cast<int>(mapping_->get_signal_pad_size() / (sizeof(uint32_t) * bases_.size()));
}

}  // namespace dovetail::comm
