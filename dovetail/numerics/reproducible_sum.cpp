#include "dovetail/numerics/reproducible_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the serialized form is the memory of the words");

constexpr int kUnit = -298;               // exponent of the lowest bit
constexpr int kLanes = 16;                // independent accumulators of a grid
constexpr int64_t kChunk = 128 * kLanes;  // 2^7 values per lane, see Grid
constexpr int kGridBits = 44;             // distance of the grids
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNan = 0x7fc00000u;

// The grid for addends of magnitude at most 2^top. A lane starts at 1.5 * 2^k with k = top + 9 and
// receives at most 2^7 addends, each rounded to at most 2^top: it moves by at most 2^(top+7), less
// than 2^(k-1), and stays in the binade of k. There doubles lie 2^(k-52) apart, so what an addition
// leaves of its addend is at most 2^(k-53) = 2^(top-44).
struct Grid {
  double start;
  int quantum;  // exponent of the distance of neighbours
};

Grid grid_for(int top) {
  // Below this the grid would be finer than the squares themselves.
  top = std::max(top, kUnit + kGridBits - 1);
  return {std::ldexp(1.5, top + 9), top + 9 - 52};
}

DT_VECTOR_CLONES uint32_t max_magnitude(const float* values, int64_t n) {
  const auto* bits = reinterpret_cast<const uint32_t*>(values);
  int32_t result = 0;  // magnitudes fit; signed maxima exist in every vector set
  for (int64_t i = 0; i < n; ++i)
    result = std::max(result, static_cast<int32_t>(bits[i] & 0x7fffffffu));
  return static_cast<uint32_t>(result);
}

// Accumulators of `Grids` grids, coarse to fine, and the sum of the magnitudes of what none of them
// took: zero exactly when nothing was left.
template <int Grids>
struct Lanes {
  double sum[Grids][kLanes];
  double rest[kLanes];
};

// n is a multiple of kLanes. Inlined into the clones below and made vector code there.
template <int Grids>
[[gnu::always_inline]] inline void add_values(const float* __restrict values, int64_t n,
                                              Lanes<Grids>* __restrict lanes) {
  Lanes<Grids> local = *lanes;  // so that the accumulators live in registers
  for (int64_t i = 0; i < n; i += kLanes) {
    __builtin_prefetch(values + i + kChunk);  // the next chunk
    for (int l = 0; l < kLanes; ++l) {
      const double g = values[i + l];
      double x = g * g;
#pragma GCC unroll 13
      for (int grid = 0; grid < Grids; ++grid) {
        const double sum = local.sum[grid][l] + x;
        x -= sum - local.sum[grid][l];
        local.sum[grid][l] = sum;
      }
      local.rest[l] += std::abs(x);
    }
  }
  *lanes = local;
}

// 2 grids are enough for nearly every chunk of real gradients; 13 hold every fp32 square.
DT_VECTOR_CLONES void add_to(const float* values, int64_t n, Lanes<2>* lanes) {
  add_values(values, n, lanes);
}
DT_VECTOR_CLONES void add_to(const float* values, int64_t n, Lanes<4>* lanes) {
  add_values(values, n, lanes);
}
DT_VECTOR_CLONES void add_to(const float* values, int64_t n, Lanes<13>* lanes) {
  add_values(values, n, lanes);
}

// How far the lanes moved from their start, in quanta: doubles that are neighbours in a binade have
// neighbouring bit patterns.
int64_t moved(const double* lanes, double start) {
  int64_t result = 0;
  for (int l = 0; l < kLanes; ++l)
    result += std::bit_cast<int64_t>(lanes[l]) - std::bit_cast<int64_t>(start);
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
  if (add_with<2>(values, n, top) || add_with<4>(values, n, top)) return;
  const bool done = add_with<13>(values, n, top);
  DT_CHECK(done, "13 grids of {} bits did not hold a square", kGridBits);
}

// Adds the squares when that many grids below 2^top hold every bit of them.
template <int Grids>
bool ReproducibleSum::add_with(const float* values, int64_t n, int top) {
  Grid grids[Grids];
  Lanes<Grids> lanes{};
  for (int i = 0; i < Grids; ++i) {
    grids[i] = grid_for(top - i * kGridBits);
    std::fill_n(lanes.sum[i], kLanes, grids[i].start);
  }
  const int64_t whole = n / kLanes * kLanes;
  add_to(values, whole, &lanes);
  if (whole < n) {
    float tail[kLanes] = {};
    std::copy(values + whole, values + n, tail);
    add_to(tail, kLanes, &lanes);
  }
  if (std::any_of(lanes.rest, lanes.rest + kLanes, [](double x) { return x != 0; })) return false;
  for (int i = 0; i < Grids; ++i) deposit(moved(lanes.sum[i], grids[i].start), grids[i].quantum);
  return true;
}

// Adds quanta * 2^exponent. What a finer grid takes may be negative, so this is two's complement.
void ReproducibleSum::deposit(int64_t quanta, int exponent) {
  if (quanta == 0) return;
  const int shift = exponent - kUnit;
  const auto first = static_cast<size_t>(shift / 64);
  __int128 carry = static_cast<__int128>(quanta) << (shift % 64);
  for (size_t w = first; w < words_.size() && carry != 0; ++w) {
    const auto low = static_cast<uint64_t>(carry);
    carry >>= 64;
    words_[w] += low;
    carry += words_[w] < low;
  }
}

void ReproducibleSum::absorb_max(uint32_t bits) {
  max_ = std::max(max_, bits > kInfinity ? kNan : bits);
  if (max_ >= kInfinity)
    words_.fill(0);  // the result is decided; what is left must not depend on the order
}

void ReproducibleSum::merge(const ReproducibleSum& other) {
  uint64_t carry = 0;
  for (size_t w = 0; w < words_.size(); ++w) {
    const unsigned __int128 sum =
        static_cast<unsigned __int128>(words_[w]) + other.words_[w] + carry;
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

  // The top 64 bits, the lowest of them set when anything lies below: the conversion then rounds as
  // the whole would.
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
  if (!sound)
    throw CommError(-1, fmt::format("a serialized sum of squares is damaged: count {}, largest "
                                    "magnitude {:#x}, padding {:#x}",
                                    sum.count_, sum.max_, zero));
  return sum;
}

}  // namespace dovetail
