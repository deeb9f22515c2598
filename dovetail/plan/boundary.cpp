#include "dovetail/plan/boundary.h"

#include "dovetail/base/error.h"

namespace dovetail::plan {

std::string_view name_of(Boundary boundary) {
  return boundary == Boundary::unit ? "unit" : boundary == Boundary::block ? "block" : "any";
}

Boundary parse_boundary(std::string_view name) {
  if (name == "any") return Boundary::any;
  if (name == "block") return Boundary::block;
  if (name == "unit") return Boundary::unit;
  raise<ConfigError>("boundary: wanted any, block or unit, got \"{}\"", name);
}

}  // namespace dovetail::plan
