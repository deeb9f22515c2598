// The sum of squares and the largest magnitude of fp32 values, exact, so that no split of the
// values over spans, ranks or vector lanes and no order of them can show in the result.
//
// Squares are added into a 640-bit integer that counts units of 2^-298, the lowest bit that the
// square of an fp32 value can have. The highest is 2^255, so 2^86 values fit: nothing is ever
// rounded or lost, and merging is integer addition.
//
// Speed comes from adding a chunk of values in double first. Adding x to an accumulator that stays
// within one binade rounds x to the grid of that binade; the rounded part is what the accumulator
// grew by, the rest is exact and goes to the next grid, 44 bits finer. Two grids hold every bit of
// values down to 2^-19 of the chunk's largest; a chunk for which a rest remains is done again with
// more grids, and 13 hold all there is. Grids thus decide the time taken, never the sum.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dovetail {

class ReproducibleSum {
 public:
  static constexpr size_t kBytes = 96;
  using Bytes = std::array<std::byte, kBytes>;

  void add(std::span<const float> values);
  void merge(const ReproducibleSum& other);

  // The sum of squares, rounded once to nearest even. NaN when a NaN was added, else infinity when
  // an infinity was.
  double result() const;
  // The largest magnitude; 0 when nothing was added. NaN and infinity as above.
  float max_abs() const;
  // Values added.
  int64_t count() const { return count_; }

  // Equal values give equal bytes (little-endian): sums can be compared and hashed by them.
  Bytes to_bytes() const;
  static ReproducibleSum from_bytes(std::span<const std::byte, kBytes> bytes);

  bool operator==(const ReproducibleSum&) const = default;

 private:
  void add_chunk(const float* values, int64_t n);
  template <int Grids>
  bool add_with(const float* values, int64_t n, int top);
  void deposit(int64_t quanta, int exponent);
  void absorb_max(uint32_t bits);

  // Little-endian integer in units of 2^-298; all zero once max_ is not finite.
  std::array<uint64_t, 10> words_{};
  int64_t count_ = 0;
  uint32_t max_ = 0;  // bits of the largest magnitude; one fixed NaN when any was added
};

}  // namespace dovetail
