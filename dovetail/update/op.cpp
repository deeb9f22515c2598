#include "dovetail/update/op.h"

#include "dovetail/base/error.h"

namespace dovetail {

const Field& Fragment::field(std::string_view name) const {
  for (const Field& f : fields)
    if (f.name == name) return f;
  DT_CHECK(false, "field \"{}\" of {} is not among those that the operation declared", name, tensor->name);
  __builtin_unreachable();
}

std::span<float> Fragment::f32(std::string_view name) const {
  const Field& f = field(name);
  DT_CHECK_EQ(name_of(f.dtype), name_of(DType::f32), "field \"{}\" of {}", name, tensor->name);
  return {f.f32(), static_cast<size_t>(elements.size())};
}

}  // namespace dovetail
