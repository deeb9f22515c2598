// Modules built on the meta device have shapes and no memory; materialize() gives them memory.
// torch cannot turn a meta tensor into another in place, so each module that owns tensors replaces
// them itself, through a TensorMaker.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <unordered_map>

namespace dovetail::ops {

class TensorMaker {
 public:
  explicit TensorMaker(at::Device device) : device_(device) {}
  at::Device device() const { return device_; }

  // Replaces `member`, registered in `module` as parameter `name`, by uninitialised memory of its
  // shape and dtype if it is on meta. A tensor shared by several modules stays shared.
  void parameter(torch::nn::Module& module, const std::string& name, at::Tensor& member);
  // Replaces `member`, registered as buffer `name`, by `value`: buffers are rebuilt, never left
  // uninitialised.
  void buffer(torch::nn::Module& module, const std::string& name, at::Tensor& member,
              const at::Tensor& value);

 private:
  at::Device device_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> made_;
};

class Materializable {
 public:
  virtual ~Materializable() = default;
  // Replaces the module's own meta tensors, not its children's.
  virtual void materialize(TensorMaker& maker) = 0;
};

// Gives memory on `device` to every meta tensor of `root` and its children; call reset_parameters
// or load weights next. Throws ConfigError naming the first parameter or buffer that no module
// replaced.
void materialize(torch::nn::Module& root, at::Device device);

}  // namespace dovetail::ops
