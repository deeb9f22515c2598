// Integer arithmetic on element counts. All arguments are non-negative.
#pragma once

#include <bit>
#include <cstdint>
#include <numeric>

namespace dovetail {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }
constexpr int64_t round_down(int64_t a, int64_t multiple) { return a / multiple * multiple; }
constexpr bool is_power_of_two(int64_t a) { return a > 0 && (a & (a - 1)) == 0; }

}  // namespace dovetail
