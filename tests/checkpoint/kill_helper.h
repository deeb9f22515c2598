// The mode in which this binary writes checkpoints until it is killed.
#pragma once

#include <cstdint>
#include <string>

namespace dovetail::checkpoint_test {

inline constexpr char kHelperFlag[] = "--write-until-killed";
inline constexpr int64_t kForever = 0;

// Saves steps 10 and 20 with two ranks, keeping one, and dies at the `point`-th place of it;
// kForever: goes on and on.
int run_kill_helper(const std::string& folder, int64_t point);

}  // namespace dovetail::checkpoint_test
