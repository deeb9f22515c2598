// What the hand-written autograd nodes of this layer have in common. A node's forward runs below
// autograd; its apply() computes plain values when grad mode is off and, when the graph of the
// backward is wanted (create_graph), either builds the gradient from differentiable operations or
// refuses by name.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <string_view>

namespace dovetail::ops {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Whether a forward over these tensors must record a node. Undefined tensors ask for nothing.
template <class... T>
bool records_graph(const T&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

// In apply(): whether the request asks for this edge's gradient itself (autograd::grad), so that it
// must be returned and may not go to a sink.
bool is_captured(const Node& node, size_t edge);

// In apply() of an operation without second-order gradients: throws StateError under create_graph.
void refuse_second_order(std::string_view operation);

void attach_output(const c10::intrusive_ptr<Node>& node, at::Tensor& output);

// Makes `node` the history of `output`, with edges to `inputs` in order.
template <class NodePtr, class... T>
void record(const NodePtr& node, at::Tensor& output, const T&... inputs) {
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  attach_output(node, output);
}
}  // namespace dovetail::ops
