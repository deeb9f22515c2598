// Where an engine's bytes come from. A transport of shared mappings supplies an allocator of its
// own for the roles that its peers must be able to address; everything else lies in private memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "dovetail/storage/ledger.h"

namespace dovetail {

// A run of bytes that lives as long as any copy of `owner`. Zero-filled when new; aligned to 64 bytes.
struct Memory {
  std::shared_ptr<void> owner;
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

class Allocator {
 public:
  virtual ~Allocator() = default;
  // Throws StateError naming the role and size when there is no memory. Zero bytes give a null pointer.
  virtual Memory allocate(int64_t bytes, Role role) = 0;
  // Zeroes bytes of memory allocated here. Pages wholly inside go back to the system until they are written again.
  virtual void zero(std::byte* data, int64_t bytes) noexcept = 0;
};

// Private memory: anonymous mappings, so that pages count only once touched; of huge pages where they fit and the
// system has them, since gradient shards are given back and touched again every step.
class HostAllocator : public Allocator {
 public:
  // huge_pages false: for what is written here and there, which would touch them all.
  explicit HostAllocator(bool huge_pages = true) : huge_pages_(huge_pages) {}
  Memory allocate(int64_t bytes, Role role) override;
  void zero(std::byte* data, int64_t bytes) noexcept override;

 private:
  const bool huge_pages_;
};

// One allocation of a role, entered in the ledger for as long as it exists. The allocator and ledger must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Allocator& allocator, Ledger& ledger, int64_t bytes, Role role);
  // Memory that exists already, of which `share` bytes are this rank's; the allocator is the one that can zero it.
  Buffer(Memory memory, Allocator& allocator, Ledger& ledger, int64_t share, Role role);
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { reset(); }

  std::byte* data() const { return memory_.data; }
  int64_t bytes() const { return memory_.bytes; }
  const Memory& memory() const { return memory_; }
  void reset();
  // Zeroes all, or some. What is zero is still held, but takes no memory until it is written (Allocator::zero).
  void zero() noexcept { zero(memory_.data, memory_.bytes); }
  void zero(std::byte* data, int64_t bytes) noexcept;

 private:
  Memory memory_;
  Allocator* allocator_ = nullptr;
  Ledger* ledger_ = nullptr;
  int64_t counted_ = 0;
  Role role_ = Role::slot;
};

}  // namespace dovetail
