#include "dovetail/base/error.h"

namespace dovetail::detail {

void fail_check(const char* file, int line, const char* condition, const std::string& message) {
  throw InvariantError(
      fmt::format("{}:{}: check failed: {}{}{}", file, line, condition, message.empty() ? "" : ": ", message));
}

}  // namespace dovetail::detail
