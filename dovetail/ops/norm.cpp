#include "dovetail/ops/norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "dovetail/base/math.h"
#include "dovetail/ops/autograd.h"
#include "dovetail/ops/row_kernels.h"
#include "dovetail/ops/rows.h"

namespace dovetail::ops {
namespace {

constexpr int64_t kBlockRows = 32;  // rows whose share of the weight gradient is summed by one task

std::vector<float> as_floats(const at::Tensor& weight) {
  const at::Tensor w = weight.to(at::kFloat).contiguous();
  return {w.const_data_ptr<float>(), w.const_data_ptr<float>() + w.numel()};
}

// Returns y; `scales` [rows] gets 1 / rms of each row.
at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, float eps, at::Tensor& scales) {
  const int64_t n = weight.size(0), count = n == 0 ? 0 : x.numel() / n;
  const std::vector<float> w = as_floats(weight);
  at::Tensor y = at::empty_like(x);
  scales = at::empty({count}, at::kFloat);
  float* r = scales.mutable_data_ptr<float>();
  parallel_rows(count, n, [&](int64_t begin, int64_t end) {
    RowReader read(x, n);
    RowWriter write(y, n);
    for (int64_t i = begin; i < end; ++i) {
      r[i] = rows::rms_forward(read.read(i * n), w.data(), write.place(i * n), n, eps);
      write.commit();
    }
  });
  return y;
}

struct Gradients {
  at::Tensor dx, dw;
};

Gradients backward(const at::Tensor& g, const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& scales) {
  const int64_t n = weight.size(0), count = scales.size(0), blocks = ceil_div(count, kBlockRows);
  const std::vector<float> w = as_floats(weight);
  const float* r = scales.const_data_ptr<float>();
  at::Tensor dx = at::empty_like(x),
             partial = at::zeros({std::max<int64_t>(blocks, 1), n}, at::kFloat);
  float* dw = partial.mutable_data_ptr<float>();
  parallel_rows(blocks, n * kBlockRows, [&](int64_t begin, int64_t end) {
    RowReader read_g(g, n), read_x(x, n);
    RowWriter write(dx, n);
    for (int64_t i = begin * kBlockRows; i < std::min(end * kBlockRows, count); ++i) {
      rows::rms_backward(read_g.read(i * n), read_x.read(i * n), w.data(), r[i], write.place(i * n),
                         dw + i / kBlockRows * n, n);
      write.commit();
    }
  });
  for (int64_t b = 1; b < blocks; ++b) rows::accumulate(dw + b * n, dw, n);
  return {dx, partial[0].to(weight.scalar_type())};
}

// The same gradients as differentiable operations.
Gradients differentiable(const at::Tensor& grad, const at::Tensor& saved_x,
                         const at::Tensor& weight, double eps) {
  const at::Tensor x = saved_x.to(at::kFloat), g = grad.to(at::kFloat), w = weight.to(at::kFloat);
  const at::Tensor r = (x.pow(2).mean(-1, true) + eps).rsqrt();
  const at::Tensor gw = g * w;
  const at::Tensor dx = r * gw - x * r.pow(3) * (gw * x).mean(-1, true);
  return {dx.to(saved_x.scalar_type()),
          (g * x * r).reshape({-1, w.size(0)}).sum(0).to(weight.scalar_type())};
}

class RmsNode : public Node {
 public:
  RmsNode(const at::Tensor& x, const at::Tensor& weight, at::Tensor scales, double eps)
      : x_(x, false), weight_(weight, false), scales_(std::move(scales)), eps_(eps) {}

  std::string name() const override { return "dovetail::RmsNormBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list out(2);
    if (!grads[0].defined()) return out;
    const at::Tensor x = x_.unpack(), weight = weight_.unpack();
    const Gradients r = at::GradMode::is_enabled()
                            ? differentiable(grads[0], x, weight, eps_)
                            : backward(grads[0].contiguous(), x, weight, scales_);
    if (task_should_compute_output(0)) out[0] = r.dx;
    if (task_should_compute_output(1)) out[1] = r.dw;
    return out;
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
    scales_.reset();
  }

 private:
  SavedVariable x_, weight_;
  at::Tensor scales_;
  double eps_;
};

}  // namespace

at::Tensor rms_normalize(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_float_rows(x, "rms_normalize");
  if (weight.dim() != 1 || x.dim() < 1 || x.size(-1) != weight.size(0) ||
      x.scalar_type() != weight.scalar_type())
    raise<ConfigError>("rms_normalize: x {} {} does not fit weight {} {}",
                       c10::toString(x.scalar_type()), c10::str(x.sizes()),
                       c10::toString(weight.scalar_type()), c10::str(weight.sizes()));
  const at::Tensor dense = x.contiguous();
  at::Tensor y, scales;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = forward(dense, weight, static_cast<float>(eps), scales);
  }
  if (records_graph(dense, weight))
    record(c10::make_intrusive<RmsNode>(dense, weight, scales, eps), y, dense, weight);
  return y;
}

RMSNorm::RMSNorm(int64_t dim, double eps, const at::TensorOptions& options) : eps_(eps) {
  weight = register_parameter("weight", at::empty({dim}, options));
}

}  // namespace dovetail::ops
