#include "dovetail/numerics/bf16.h"

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

// A select in place of the reference's branch, so that the loop becomes vector code.
DT_VECTOR_CLONES void encode(const uint32_t* __restrict source, uint16_t* __restrict target,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = source[i];
    const uint32_t nan = u | 0x400000u;
    const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
    target[i] = static_cast<uint16_t>(((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded) >> 16);
  }
}

DT_VECTOR_CLONES void decode(const uint16_t* __restrict source, uint32_t* __restrict target,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i] = static_cast<uint32_t>(source[i]) << 16;
}

}  // namespace

void encode_bf16(std::span<const float> source, std::span<uint16_t> target) {
  DT_CHECK_EQ(source.size(), target.size(), "encode_bf16");
  encode(reinterpret_cast<const uint32_t*>(source.data()), target.data(),
         static_cast<int64_t>(source.size()));
}

void decode_bf16(std::span<const uint16_t> source, std::span<float> target) {
  DT_CHECK_EQ(source.size(), target.size(), "decode_bf16");
  decode(source.data(), reinterpret_cast<uint32_t*>(target.data()),
         static_cast<int64_t>(source.size()));
}

bool bf16_products_in_hardware() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16");  // every CPU with AMX has it too
#else
  return true;
#endif
}

}  // namespace dovetail
