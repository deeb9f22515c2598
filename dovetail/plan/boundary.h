// Where shard boundaries may fall in relation to the units of the update.
#pragma once

#include <cstdint>
#include <string_view>

namespace dovetail::plan {

enum class Boundary : uint8_t {
  any,    // boundaries respect blocks; units are left out of account
  block,  // boundaries respect blocks; among layouts of equal shards the one that cuts units cheapest is taken
  unit,   // boundaries respect units too, whatever padding that costs (units must be evenly spaced)
};

std::string_view name_of(Boundary boundary);        // "any", "block", "unit"
Boundary parse_boundary(std::string_view name);     // throws ConfigError

}  // namespace dovetail::plan
