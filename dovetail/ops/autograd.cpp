#include "dovetail/ops/autograd.h"

#include <torch/csrc/autograd/functions/utils.h>

#include "dovetail/base/error.h"

namespace dovetail::ops {

bool is_captured(const Node& node, size_t edge) {
  const auto* requests = torch::autograd::get_current_graph_task_exec_info();
  if (!requests || requests->empty()) return false;
  const auto it = requests->find(node.next_edge(edge).function.get());
  return it != requests->end() && it->second.captures_ && !it->second.captures_->empty();
}

void refuse_second_order(std::string_view operation) {
  if (at::GradMode::is_enabled())
    raise<StateError>("{} has no second-order gradient: its backward cannot run with create_graph",
                      operation);
}

void attach_output(const c10::intrusive_ptr<Node>& node, at::Tensor& output) {
  torch::autograd::set_history(output, node);
}

}  // namespace dovetail::ops
