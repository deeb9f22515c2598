// A whole inventory planned: every distinct group once, with sums over the model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dovetail/layout/block.h"
#include "dovetail/plan/degrees.h"
#include "dovetail/plan/element_layout.h"
#include "dovetail/plan/inventory.h"

namespace dovetail::plan {

struct ModelLayoutOptions {
  Degrees degrees;
  BlockKind block = BlockKind::row;
  int64_t alignment = 64;
  int max_segments = 1;
  bool orient = false;  // stored as plan/orientation.h says, experts one by one
};

struct GroupLayout {
  std::string name;
  int64_t repeat = 1;
  int64_t numel = 0;
  std::vector<TensorSpec> tensors;  // as planned
  ElementLayout layout;
  double milliseconds = 0;  // planning, wall clock

  double padding3() const;  // zero3 * S3 / numel - 1; 0 for a group without elements
  double padding1() const;
};

struct ModelLayout {
  std::string name;
  Degrees degrees;
  std::vector<GroupLayout> groups;
  double milliseconds = 0;

  // Over all groups with their repeats.
  double padding3() const;
  double padding1() const;
  double bound_padding1() const;  // that of the proven bounds
  bool exact() const;
};

ModelLayout lay_out_model(const Inventory& model, const ModelLayoutOptions& options);

// The group's tensors as `options` stores and blocks them.
LayoutRequest request_of(const std::vector<TensorSpec>& tensors, const ModelLayoutOptions& options);

}  // namespace dovetail::plan
