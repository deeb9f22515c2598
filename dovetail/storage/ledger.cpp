#include "dovetail/storage/ledger.h"

namespace dovetail {

std::string_view name_of(Role role) {
  switch (role) {
    case Role::main: return "main";
    case Role::runtime: return "runtime";
    case Role::gradient: return "gradient";
    case Role::main_gradient: return "main_gradient";
    case Role::accumulator: return "accumulator";
    case Role::state: return "state";
    case Role::slot: return "slot";
    case Role::unit_state: return "unit_state";
    case Role::staging: return "staging";
    case Role::workspace: return "workspace";
  }
  return "?";
}

int64_t Ledger::held() const {
  int64_t n = 0;
  for (int64_t h : held_) n += h;
  return n;
}

}  // namespace dovetail
