// A unit is a module whose parameters are gathered together. C++ modules have no forward hooks, so
// a model says where its units are by building blocks as Unit<Block>: a Block whose forward lets
// whoever is attached act before and after. Without anything attached it is the Block. Names of
// parameters and children do not change.
//
//   auto layer = std::make_shared<ops::Unit<DecoderLayer>>(config);
//   layer->forward(x, positions);         // Block::forward, between before_forward and after_forward
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "dovetail/ops/recompute_call.h"
#include "dovetail/ops/tensors.h"

namespace dovetail::ops {

class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // May replace tensors in place (by identity nodes that see the backward pass).
  virtual void before_forward(std::span<at::Tensor* const> inputs) = 0;
  virtual void after_forward(std::span<at::Tensor* const> outputs) = 0;
  // Block::forward threw: after_forward will not come.
  virtual void forward_failed() noexcept = 0;
};

// What the engine finds in a module tree (dynamic_cast over modules()).
class UnitBase {
 public:
  virtual ~UnitBase() = default;
  void attach(std::shared_ptr<UnitHooks> hooks) { hooks_ = std::move(hooks); }
  void detach() { hooks_.reset(); }
  bool attached() const { return hooks_ != nullptr; }
  // False where the backward pass of the unit's own modules reads none of its parameters (an
  // embedding): they are then not gathered for it. A block says so with a member `static constexpr
  // bool kBackwardNeedsParameters = false`.
  virtual bool backward_needs_parameters() const { return true; }
  // Whether forwards that follow save no activations and run Block::forward again in the backward
  // pass (ops/recompute.h). The hooks stay outside of what is run again: each is called once a
  // forward.
  void set_recompute(bool on) { recomputes_ = on; }
  bool recomputes() const { return recomputes_; }

 protected:
  std::shared_ptr<UnitHooks> hooks_;
  bool recomputes_ = false;
};

template <class Block>
class Unit : public Block, public UnitBase {
 public:
  using Block::Block;

  bool backward_needs_parameters() const override {
    if constexpr (requires { Block::kBackwardNeedsParameters; })
      return Block::kBackwardNeedsParameters;
    else
      return true;
  }

  template <class... Args>
  auto forward(Args&&... args) {
    if (!hooks_ && !recomputes_) return Block::forward(std::forward<Args>(args)...);
    const std::shared_ptr<UnitHooks> hooks = hooks_;
    auto inputs = std::make_tuple(std::decay_t<Args>(std::forward<Args>(args))...);
    if (!hooks) return call(inputs);
    std::vector<at::Tensor*> tensors;
    collect_tensors(inputs, tensors);
    hooks->before_forward(tensors);
    auto output = run(*hooks, inputs);
    tensors.clear();
    collect_tensors(output, tensors);
    hooks->after_forward(tensors);
    return output;
  }

 private:
  template <class Inputs>
  auto run(UnitHooks& hooks, Inputs& inputs) {
    try {
      return call(inputs);
    } catch (...) {
      hooks.forward_failed();
      throw;
    }
  }

  template <class Inputs>
  auto call(Inputs& inputs) {
    const auto forward_block = [this, alive = self()](Inputs& in) {
      return std::apply([this](auto&... a) { return Block::forward(a...); }, in);
    };
    return recomputes_ ? recompute_call(forward_block, inputs, trains()) : forward_block(inputs);
  }

  // Keeps the module alive for a graph that will run it again; null where nobody shares it.
  auto self() {
    if constexpr (requires { this->weak_from_this(); })
      return this->weak_from_this().lock();
    else
      return nullptr;
  }

  bool trains() const {
    for (const at::Tensor& parameter : this->parameters())
      if (parameter.requires_grad()) return true;
    return false;
  }
};

}  // namespace dovetail::ops
