// The shard map: a picture of which rank holds which interval of which tensor.
//
// One strip per bucket segment, its element space from left to right: colors are ranks, white gaps
// are tensor edges, hatched is padding, tall lines are zero3 shard edges. Groups that are laid out
// alike are drawn once.
#pragma once

#include <string>

#include "dovetail/plan/plan.h"

namespace dovetail::trainer {

// An SVG figure; text and shapes only.
std::string shard_map_svg(const plan::Plan& plan);

// The color of a rank, the same in every picture.
std::string rank_color(int64_t rank);

}  // namespace dovetail::trainer
