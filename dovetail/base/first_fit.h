// Room in a run of bytes, given out first fit; neighbours that come back are one again.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace dovetail {

class FirstFit {
 public:
  // The room [begin, end).
  FirstFit(int64_t begin, int64_t end);
  // Offset of so many bytes (positive); nothing where no piece is large enough.
  std::optional<int64_t> take(int64_t bytes);
  // What take() gave, with the same size.
  void give(int64_t offset, int64_t bytes);
  int64_t left() const;     // bytes in all
  int64_t largest() const;  // of the largest piece
  const std::map<int64_t, int64_t>& pieces() const { return free_; }  // offset -> bytes, not adjacent

 private:
  std::map<int64_t, int64_t> free_;
};

}  // namespace dovetail
