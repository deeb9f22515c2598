#include "dovetail/ops/swiglu.h"

#include <ATen/ops/empty_like.h>

#include "dovetail/base/math.h"
#include "dovetail/ops/autograd.h"
#include "dovetail/ops/row_kernels.h"
#include "dovetail/ops/rows.h"

namespace dovetail::ops {
namespace {

constexpr int64_t kChunk = 2048;  // elements that one task handles at a time

// Calls body(offset, count) over all elements.
template <class Make>
void for_chunks(int64_t elements, Make&& make_body) {
  parallel_rows(ceil_div(elements, kChunk), kChunk, [&](int64_t begin, int64_t end) {
    auto body = make_body();
    for (int64_t c = begin; c < end; ++c) body(c * kChunk, std::min(kChunk, elements - c * kChunk));
  });
}

at::Tensor forward(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor y = at::empty_like(a);
  for_chunks(a.numel(), [&] {
    return [ra = RowReader(a, kChunk), rb = RowReader(b, kChunk), w = RowWriter(y, kChunk)](
               int64_t at, int64_t n) mutable {
      rows::swiglu_forward(ra.read(at, n), rb.read(at, n), w.place(at, n), n);
      w.commit();
    };
  });
  return y;
}

variable_list backward(const at::Tensor& g, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor da = at::empty_like(a), db = at::empty_like(b);
  for_chunks(a.numel(), [&] {
    return [rg = RowReader(g, kChunk), ra = RowReader(a, kChunk), rb = RowReader(b, kChunk),
            wa = RowWriter(da, kChunk), wb = RowWriter(db, kChunk)](int64_t at, int64_t n) mutable {
      rows::swiglu_backward(rg.read(at, n), ra.read(at, n), rb.read(at, n), wa.place(at, n),
                            wb.place(at, n), n);
      wa.commit();
      wb.commit();
    };
  });
  return {da, db};
}

// The same gradients as differentiable operations.
variable_list differentiable(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor g = grad.to(at::kFloat), a = gate.to(at::kFloat), b = up.to(at::kFloat),
                   s = a.sigmoid();
  return {(g * b * s * (1 + a * (1 - s))).to(gate.scalar_type()), (g * a * s).to(up.scalar_type())};
}

class SwigluNode : public Node {
 public:
  SwigluNode(const at::Tensor& gate, const at::Tensor& up) : gate_(gate, false), up_(up, false) {}

  std::string name() const override { return "dovetail::SwigluBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return variable_list(2);
    const at::Tensor gate = gate_.unpack(), up = up_.unpack();
    return at::GradMode::is_enabled() ? differentiable(grads[0], gate, up)
                                      : backward(grads[0].contiguous(), gate, up);
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    gate_.reset_data();
    up_.reset_data();
  }

 private:
  SavedVariable gate_, up_;
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  check_float_rows(gate, "swiglu");
  if (gate.sizes() != up.sizes() || gate.scalar_type() != up.scalar_type())
    raise<ConfigError>("swiglu: gate {} {} and up {} {} differ", c10::toString(gate.scalar_type()),
                       c10::str(gate.sizes()), c10::toString(up.scalar_type()),
                       c10::str(up.sizes()));
  const at::Tensor a = gate.contiguous(), b = up.contiguous();
  at::Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    y = forward(a, b);
  }
  if (records_graph(a, b)) record(c10::make_intrusive<SwigluNode>(a, b), y, a, b);
  return y;
}

}  // namespace dovetail::ops
