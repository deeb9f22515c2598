#include "dovetail/update/op.h"

#include <numeric>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail {

const Field& UnitView::field(std::string_view name) const {
  for (const Field& f : fields)
    if (f.name == name) return f;
  DT_CHECK(false, "field \"{}\" of {} is not among those that the operation declared", name,
           tensor->name);
  __builtin_unreachable();
}

std::span<float> UnitView::f32(std::string_view name) const {
  const Field& f = field(name);
  DT_CHECK_EQ(name_of(f.dtype), name_of(DType::f32), "field \"{}\" of {}", name, tensor->name);
  return {f.f32(), static_cast<size_t>(f.size)};
}

std::span<uint8_t> UnitView::u8(std::string_view name) const {
  const Field& f = field(name);
  DT_CHECK_EQ(name_of(f.dtype), name_of(DType::u8), "field \"{}\" of {}", name, tensor->name);
  return {reinterpret_cast<uint8_t*>(f.data), static_cast<size_t>(f.size)};
}

int64_t StateField::values(const TensorSpec& tensor) const {
  if (per == Per::unit) return std::accumulate(unit_values.begin(), unit_values.end(), int64_t{0});
  return values_in({0, tensor.numel()}).size();
}

Interval StateField::values_in(Interval elements) const {
  if (elements.empty()) return {};
  if (per == Per::element) return elements;
  DT_CHECK(per == Per::block && elements.begin % block == 0, "blocks of {} and elements from {}",
           block, elements.begin);
  return {elements.begin / block, ceil_div(elements.end, block)};
}

}  // namespace dovetail
