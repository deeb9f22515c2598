#include "dovetail/ops/embedding.h"

#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <numeric>

#include "dovetail/base/error.h"
#include "dovetail/ops/autograd.h"
#include "dovetail/ops/rows.h"

namespace dovetail::ops {
namespace {

void check_indices(const at::Tensor& indices, int64_t vocabulary) {
  if (indices.scalar_type() != at::kLong)
    raise<ConfigError>("embedding: wants int64 indices, got {}",
                       c10::toString(indices.scalar_type()));
  const int64_t* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i)
    if (index[i] < 0 || index[i] >= vocabulary)
      raise<ConfigError>("embedding: index {} at position {} is outside [0, {})", index[i], i,
                         vocabulary);
}

at::Tensor look_up(const at::Tensor& indices, const at::Tensor& weight) {
  const int64_t dim = weight.size(1);
  at::Tensor out = at::empty({indices.numel(), dim}, weight.options());
  if (out.numel() == 0) return out;
  const int64_t* index = indices.const_data_ptr<int64_t>();
  if (weight.stride(1) != 1) return at::index_select_out(out, weight, 0, indices.view(-1));
  const size_t bytes = static_cast<size_t>(dim) * weight.element_size();
  const int64_t stride = weight.stride(0) * weight.element_size();
  const auto* from = static_cast<const std::byte*>(weight.const_data_ptr());
  auto* to = static_cast<std::byte*>(out.mutable_data_ptr());
  parallel_rows(indices.numel(), dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      std::memcpy(to + i * bytes, from + index[i] * stride, bytes);
  });
  return out;
}

// target[v] += sum of g's rows whose index is v; `target` has contiguous rows, g [n, dim] is
// contiguous.
void add_rows(const at::Tensor& indices, const at::Tensor& g, const at::Tensor& target) {
  const int64_t n = g.size(0), dim = g.size(1);
  const int64_t* index = indices.const_data_ptr<int64_t>();
  std::vector<int64_t> order(static_cast<size_t>(n)), starts;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return index[a] < index[b]; });
  for (int64_t i = 0; i < n; ++i)
    if (i == 0 || index[order[i]] != index[order[i - 1]]) starts.push_back(i);
  starts.push_back(n);
  const int64_t distinct = static_cast<int64_t>(starts.size()) - 1, stride = target.stride(0);
  parallel_rows(distinct, dim, [&](int64_t begin, int64_t end) {
    RowReader read(g, dim), read_old(target, dim);
    RowWriter write(target, dim);
    std::vector<float> sum(static_cast<size_t>(dim));
    for (int64_t d = begin; d < end; ++d) {
      const int64_t place = index[order[starts[d]]] * stride;
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t i = starts[d]; i < starts[d + 1]; ++i) {
        const float* row = read.read(order[i] * dim);
        for (int64_t c = 0; c < dim; ++c) sum[c] += row[c];
      }
      const float* old = read_old.read(place);
      float* out = write.place(place);
      for (int64_t c = 0; c < dim; ++c) out[c] = old[c] + sum[c];
      write.commit();
    }
  });
}

void write_gradient(const at::Tensor& indices, const at::Tensor& g, at::Tensor target, bool fresh) {
  if (fresh) target.zero_();
  if (g.numel() == 0) return;
  if (target.stride(1) == 1) return add_rows(indices, g, target);
  at::Tensor rows = target.contiguous();
  add_rows(indices, g, rows);
  target.copy_(rows);
}

class EmbeddingNode : public Node {
 public:
  EmbeddingNode(const at::Tensor& indices, const at::Tensor& weight,
                std::shared_ptr<GradientSink> sink)
      : indices_(indices, false),
        vocabulary_(weight.size(0)),
        dim_(weight.size(1)),
        sink_(std::move(sink)) {}

  std::string name() const override { return "dovetail::EmbeddingBackward"; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    if (!grads[0].defined() || !task_should_compute_output(0)) return variable_list(1);
    const at::Tensor indices = indices_.unpack();
    if (at::GradMode::is_enabled())
      return {
          at::embedding_dense_backward(grads[0], indices, vocabulary_, /*padding_idx=*/-1, false)};
    const at::Tensor g = grads[0].reshape({indices.numel(), dim_}).contiguous();
    if (sink_ && !is_captured(*this, 0)) {
      if (const auto target = sink_->next_contribution(/*few_rows=*/true)) {
        write_gradient(indices, g, target->view, target->fresh);
        return variable_list(1);
      }
    }
    at::Tensor grad = at::empty({vocabulary_, dim_}, g.options());
    write_gradient(indices, g, grad, true);
    return {grad};
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    indices_.reset_data();
  }

 private:
  SavedVariable indices_;
  int64_t vocabulary_, dim_;
  std::shared_ptr<GradientSink> sink_;
};

}  // namespace

at::Tensor embedding_rows(const at::Tensor& indices, const at::Tensor& weight,
                          const std::shared_ptr<GradientSink>& sink) {
  if (weight.dim() != 2)
    raise<ConfigError>("embedding: wants weight [vocabulary, dim], got {}",
                       c10::str(weight.sizes()));
  check_float_rows(weight, "embedding");
  const at::Tensor places = indices.contiguous();
  check_indices(places, weight.size(0));
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<int64_t> sizes = indices.sizes().vec();
    sizes.push_back(weight.size(1));
    out = look_up(places, weight).view(sizes);
  }
  if (records_graph(weight))
    record(c10::make_intrusive<EmbeddingNode>(places, weight, sink), out, weight);
  return out;
}

Embedding::Embedding(int64_t vocabulary, int64_t dim, const at::TensorOptions& options) {
  weight = register_parameter("weight", at::empty({vocabulary, dim}, options));
}

void Embedding::set_sink(const at::Tensor& param, std::shared_ptr<GradientSink> sink) {
  if (!param.is_same(weight))
    raise<StateError>("Embedding writes the gradient of its weight only; another tensor was given");
  sink_ = std::move(sink);
}

}  // namespace dovetail::ops
