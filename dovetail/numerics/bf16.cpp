#include "dovetail/numerics/bf16.h"

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

DT_VECTOR_CLONES void encode(const float* __restrict source, uint16_t* __restrict target,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    target[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(bf16_rounded(source[i])) >> 16);
}

DT_VECTOR_CLONES void round_all(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = bf16_rounded(values[i]);
}

DT_VECTOR_CLONES void decode(const uint16_t* __restrict source, uint32_t* __restrict target,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i] = static_cast<uint32_t>(source[i]) << 16;
}

}  // namespace

void encode_bf16(std::span<const float> source, std::span<uint16_t> target) {
  DT_CHECK_EQ(source.size(), target.size(), "encode_bf16");
  encode(source.data(), target.data(), static_cast<int64_t>(source.size()));
}

void decode_bf16(std::span<const uint16_t> source, std::span<float> target) {
  DT_CHECK_EQ(source.size(), target.size(), "decode_bf16");
  decode(source.data(), reinterpret_cast<uint32_t*>(target.data()),
         static_cast<int64_t>(source.size()));
}

void round_to_bf16(std::span<float> values) {
  round_all(values.data(), static_cast<int64_t>(values.size()));
}

bool bf16_products_in_hardware() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");  // every CPU with AMX has it too
#else
  return true;
#endif
}

}  // namespace dovetail
