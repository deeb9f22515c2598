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
};

// Private memory: anonymous mappings, so that pages count only once touched.
class HostAllocator : public Allocator {
 public:
  Memory allocate(int64_t bytes, Role role) override;
};

// One allocation of a role, entered in the ledger for as long as it exists. The allocator and ledger must outlive it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Allocator& allocator, Ledger& ledger, int64_t bytes, Role role);
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { reset(); }

  std::byte* data() const { return memory_.data; }
  int64_t bytes() const { return memory_.bytes; }
  const Memory& memory() const { return memory_; }
  void reset();

 private:
  Memory memory_;
  Ledger* ledger_ = nullptr;
  Role role_ = Role::slot;
};

}  // namespace dovetail
