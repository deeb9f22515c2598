#include "dovetail/trainer/run_log.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>

#include "dovetail/trainer/html.h"

namespace dovetail::trainer {
namespace {

nlohmann::json number(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json();
}

std::string human_rate(double per_second) {
  return per_second >= 10'000 ? fmt::format("{:.1f}k", per_second / 1000)
                              : fmt::format("{:.0f}", per_second);
}

}  // namespace

void say(const std::string& line) {
  fmt::print(stdout, "{}\n", line);
  std::fflush(stdout);
}

RunLog::RunLog(const std::string& metrics_path, int64_t steps_done, int64_t total_steps,
               int64_t log_every)
    : metrics_(metrics_path, steps_done), total_steps_(total_steps), log_every_(log_every) {}

std::string RunLog::position_text(int64_t step) const {
  const std::string total = std::to_string(total_steps_);
  return fmt::format("step {:>{}}/{}", step, total.size(), total);
}

void RunLog::step(const StepFacts& facts, const StepReport& report) {
  nlohmann::json line{{"step", facts.step},
                      {"loss", number(report.loss)},
                      {"lr", std::stod(fmt::format("{}", facts.lr))},  // the shortest that reads back
                      {"grad_norm", number(report.grad_norm)},
                      {"clip", report.clip_coefficient},
                      {"tokens", report.tokens},
                      {"tokens_per_second", static_cast<double>(report.tokens) / facts.seconds},
                      {"step_ms", facts.seconds * 1000},
                      {"bytes_sent", facts.bytes_sent},
                      {"bytes_received", facts.bytes_received},
                      {"bytes_held", facts.bytes_held},
                      {"position", facts.position}};
  if (report.outcome != StepOutcome::updated) {
    line["skipped"] = name_of(report.outcome);
    say(fmt::format("{}  skipped: {}{}", position_text(facts.step), name_of(report.outcome),
                    report.bad_rank >= 0 ? fmt::format(" on rank {}", report.bad_rank) : ""));
  }
  metrics_.write(line);
  seconds_ += facts.seconds;
  window_seconds_ += facts.seconds;
  window_tokens_ += report.tokens;
  ++steps_;
  if (steps_ != 1 && facts.step % log_every_ != 0 && facts.step != total_steps_) return;
  const double left =
      seconds_ / static_cast<double>(steps_) * static_cast<double>(total_steps_ - facts.step);
  say(fmt::format("{}  loss {:.4f}  grad {:.3f}  lr {:.2e}  {} tokens/s  ETA {}",
                  position_text(facts.step), report.loss, report.grad_norm, facts.lr,
                  human_rate(static_cast<double>(window_tokens_) / window_seconds_),
                  human_seconds(left)));
  window_seconds_ = 0;
  window_tokens_ = 0;
}

void RunLog::validation(int64_t step, const ValidationResult& result, bool text) {
  nlohmann::json line{
      {"step", step}, {"val_loss", number(result.loss)}, {"val_tokens", result.tokens}};
  if (text) line["val_bpb"] = number(result.bits_per_token());
  metrics_.write(line);
  say(fmt::format("{}  validation {:.4f} nats per token{}", position_text(step), result.loss,
                  text ? fmt::format(", {:.4f} bits per byte", result.bits_per_token()) : ""));
}

void RunLog::checkpoint(int64_t step, const SavedCheckpoint& saved) {
  metrics_.write({{"step", step},
                  {"checkpoint", saved.path},
                  {"bytes", saved.bytes},
                  {"snapshot_ms", saved.snapshot_seconds * 1000},
                  {"seconds", saved.total_seconds}});
  say(fmt::format("{}  checkpoint {} ({}, training waited {:.0f} ms)", position_text(saved.step),
                  saved.path, human_bytes(static_cast<double>(saved.bytes)),
                  saved.snapshot_seconds * 1000));
  if (!saved.cleanup_fault.empty())
    say("an older checkpoint could not be removed: " + saved.cleanup_fault);
}

}  // namespace dovetail::trainer
