#include "dovetail/comm/identity.h"

#include <fmt/format.h>

namespace dovetail::comm {

std::string_view name_of(Phase phase) {
  switch (phase) {
    case Phase::control: return "control";
    case Phase::refresh: return "refresh";
    case Phase::gather_forward: return "gather_forward";
    case Phase::gather_backward: return "gather_backward";
    case Phase::reduce: return "reduce";
    case Phase::reduce_main: return "reduce_main";
    case Phase::norm: return "norm";
    case Phase::fragment: return "fragment";
    case Phase::state: return "state";
  }
  return "?";
}

std::string Identity::describe() const {
  const std::string what = label.empty() && unit >= 0 ? fmt::format("unit {}", unit) : std::string(label);
  return fmt::format("{}{}{}, step {}", name_of(phase), what.empty() ? "" : " of ", what, step);
}

}  // namespace dovetail::comm
