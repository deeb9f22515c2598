// Milliseconds of forward and backward of the Llama sizes S and M, one sequence of 256, without an
// optimizer and without communication: the floor of a training step. usage: model_bench [S|M]
// [fp32|bf16] [steps] [threads]      prints one JSON object
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "dovetail/models/registry.h"

namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

nlohmann::json options_of(const std::string& size) {
  if (size == "S")
    return {{"hidden_size", 512},
            {"num_hidden_layers", 8},
            {"num_attention_heads", 8},
            {"vocab_size", 8192},
            {"intermediate_size", 1408}};
  return {{"hidden_size", 768},
          {"num_hidden_layers", 12},
          {"num_attention_heads", 12},
          {"vocab_size", 16384},
          {"intermediate_size", 2048}};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string size = argc > 1 ? argv[1] : "S", dtype = argc > 2 ? argv[2] : "fp32";
  const int steps = argc > 3 ? std::stoi(argv[3]) : 5, threads = argc > 4 ? std::stoi(argv[4]) : 1;
  at::set_num_threads(threads);
  const auto type = dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  const auto model = dovetail::models::build_model("llama", options_of(size), type);
  model->reset_parameters(1);
  const auto tokens = torch::randint(0, model->vocabulary(), {1, 257}, at::kLong);
  const auto inputs = tokens.narrow(1, 0, 256), targets = tokens.narrow(1, 1, 256);
  std::vector<double> forward, backward, whole;
  for (int step = -1; step < steps; ++step) {
    const auto start = Clock::now();
    const auto loss = model->loss(inputs, targets);
    const double f = ms_since(start);
    (loss.sum / static_cast<double>(loss.count)).backward();
    const double total = ms_since(start);
    model->module().zero_grad();
    if (step < 0) continue;  // warm-up
    forward.push_back(f), backward.push_back(total - f), whole.push_back(total);
  }
  const nlohmann::json out = {{"size", size},
                              {"dtype", dtype},
                              {"threads", threads},
                              {"forward_ms", median(forward)},
                              {"backward_ms", median(backward)},
                              {"step_ms", median(whole)},
                              {"gflops", model->flops_per_token(256) * 256 / median(whole) / 1e6}};
  std::puts(out.dump().c_str());
}
