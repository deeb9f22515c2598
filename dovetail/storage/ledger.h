// What a rank's engine holds, by role, and the copies it made. Every allocation and copy of the
// engine goes through here.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace dovetail {

enum class Role : uint8_t { main, runtime, gradient, main_gradient, accumulator, state, slot, unit_state, staging,
                            workspace };
inline constexpr int kRoles = 10;
std::string_view name_of(Role role);

// Why bytes were copied outside of collectives and update operations.
enum class CopyReason : uint8_t {
  initial,   // whole initial parameters into main shards
  encode,    // main weights into the runtime format
  gradient,  // a gradient that a kernel did not write into the gradient buffer itself
  request,   // a caller asked for a whole parameter or gradient
};
inline constexpr int kCopyReasons = 4;

class Ledger {
 public:
  void hold(Role role, int64_t bytes) { held_[static_cast<int>(role)] += bytes; }
  void release(Role role, int64_t bytes) { held_[static_cast<int>(role)] -= bytes; }
  void copied(CopyReason reason, int64_t bytes) { copied_[static_cast<int>(reason)] += bytes; }

  int64_t held(Role role) const { return held_[static_cast<int>(role)]; }
  int64_t held() const;
  int64_t copied(CopyReason reason) const { return copied_[static_cast<int>(reason)]; }

 private:
  std::array<int64_t, kRoles> held_{};
  std::array<int64_t, kCopyReasons> copied_{};
};

}  // namespace dovetail
