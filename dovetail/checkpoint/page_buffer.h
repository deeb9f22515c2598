// A large piece of memory that lives briefly: snapshots and staging. Asks for large pages, since
// touching memory for the first time costs more than copying into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace dovetail {

// Contents are zero at first. Movable; gives the memory back to the system when destroyed.
class PageBuffer {
 public:
  PageBuffer() = default;
  explicit PageBuffer(int64_t bytes);  // throws std::bad_alloc
  ~PageBuffer() { release(); }
  PageBuffer(PageBuffer&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  PageBuffer& operator=(PageBuffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    o.release();
    return *this;
  }

  std::byte* data() const { return data_; }
  int64_t size() const { return bytes_; }
  std::span<const std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }

 private:
  void release();

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace dovetail
