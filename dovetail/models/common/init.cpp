#include "dovetail/models/common/init.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "dovetail/base/hash.h"
#include "dovetail/base/math.h"
#include "dovetail/base/philox.h"

namespace dovetail::models {
namespace {

// In (0, 1]: 24 bits, never 0.
float uniform(uint32_t bits) { return (static_cast<float>(bits >> 8) + 1.0f) * 0x1p-24f; }

// Four normal draws for block number `block` of the stream `key`.
std::array<float, 4> normals(uint64_t block, uint64_t stream, std::array<uint32_t, 2> key) {
  const auto bits = philox({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                            static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)},
                           key);
  std::array<float, 4> out;
  for (int pair = 0; pair < 2; ++pair) {
    const float radius = std::sqrt(-2.0f * std::log(uniform(bits[2 * pair])));
    const float angle = 2.0f * std::numbers::pi_v<float> * uniform(bits[2 * pair + 1]);
    out[2 * pair] = radius * std::cos(angle);
    out[2 * pair + 1] = radius * std::sin(angle);
  }
  return out;
}

}  // namespace

void fill_normal(const at::Tensor& t, double deviation, uint64_t seed, std::string_view name) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = at::empty(t.sizes(), at::kFloat);
  auto* out = values.mutable_data_ptr<float>();
  const int64_t n = values.numel();
  const uint64_t stream = hash64(name);
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(seed),
                                       static_cast<uint32_t>(seed >> 32)};
  at::parallel_for(0, ceil_div(n, 4), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const auto draws = normals(static_cast<uint64_t>(block), stream, key);
      for (int64_t i = 0; i < std::min<int64_t>(4, n - 4 * block); ++i)
        out[4 * block + i] = draws[i] * static_cast<float>(deviation);
    }
  });
  at::Tensor(t).copy_(values);
}

}  // namespace dovetail::models
