#include "dovetail/update/op.h"

#include "dovetail/base/error.h"

namespace dovetail {

const Field& Fragment::field(std::string_view name) const {
  for (const Field& f : fields)
    if (f.name == name) return f;
  DT_CHECK(false, "field \"{}\" of {} is not among those that the operation declared", name, tensor->name);
  __builtin_unreachable();
}

}  // namespace dovetail
