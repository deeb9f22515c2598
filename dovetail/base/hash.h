// 64-bit hashes (XXH3) for plans, parameter digests and checkpoint chunks. Stable across machines and versions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace dovetail {

uint64_t hash64(std::span<const std::byte> bytes, uint64_t seed = 0);
uint64_t hash64(std::string_view text, uint64_t seed = 0);

}  // namespace dovetail
