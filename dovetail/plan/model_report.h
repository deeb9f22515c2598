// A planned model as text (table, then who holds what) and as JSON.
#pragma once

#include <string>

#include "dovetail/plan/model_layout.h"

namespace dovetail::plan {

// Groups with padding, proven bound, gap, time; the model's total; the shards of every distinct
// group drawn.
std::string model_text(const ModelLayout& model, const ModelLayoutOptions& options);

// An object with model, block, zero1, zero2, zero3, alignment, segments, orient, numel, padding and
// padding_zero3 (of the zero1 and zero3 shards), bound_padding, gap, exact, ms and groups: a list
// of name, repeat, numel, padding, padding_zero3, bound, bound_zero3, gap, exact, steps, ms, shard,
// shard_zero2, shard_zero3 (lists, by segment) and tensors: a list of name, shape, numel, block,
// segment, offset and shards ([first, last] zero1 shard that holds a part, [] for an empty tensor).
std::string model_json(const ModelLayout& model, const ModelLayoutOptions& options);

}  // namespace dovetail::plan
