// Element types that Dovetail stores, independent of torch.
#pragma once

#include <cstdint>
#include <string_view>

namespace dovetail {

enum class DType : uint8_t { f32, bf16, u8, i64 };

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::f32: return 4;
    case DType::bf16: return 2;
    case DType::u8: return 1;
    case DType::i64: return 8;
  }
  return 0;
}

// "fp32", "bf16", "u8", "i64".
std::string_view name_of(DType t);
// The inverse; throws ConfigError for an unknown name.
DType parse_dtype(std::string_view name);

}  // namespace dovetail
