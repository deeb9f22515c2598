// Runtime formats: how a runtime parameter is encoded, as one or more planes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/dtype.h"

namespace dovetail::plan {

// Which passes read a plane.
struct PlaneUse {
  bool forward = true;
  bool backward = true;
  bool operator==(const PlaneUse&) const = default;
};

// One component of an encoded parameter: `elements` elements take `bytes` bytes (a payload plane of bf16: 1
// and 2; a scale plane of MXFP8: 32 and 1). A run of elements that starts and ends at multiples of `elements`
// is a run of bytes.
struct PlaneSpec {
  std::string name;
  int64_t elements = 1;
  int64_t bytes = 4;
  PlaneUse use;
  bool operator==(const PlaneSpec&) const = default;

  int64_t bytes_of(int64_t element_count) const;  // throws PlanError unless a multiple of `elements`
};

struct Format {
  std::string name;
  std::vector<PlaneSpec> planes;
  int64_t block = 1;  // elements that a shard boundary may not cut
  DType gradient = DType::f32;  // what kernels write gradients in

  // Bytes of `element_count` elements in the planes that any of the passes reads. Throws as
  // PlaneSpec::bytes_of does.
  int64_t bytes_of(int64_t element_count, PlaneUse passes = {}) const;

  // True when a parameter in this format is the plain array of `dtype`: main weights of that type need no
  // copy.
  bool is_plain(DType dtype) const;
  bool operator==(const Format&) const = default;
};

// "fp32" or "bf16"; throws ConfigError otherwise.
Format format_named(std::string_view name);

}  // namespace dovetail::plan
