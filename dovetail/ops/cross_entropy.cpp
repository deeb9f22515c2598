#include "dovetail/ops/cross_entropy.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>

#include <cmath>

#include "dovetail/ops/autograd.h"
#include "dovetail/ops/row_kernels.h"
#include "dovetail/ops/rows.h"

namespace dovetail::ops {
namespace {

// Of each row: softmax = exp(logit - top) / sum. Kept apart, for where logits are large.
struct Normalizer {
  float top = 0, sum = 1;
};
using Normalizers = std::vector<Normalizer>;

class CrossEntropyNode : public Node {
 public:
  CrossEntropyNode(const at::Tensor& logits, at::Tensor targets, Normalizers normalizers,
                   LogitsUse use, int64_t ignored)
      : logits_(logits, false),
        targets_(std::move(targets)),
        normalizers_(std::move(normalizers)),
        use_(use),
        ignored_(ignored) {}

  std::string name() const override { return "dovetail::CrossEntropyBackward"; }

  variable_list apply(variable_list&& grads) override {
    refuse_second_order("softmax_cross_entropy");
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined()) return variable_list(1);
    if (spent_)
      raise<StateError>("softmax_cross_entropy: backward ran before and overwrote the logits");
    const at::Tensor logits = logits_.unpack().detach();
    spent_ = use_ == LogitsUse::overwrite;
    const at::Tensor grad = spent_ ? logits : at::empty_like(logits);
    write(logits, grads[0].item<float>(), grad);
    return {grad};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    logits_.reset_data();
    targets_.reset();
  }

 private:
  void write(const at::Tensor& logits, float scale, const at::Tensor& grad) const {
    const int64_t classes = logits.size(-1);
    const int64_t* target = targets_.const_data_ptr<int64_t>();
    parallel_rows(targets_.numel(), classes, [&](int64_t begin, int64_t end) {
      RowReader read(logits, classes);
      RowWriter write(grad, classes);
      for (int64_t i = begin; i < end; ++i) {
        float* out = write.place(i * classes);
        if (target[i] == ignored_) {
          std::fill(out, out + classes, 0.0f);
        } else {
          const Normalizer& n = normalizers_[i];
          rows::scaled_exp(read.read(i * classes), n.top, scale / n.sum, out, classes);
          out[target[i]] -= scale;
        }
        write.commit();
      }
    });
  }

  SavedVariable logits_;
  at::Tensor targets_;
  Normalizers normalizers_;
  LogitsUse use_;
  int64_t ignored_;
  bool spent_ = false;
};

void check_arguments(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored) {
  check_float_rows(logits, "softmax_cross_entropy");
  if (logits.dim() < 1 || logits.sizes().slice(0, logits.dim() - 1) != targets.sizes() ||
      targets.scalar_type() != at::kLong)
    raise<ConfigError>(
        "softmax_cross_entropy: logits {} want int64 targets of the leading shape, got {} {}",
        c10::str(logits.sizes()), c10::toString(targets.scalar_type()), c10::str(targets.sizes()));
  const int64_t* target = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i)
    if (target[i] != ignored && (target[i] < 0 || target[i] >= logits.size(-1)))
      raise<ConfigError>("softmax_cross_entropy: target {} at position {} is outside [0, {})",
                         target[i], i, logits.size(-1));
}

LossSum forward(const at::Tensor& logits, const at::Tensor& targets, int64_t ignored,
                Normalizers& normalizers) {
  const int64_t classes = logits.size(-1), count = targets.numel();
  const int64_t* target = targets.const_data_ptr<int64_t>();
  normalizers.resize(static_cast<size_t>(count));
  std::vector<float> losses(static_cast<size_t>(count), 0.0f);
  parallel_rows(count, classes, [&](int64_t begin, int64_t end) {
    RowReader read(logits, classes);
    for (int64_t i = begin; i < end; ++i) {
      if (target[i] == ignored) continue;
      const float* row = read.read(i * classes);
      const float top = rows::max(row, classes);
      normalizers[i] = {top, rows::sum_exp(row, top, classes)};
      losses[i] = std::log(normalizers[i].sum) + (top - row[target[i]]);
    }
  });
  double sum = 0;
  for (float loss : losses) sum += loss;
  return {at::scalar_tensor(sum, at::kFloat), count - std::count(target, target + count, ignored)};
}

}  // namespace

LossSum softmax_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, LogitsUse use,
                              int64_t ignore_index) {
  const at::Tensor x = logits.contiguous(), y = targets.contiguous();
  check_arguments(x, y, ignore_index);
  Normalizers normalizers;
  LossSum loss;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    loss = forward(x, y, ignore_index, normalizers);
  }
  if (records_graph(x))
    record(c10::make_intrusive<CrossEntropyNode>(x, y, std::move(normalizers), use, ignore_index),
           loss.sum, x);
  return loss;
}

}  // namespace dovetail::ops
