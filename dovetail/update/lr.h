// Learning rate schedules as plain values.
//
// Steps count from 1, as StepContext::step does. All kinds warm up linearly: step s of the warm-up
// has peak * s / warmup_steps, so the last of it has peak. Then
//   constant  stays at peak
//   cosine    goes from peak to floor along half a cosine wave, from step warmup_steps to
//   total_steps linear    the same along a straight line wsd       stays at peak, and over the last
//   decay_steps goes to floor along `tail`
// Step total_steps has floor, and so has every later one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace dovetail {

enum class LrKind : uint8_t { constant, cosine, linear, wsd };

// What is left of peak - floor after the part p of the decay:
enum class LrTail : uint8_t {
  linear,          // 1 - p
  cosine,          // (1 + cos(pi p)) / 2
  one_minus_sqrt,  // 1 - sqrt(p)
};

// "constant", "cosine", "linear", "wsd"; "linear", "cosine", "1-sqrt". Parsing throws ConfigError.
std::string_view name_of(LrKind kind);
std::string_view name_of(LrTail tail);
LrKind parse_lr_kind(std::string_view name);
LrTail parse_lr_tail(std::string_view name);

struct LrSchedule {
  LrKind kind = LrKind::constant;
  double peak = 0;
  double floor = 0;  // constant: 0
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;       // constant: not used
  int64_t decay_steps = 0;       // wsd alone: 0 for the others
  LrTail tail = LrTail::linear;  // wsd alone

  bool operator==(const LrSchedule&) const = default;
};

// Throws ConfigError that names the field.
void validate(const LrSchedule& schedule);

// Learning rate of a step, which is at least 1; the schedule must be valid.
float lr_at(const LrSchedule& schedule, int64_t step);

// Every number in one line.
std::string describe(const LrSchedule& schedule);

}  // namespace dovetail
