#include "dovetail/plan/format.h"

#include "dovetail/base/error.h"

namespace dovetail::plan {

int64_t PlaneSpec::bytes_of(int64_t element_count) const {
  if (element_count < 0 || element_count % elements != 0)
    raise<PlanError>("plane {}: wanted a multiple of {} elements, got {}", name, elements, element_count);
  return element_count / elements * bytes;
}

bool Format::is_plain(DType dtype) const { return name == name_of(dtype); }

Format format_named(std::string_view name) {
  for (DType t : {DType::f32, DType::bf16}) {
    if (name != name_of(t)) continue;
    return {.name = std::string(name), .planes = {{.name = "payload", .elements = 1, .bytes = size_of(t)}}, .gradient = t};
  }
  raise<ConfigError>("format: wanted fp32 or bf16, got \"{}\"", name);
}

}  // namespace dovetail::plan
