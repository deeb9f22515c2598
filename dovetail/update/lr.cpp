#include "dovetail/update/lr.h"

#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

constexpr std::array<std::pair<LrKind, std::string_view>, 4> kKinds = {
    {{LrKind::constant, "constant"},
     {LrKind::cosine, "cosine"},
     {LrKind::linear, "linear"},
     {LrKind::wsd, "wsd"}}};
constexpr std::array<std::pair<LrTail, std::string_view>, 3> kTails = {
    {{LrTail::linear, "linear"}, {LrTail::cosine, "cosine"}, {LrTail::one_minus_sqrt, "1-sqrt"}}};

template <class Table, class T>
std::string_view find_name(const Table& table, T value) {
  for (const auto& [v, name] : table)
    if (v == value) return name;
  DT_CHECK(false, "no name for value {}", static_cast<int>(value));
  __builtin_unreachable();
}

template <class Table>
auto find_value(const Table& table, std::string_view name, std::string_view what) {
  std::string known;
  for (const auto& [value, n] : table) {
    if (n == name) return value;
    known += (known.empty() ? "" : ", ") + std::string(n);
  }
  raise<ConfigError>("{} must be one of {}, got \"{}\"", what, known, name);
}

double left(LrTail tail, double p) {
  switch (tail) {
    case LrTail::linear:
      return 1 - p;
    case LrTail::cosine:
      return (1 + std::cos(std::numbers::pi * p)) / 2;
    case LrTail::one_minus_sqrt:
      return 1 - std::sqrt(p);
  }
  __builtin_unreachable();
}

}  // namespace

std::string_view name_of(LrKind kind) { return find_name(kKinds, kind); }
std::string_view name_of(LrTail tail) { return find_name(kTails, tail); }
LrKind parse_lr_kind(std::string_view name) { return find_value(kKinds, name, "lr kind"); }
LrTail parse_lr_tail(std::string_view name) { return find_value(kTails, name, "lr tail"); }

void validate(const LrSchedule& s) {
  const std::string_view kind = name_of(s.kind);
  if (!(std::isfinite(s.peak) && s.peak >= 0))
    raise<ConfigError>("lr: peak must be a finite number of at least 0, got {}", s.peak);
  if (!(s.floor >= 0 && s.floor <= s.peak))
    raise<ConfigError>("lr: floor must lie between 0 and peak {}, got {}", s.peak, s.floor);
  if (s.warmup_steps < 0)
    raise<ConfigError>("lr: warmup_steps must be at least 0, got {}", s.warmup_steps);
  if (s.kind != LrKind::wsd && s.decay_steps != 0)
    raise<ConfigError>("lr: decay_steps belongs to wsd; {} wants 0, got {}", kind, s.decay_steps);
  if (s.kind != LrKind::wsd && s.tail != LrTail::linear)
    raise<ConfigError>("lr: tail belongs to wsd; {} has none, got {}", kind, name_of(s.tail));
  if (s.kind == LrKind::constant) {
    if (s.floor != 0) raise<ConfigError>("lr: floor of constant must be 0, got {}", s.floor);
    return;
  }
  if (s.total_steps <= s.warmup_steps)
    raise<ConfigError>("lr: total_steps of {} must be above warmup_steps {}, got {}", kind,
                       s.warmup_steps, s.total_steps);
  if (s.kind == LrKind::wsd &&
      (s.decay_steps < 1 || s.decay_steps > s.total_steps - s.warmup_steps))
    raise<ConfigError>(
        "lr: decay_steps must lie between 1 and total_steps - warmup_steps = {}, got {}",
        s.total_steps - s.warmup_steps, s.decay_steps);
}

float lr_at(const LrSchedule& s, int64_t step) {
  DT_CHECK_GE(step, 1, "lr_at");
  if (step < s.warmup_steps)
    return static_cast<float>(s.peak * static_cast<double>(step) /
                              static_cast<double>(s.warmup_steps));
  if (s.kind == LrKind::constant) return static_cast<float>(s.peak);
  if (step >= s.total_steps) return static_cast<float>(s.floor);

  LrTail tail = s.tail;
  if (s.kind == LrKind::linear) tail = LrTail::linear;
  if (s.kind == LrKind::cosine) tail = LrTail::cosine;
  const int64_t length = s.kind == LrKind::wsd ? s.decay_steps : s.total_steps - s.warmup_steps;
  const int64_t into = step - (s.total_steps - length);
  if (into <= 0) return static_cast<float>(s.peak);
  const double p = static_cast<double>(into) / static_cast<double>(length);
  return static_cast<float>(s.floor + (s.peak - s.floor) * left(tail, p));
}

std::string describe(const LrSchedule& s) {
  return fmt::format(
      "lr={} peak={} floor={} warmup_steps={} total_steps={} "
      "decay_steps={} tail={}",
      name_of(s.kind), s.peak, s.floor, s.warmup_steps, s.total_steps, s.decay_steps,
      name_of(s.tail));
}

}  // namespace dovetail
