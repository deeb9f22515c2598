// Zeroing memory by giving its pages back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dovetail {

inline constexpr int64_t kPageBytes = 4096;
inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Zeroes bytes: `give_back(pages, bytes)` frees whole pages so that they read as zero, or returns false; what it does
// not take is overwritten.
template <class GiveBack>
void zero_pages(std::byte* data, int64_t bytes, GiveBack&& give_back) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const int64_t before = static_cast<int64_t>(-address % kPageBytes);
  const int64_t whole = bytes > before ? (bytes - before) / kPageBytes * kPageBytes : 0;
  if (whole == 0 || !give_back(data + before, whole)) {
    std::memset(data, 0, static_cast<size_t>(bytes));
    return;
  }
  std::memset(data, 0, static_cast<size_t>(before));
  std::memset(data + before + whole, 0, static_cast<size_t>(bytes - before - whole));
}

}  // namespace dovetail
