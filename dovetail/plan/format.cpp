#include "dovetail/plan/format.h"

#include "dovetail/base/error.h"

namespace dovetail::plan {

int64_t PlaneSpec::bytes_of(int64_t element_count) const {
  if (element_count < 0 || element_count % elements != 0)
    raise<PlanError>("plane {}: wanted a multiple of {} elements, got {}", name, elements, element_count);
  return element_count / elements * bytes;
}

int64_t Format::bytes_of(int64_t element_count, PlaneUse passes) const {
  int64_t sum = 0;
  for (const PlaneSpec& plane : planes)
    if ((passes.forward && plane.use.forward) || (passes.backward && plane.use.backward))
      sum += plane.bytes_of(element_count);
  return sum;
}

bool Format::is_plain(DType dtype) const { return name == name_of(dtype); }

Format format_named(std::string_view name) {
  for (DType t : {DType::f32, DType::bf16}) {
    if (name != name_of(t)) continue;
    const PlaneSpec payload{.name = "payload", .elements = 1, .bytes = size_of(t), .use = {}};
    return {.name = std::string(name), .planes = {payload}, .gradient = t};
  }
  raise<ConfigError>("format: wanted fp32 or bf16, got \"{}\"", name);
}

}  // namespace dovetail::plan
