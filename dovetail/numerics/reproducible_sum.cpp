#include "dovetail/numerics/reproducible_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

static_assert(std::endian::native == std::endian::little, "the serialized form is the memory of the words");

constexpr int kUnit = -298;          // exponent of the lowest bit
constexpr int kLanes = 16;           // independent accumulators of a grid
constexpr int64_t kChunk = 128 * kLanes;  // values per lane: 2^7, see Grid
constexpr int kGridBits = 44;        // distance of the grids
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNan = 0x7fc00000u;

// The grid for addends of magnitude at most 2^top. A lane starts at 1.5 * 2^k with k = top + 9 and receives at most 2^7
// addends, each rounded to at most 2^top: it moves by at most 2^(top+7) < 2^(k-1) and stays in the binade of k.
// There doubles lie 2^(k-52) apart, so what an addition leaves is at most 2^(k-53) = 2^(top-44).
struct Grid {
  explicit Grid(int magnitude) {
    // Below this the grid would be finer than the squares themselves.
    const int top = std::max(magnitude, kUnit + kGridBits - 1);
    start = std::ldexp(1.5, top + 9);
    quantum = top + 9 - 52;
    next = top - kGridBits;
  }
  double start;
  int quantum;  // exponent of the distance of neighbours
  int next;     // magnitude of what is left
};

DT_VECTOR_CLONES uint32_t max_magnitude(const float* values, int64_t n) {
  const auto* bits = reinterpret_cast<const uint32_t*>(values);
  int32_t result = 0;  // magnitudes fit; signed maxima exist in every vector set
  for (int64_t i = 0; i < n; ++i) result = std::max(result, static_cast<int32_t>(bits[i] & 0x7fffffffu));
  return static_cast<uint32_t>(result);
}

struct Lanes {
  double coarse[kLanes];
  double fine[kLanes];
  double rest[kLanes];  // sum of magnitudes of what neither grid took: zero exactly when nothing is left
};

// n is a multiple of kLanes.
DT_VECTOR_CLONES void add_two_grids(const float* __restrict values, int64_t n, Lanes* __restrict lanes) {
  double coarse[kLanes], fine[kLanes], rest[kLanes];
  std::memcpy(coarse, lanes->coarse, sizeof coarse);
  std::memcpy(fine, lanes->fine, sizeof fine);
  std::memcpy(rest, lanes->rest, sizeof rest);
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const double g = values[i + l];
      double x = g * g;
      const double c = coarse[l] + x;
      x -= c - coarse[l];
      coarse[l] = c;
      const double f = fine[l] + x;
      x -= f - fine[l];
      fine[l] = f;
      rest[l] += std::abs(x);
    }
  }
  std::memcpy(lanes->coarse, coarse, sizeof coarse);
  std::memcpy(lanes->fine, fine, sizeof fine);
  std::memcpy(lanes->rest, rest, sizeof rest);
}

// One grid over rests held in memory; leaves the new rests there and returns whether any is not zero.
DT_VECTOR_CLONES bool add_one_grid(double* __restrict rests, int64_t n, double* __restrict lanes) {
  double sum[kLanes], left[kLanes] = {};
  std::memcpy(sum, lanes, sizeof sum);
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const double s = sum[l] + rests[i + l];
      rests[i + l] -= s - sum[l];
      sum[l] = s;
      left[l] += std::abs(rests[i + l]);
    }
  }
  std::memcpy(lanes, sum, sizeof sum);
  return std::any_of(left, left + kLanes, [](double x) { return x != 0; });
}

// How far the lanes moved from their start, in quanta: neighbours in one binade have neighbouring bit patterns.
int64_t moved(const double* lanes, double start) {
  int64_t result = 0;
  for (int l = 0; l < kLanes; ++l) result += std::bit_cast<int64_t>(lanes[l]) - std::bit_cast<int64_t>(start);
  return result;
}

}  // namespace

void ReproducibleSum::add(std::span<const float> values) {
  const auto n = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < n; i += kChunk) add_chunk(values.data() + i, std::min(kChunk, n - i));
  count_ += n;
}

void ReproducibleSum::add_chunk(const float* values, int64_t n) {
  const uint32_t largest = max_magnitude(values, n);
  absorb_max(largest);
  if (largest == 0 || max_ >= kInfinity) return;

  // Magnitudes lie below 2^(exponent - 126), also where the exponent field is that of denormals.
  const int top = 2 * (static_cast<int>(largest >> 23) - 126);
  const Grid coarse(top), fine(coarse.next);
  Lanes lanes;
  std::fill(lanes.coarse, lanes.coarse + kLanes, coarse.start);
  std::fill(lanes.fine, lanes.fine + kLanes, fine.start);
  std::fill(lanes.rest, lanes.rest + kLanes, 0.0);

  const int64_t whole = n / kLanes * kLanes;
  add_two_grids(values, whole, &lanes);
  if (whole < n) {
    float tail[kLanes] = {};
    std::copy(values + whole, values + n, tail);
    add_two_grids(tail, kLanes, &lanes);
  }
  deposit(moved(lanes.coarse, coarse.start), coarse.quantum);
  deposit(moved(lanes.fine, fine.start), fine.quantum);
  if (std::any_of(lanes.rest, lanes.rest + kLanes, [](double x) { return x != 0; })) add_rest(values, n, top);
}

// Adds what the two grids of add_chunk left.
void ReproducibleSum::add_rest(const float* values, int64_t n, int top) {
  alignas(64) double rests[kChunk];
  for (int64_t i = 0; i < n; ++i) rests[i] = static_cast<double>(values[i]) * values[i];
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  std::fill(rests + n, rests + padded, 0.0);

  bool left = true;
  for (int grid_number = 0; left; ++grid_number) {
    const Grid grid(top);
    double lanes[kLanes];
    std::fill(lanes, lanes + kLanes, grid.start);
    left = add_one_grid(rests, padded, lanes);
    if (grid_number >= 2) deposit(moved(lanes, grid.start), grid.quantum);
    top = grid.next;
  }
}

// Adds quanta * 2^exponent. Rests may be negative, so this is two's complement; the whole sum never is.
void ReproducibleSum::deposit(int64_t quanta, int exponent) {
  if (quanta == 0) return;
  const int shift = exponent - kUnit;
  const auto first = static_cast<size_t>(shift / 64);
  __int128 carry = static_cast<__int128>(quanta) << (shift % 64 / 2) << (shift % 64 - shift % 64 / 2);
  for (size_t w = first; w < words_.size() && carry != 0; ++w) {
    const auto low = static_cast<uint64_t>(carry);
    carry >>= 64;
    words_[w] += low;
    carry += words_[w] < low;
  }
}

void ReproducibleSum::absorb_max(uint32_t bits) {
  max_ = std::max(max_, bits > kInfinity ? kNan : bits);
  if (max_ >= kInfinity) words_.fill(0);  // the result is decided; what is left must not depend on the order
}

void ReproducibleSum::merge(const ReproducibleSum& other) {
  uint64_t carry = 0;
  for (size_t w = 0; w < words_.size(); ++w) {
    const unsigned __int128 sum = static_cast<unsigned __int128>(words_[w]) + other.words_[w] + carry;
    words_[w] = static_cast<uint64_t>(sum);
    carry = static_cast<uint64_t>(sum >> 64);
  }
  count_ += other.count_;
  absorb_max(other.max_);
}

double ReproducibleSum::result() const {
  if (max_ >= kInfinity) return max_abs();
  auto high = static_cast<int>(words_.size()) - 1;
  while (high > 0 && words_[high] == 0) --high;
  if (high == 0) return std::ldexp(static_cast<double>(words_[0]), kUnit);

  // The top 64 bits, the lowest of them set when anything lies below: the conversion then rounds as the whole would.
  const int zeros = std::countl_zero(words_[high]);
  uint64_t top = words_[high] << zeros;
  uint64_t below = words_[high - 1];
  if (zeros > 0) {
    top |= below >> (64 - zeros);
    below <<= zeros;
  }
  for (int w = 0; w < high - 1; ++w) below |= words_[w];
  return std::ldexp(static_cast<double>(top | (below != 0)), kUnit + 64 * high - zeros);
}

float ReproducibleSum::max_abs() const { return std::bit_cast<float>(max_); }

ReproducibleSum::Bytes ReproducibleSum::to_bytes() const {
  Bytes bytes{};
  std::memcpy(bytes.data(), words_.data(), sizeof words_);
  std::memcpy(bytes.data() + 80, &count_, sizeof count_);
  std::memcpy(bytes.data() + 88, &max_, sizeof max_);
  return bytes;
}

ReproducibleSum ReproducibleSum::from_bytes(std::span<const std::byte, kBytes> bytes) {
  ReproducibleSum sum;
  uint32_t zero = 0;
  std::memcpy(sum.words_.data(), bytes.data(), sizeof sum.words_);
  std::memcpy(&sum.count_, bytes.data() + 80, sizeof sum.count_);
  std::memcpy(&sum.max_, bytes.data() + 88, sizeof sum.max_);
  std::memcpy(&zero, bytes.data() + 92, sizeof zero);
  const bool sound = zero == 0 && sum.count_ >= 0 && (sum.max_ <= kInfinity || sum.max_ == kNan);
  if (!sound) raise<CommError>(-1, "a serialized sum of squares is damaged: count {}, largest magnitude {:#x}, "
                               "padding {:#x}", sum.count_, sum.max_, zero);
  return sum;
}

}  // namespace dovetail
