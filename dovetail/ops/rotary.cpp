#include "dovetail/ops/rotary.h"

#include <ATen/ops/empty.h>

#include <cmath>

#include "dovetail/ops/autograd.h"
#include "dovetail/ops/row_kernels.h"
#include "dovetail/ops/rows.h"

namespace dovetail::ops {
namespace {

// x [batch, length, heads, d], dense.
at::Tensor turn(const at::Tensor& x, const RotaryTable& table, float direction,
                at::ScalarType out_type) {
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(out_type));
  const int64_t length = x.size(1), heads = x.size(2), d = x.size(3), width = heads * d;
  parallel_rows(x.size(0) * length, width, [&](int64_t begin, int64_t end) {
    RowReader read(x, width);
    RowWriter write(y, width);
    for (int64_t i = begin; i < end; ++i) {
      const float* from = read.read(i * width);
      float* to = write.place(i * width);
      const float *cosine = table.cosine(i % length), *sine = table.sine(i % length);
      for (int64_t h = 0; h < heads; ++h)
        rows::rotate(from + h * d, cosine, sine, direction, to + h * d, table.half());
      write.commit();
    }
  });
  return y;
}

at::Tensor rotate_recorded(const at::Tensor& x, const std::shared_ptr<const RotaryTable>& table,
                           float direction, at::ScalarType out_type);

class RotaryNode : public Node {
 public:
  RotaryNode(std::shared_ptr<const RotaryTable> table, float direction, at::ScalarType in_type)
      : table_(std::move(table)), direction_(direction), in_type_(in_type) {}

  std::string name() const override { return "dovetail::RotaryBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return variable_list(1);
    return {rotate_recorded(grads[0].contiguous(), table_, -direction_, in_type_)};
  }

 private:
  std::shared_ptr<const RotaryTable> table_;
  float direction_;
  at::ScalarType in_type_;
};

at::Tensor rotate_recorded(const at::Tensor& x, const std::shared_ptr<const RotaryTable>& table,
                           float direction, at::ScalarType out_type) {
  at::Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = turn(x, *table, direction, out_type);
  }
  if (records_graph(x))
    record(c10::make_intrusive<RotaryNode>(table, direction, x.scalar_type()), y, x);
  return y;
}

}  // namespace

RotaryTable::RotaryTable(int64_t head_dim, int64_t positions, double base)
    : half_(head_dim / 2), positions_(positions) {
  if (head_dim <= 0 || head_dim % 2 != 0)
    raise<ConfigError>("rotary: wants an even head size, got {}", head_dim);
  cosine_.resize(static_cast<size_t>(half_ * positions));
  sine_.resize(cosine_.size());
  for (int64_t i = 0; i < half_; ++i) {
    // fp32 frequencies and angles, as the reference implementation has them: weights were trained
    // with those.
    const float power = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    const float frequency = 1.0f / std::pow(static_cast<float>(base), power);
    for (int64_t t = 0; t < positions; ++t) {
      const float angle = static_cast<float>(t) * frequency;
      cosine_[t * half_ + i] = std::cos(angle);
      sine_[t * half_ + i] = std::sin(angle);
    }
  }
}

at::Tensor rotate_heads(const at::Tensor& x, const std::shared_ptr<const RotaryTable>& table,
                        at::ScalarType out_type) {
  check_float_rows(x, "rotate_heads");
  const int64_t d = 2 * table->half();
  if (x.dim() != 3 || x.size(2) % d != 0)
    raise<ConfigError>("rotate_heads: wants [batch, length, heads * {}], got {}", d,
                       c10::str(x.sizes()));
  if (x.size(1) > table->positions())
    raise<ConfigError>(
        "rotate_heads: a sequence of {} is longer than the {} positions of the table", x.size(1),
        table->positions());
  const at::Tensor heads = x.contiguous().view({x.size(0), x.size(1), x.size(2) / d, d});
  return rotate_recorded(heads, table, 1.0f, out_type);
}

}  // namespace dovetail::ops
