#include "dovetail/base/dtype.h"

#include "dovetail/base/error.h"

namespace dovetail {

std::string_view name_of(DType t) {
  switch (t) {
    case DType::f32: return "fp32";
    case DType::bf16: return "bf16";
    case DType::u8: return "u8";
    case DType::i64: return "i64";
  }
  return "?";
}

DType parse_dtype(std::string_view name) {
  for (DType t : {DType::f32, DType::bf16, DType::u8, DType::i64})
    if (name == name_of(t)) return t;
  raise<ConfigError>("dtype: wanted one of fp32, bf16, u8, i64; got \"{}\"", name);
}

}  // namespace dovetail
