#include "dovetail/update/shampoo_tile.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/numerics/scaling.h"
#include "dovetail/numerics/vector_clones.h"
#include "dovetail/update/dense.h"
#include "dovetail/update/matrix_root.h"

namespace dovetail {
namespace {

constexpr float kMost = std::numeric_limits<float>::max();
constexpr int kLeastExponent = -320;  // of statistics: below any square of an fp32 number
constexpr int64_t kLanes = 16;        // of a sum: the same ones for every vector width

inline double graft_quotient(float g, float square, double most) {
  const double v = g, quotient = v * v / static_cast<double>(square);
  // Neither a square of 0 nor one that is not a number gets past this.
  return g == 0 ? 0 : quotient < most ? quotient : most;
}

// Adds (x scale)^2 / square, at most `most`, to the lanes.
DT_VECTOR_CLONES void add_graft(const float* x, const float* square, float scale, double most,
                                int64_t n, double* __restrict lanes) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j)
      lanes[j] += graft_quotient(x[i + j] * scale, square[i + j], most);
  for (int64_t j = 0; i + j < n; ++j)
    lanes[j] += graft_quotient(x[i + j] * scale, square[i + j], most);
}

double sum_of(const double* lanes) {
  double sum = 0;
  for (int64_t j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

int64_t bytes_of(int64_t values) {
  return round_up(values * static_cast<int64_t>(sizeof(float)), 64);
}

// As kept in ShampooTile::scale.
struct Scale {
  float exponent;  // statistics are multiples of 2^exponent
  float mass;      // sum of the weights of all steps that they average; 1 for sums
  float root[2];   // left and right: roots are multiples of this; 0 until there is one
};
static_assert(sizeof(Scale) == kShampooScaleValues * sizeof(float));

class Preconditioner {
 public:
  Preconditioner(const ShampooOptions& options, const StepContext& context,
                 const ShampooTile& tile, WorkspaceSpan workspace)
      : options_(options), context_(context), tile_(tile),
        packed_(reinterpret_cast<float*>(workspace.data())),
        workspace_(workspace.subspan(bytes_of(tile.rows * tile.columns))) {
    std::memcpy(&scale_, tile.scale.data(), sizeof(Scale));
  }

  void run();

 private:
  bool sums() const { return options_.beta2 == 1; }
  double gain() const { return sums() ? 1 : 1 - options_.beta2; }
  int order() const { return tile_.sides[0].n == 0 ? 2 : 4; }
  float* row(int64_t r) const { return tile_.grad + r * tile_.stride; }

  void pass_on();
  void pack();
  void accumulate();
  void take_roots();
  double true_scale(double value) const;
  double missing_root() const;
  double graft_norm() const;
  double largest_norm() const;
  void write_direction();

  const ShampooOptions& options_;
  const StepContext& context_;
  const ShampooTile& tile_;
  Scale scale_;
  bool zero_ = false;    // the gradient
  int exponent_ = 0;     // of its largest element, if it is not zero
  float* const packed_;  // the gradient divided by 2^exponent_
  const WorkspaceSpan workspace_;
};

void Preconditioner::run() {
  uint32_t most = 0;
  for (int64_t r = 0; r < tile_.rows; ++r)
    most = std::max(most, largest_magnitude_bits(row(r), context_.grad_scale, tile_.columns));
  if (most >= kInfinityBits) return pass_on();
  zero_ = most == 0;
  if (!zero_) {
    exponent_ = std::ilogb(std::bit_cast<float>(most));
    pack();
  }
  accumulate();
  if (shampoo_takes_roots(options_, context_.step)) take_roots();
  std::memcpy(tile_.scale.data(), &scale_, sizeof(Scale));
  if (zero_) pass_on();
  else write_direction();
}

void Preconditioner::pass_on() {
  for (int64_t r = 0; r < tile_.rows; ++r)
    scale_into(row(r), context_.grad_scale, 1, tile_.columns, row(r));
}

// In aligned memory and with a largest element of 1 to 2: products depend neither on where the tile
// lies nor on its magnitude.
void Preconditioner::pack() {
  const double unit = std::ldexp(1.0, -exponent_);
  for (int64_t r = 0; r < tile_.rows; ++r)
    scale_into(row(r), context_.grad_scale, unit, tile_.columns, packed_ + r * tile_.columns);
}

// The exponent of the statistics follows the larger one of what they hold and what is added, so
// that their entries stay near 1. Scaling by powers of two is exact.
void Preconditioner::accumulate() {
  const ShampooSide& right = tile_.sides[1];
  float diagonal = 0;
  for (int64_t i = 0; i < right.n; ++i) {
    const float d = right.statistics[triangle_values(i) + i];
    if (d > diagonal && d <= kMost) diagonal = d;
  }
  const auto old = static_cast<int>(scale_.exponent);
  int exponent = kLeastExponent;
  if (diagonal > 0) exponent = std::max(exponent, old + std::ilogb(diagonal));
  if (!zero_) exponent = std::max(exponent, 2 * exponent_);
  const auto scaled = [&](double x, int e) {
    return static_cast<float>(std::ldexp(x, e - exponent));
  };
  const float keep = diagonal > 0 ? scaled(options_.beta2, old) : 0;
  const float add = zero_ ? 0 : scaled(gain(), 2 * exponent_);

  for (int s = 0; s < 2; ++s) {
    const ShampooSide& side = tile_.sides[s];
    if (side.n == 0) continue;
    if (zero_)
      for (float& x : side.statistics) x *= keep;
    else
      add_gram(s == 0 ? Gram::of_rows : Gram::of_columns, packed_, tile_.rows, tile_.columns, keep,
               add, side.statistics, workspace_);
  }
  scale_.exponent = static_cast<float>(exponent);
  scale_.mass = sums() ? 1 : static_cast<float>(options_.beta2 * scale_.mass + gain());
}

// The root of a number that the statistics' entries are multiples of.
double Preconditioner::true_scale(double value) const {
  const double power = -1.0 / order();
  return std::min<double>(std::pow(value / scale_.mass, power) * std::exp2(scale_.exponent * power),
                          kMost);
}

void Preconditioner::take_roots() {
  for (int s = 0; s < 2; ++s) {
    const ShampooSide& side = tile_.sides[s];
    if (side.n == 0) continue;
    const std::optional<double> lambda = inverse_root(side.statistics, side.n, order(),
                                                      options_.epsilon, side.root, workspace_);
    // Without one the last one stays.
    if (lambda) scale_.root[s] = static_cast<float>(true_scale(*lambda));
  }
}

double Preconditioner::missing_root() const {
  const ShampooSide& right = tile_.sides[1];  // the trace is the left one's too
  double trace = 0;
  for (int64_t i = 0; i < right.n; ++i) trace += right.statistics[triangle_values(i) + i];
  return true_scale(trace);
}

double Preconditioner::graft_norm() const {
  if (options_.grafting == Grafting::sgd)
    return std::ldexp(std::sqrt(sum_of_squares(packed_, tile_.rows * tile_.columns)), exponent_);
  double lanes[kLanes] = {};
  for (int64_t r = 0; r < tile_.rows; ++r)
    add_graft(row(r), tile_.graft_sq + r * tile_.stride, context_.grad_scale, 1 / gain(),
              tile_.columns, lanes);
  const double bias = sums() ? 1 : 1 - std::pow(options_.beta2, static_cast<double>(context_.step));
  return std::sqrt(bias * sum_of(lanes));
}

// Of a direction by roots of these very statistics: L >= (1 - beta2)/c G G^T, and the same on the
// right, bound its singular values by sqrt(c / (1 - beta2)).
double Preconditioner::largest_norm() const {
  return std::sqrt(static_cast<double>(std::min(tile_.rows, tile_.columns)) * scale_.mass / gain());
}

void Preconditioner::write_direction() {
  const int64_t rows = tile_.rows, columns = tile_.columns, size = rows * columns;
  const bool grafts = options_.grafting != Grafting::none;
  double factor = grafts ? graft_norm() : std::ldexp(1.0, exponent_);
  float* from = packed_;
  float* to = reinterpret_cast<float*>(workspace_.data());
  float* whole = reinterpret_cast<float*>(workspace_.data() + bytes_of(size));
  for (int s = 0; s < 2; ++s) {
    const ShampooSide& side = tile_.sides[s];
    if (side.n == 0) continue;
    const bool has_root = scale_.root[s] != 0;
    if (!grafts) factor *= has_root ? scale_.root[s] : missing_root();
    if (!has_root) continue;
    expand_triangle(side.root, side.n, whole);
    const at::Tensor root = matrix_at(whole, side.n, side.n), g = matrix_at(from, rows, columns);
    at::Tensor out = matrix_at(to, rows, columns);
    if (s == 0) at::mm_out(out, root, g);
    else at::mm_out(out, g, root);
    std::swap(from, to);
  }
  const double norm = std::sqrt(sum_of_squares(from, size));  // not 0: roots have eigenvalues from 1 on
  factor = grafts ? factor / norm : std::min(factor, largest_norm() / norm);
  for (int64_t r = 0; r < rows; ++r) scale_into(from + r * columns, 1, factor, columns, row(r));
}

}  // namespace

void precondition(const ShampooOptions& options, const StepContext& context,
                  const ShampooTile& tile, WorkspaceSpan workspace) {
  DT_CHECK_GE(context.step, 1, "shampoo");
  DT_CHECK_EQ(std::ssize(tile.scale), kShampooScaleValues, "shampoo_scale");
  DT_CHECK_GE(std::ssize(workspace), shampoo_workspace(tile.rows, tile.columns), "shampoo");
  const at::NoGradGuard no_grad;
  Preconditioner(options, context, tile, workspace).run();
}

int64_t shampoo_workspace(int64_t rows, int64_t columns) {
  const int64_t side = std::max(rows, columns), tile = bytes_of(rows * columns);
  return tile + std::max({gram_workspace(side), inverse_root_workspace(side),
                          tile + bytes_of(side * side)});
}

double shampoo_flops(const ShampooOptions& options, int64_t rows, int64_t columns, bool left) {
  const auto size = static_cast<double>(rows * columns);
  const auto side = [&](int64_t n, int64_t inner) {
    return gram_flops(n, inner) + 2 * size * static_cast<double>(n) +
           inverse_root_flops(n) / static_cast<double>(options.every);
  };
  // 16: the largest element, packing, norms.
  return 16 * size + side(columns, rows) + (left ? side(rows, columns) : 0);
}

}  // namespace dovetail
