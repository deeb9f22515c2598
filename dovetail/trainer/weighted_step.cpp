#include "dovetail/trainer/weighted_step.h"

#include <ATen/ops/item.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "dovetail/base/error.h"

namespace dovetail::trainer {
namespace {

struct MicroRecord {
  double loss = 0;
  int64_t tokens = 0;
};

// What a rank tells the others: its wish to stop, then a record per micro-batch.
std::vector<std::byte> message_of(const std::vector<MicroRecord>& records, bool stop) {
  std::vector<std::byte> bytes(sizeof(int64_t) + records.size() * sizeof(MicroRecord));
  const int64_t flag = stop;
  std::memcpy(bytes.data(), &flag, sizeof flag);
  std::memcpy(bytes.data() + sizeof flag, records.data(), records.size() * sizeof(MicroRecord));
  return bytes;
}

StepReport combine(const std::vector<std::vector<std::byte>>& messages,
                   const std::vector<MicroRecord>& mine) {
  StepReport report;
  std::vector<std::vector<MicroRecord>> all;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto& bytes = messages[rank];
    const size_t wanted = sizeof(int64_t) + mine.size() * sizeof(MicroRecord);
    if (bytes.size() != wanted)
      raise<StateError>("step: rank {} ran {} micro-batches, wanted {} as on this rank", rank,
                        (bytes.size() - sizeof(int64_t)) / sizeof(MicroRecord), mine.size());
    int64_t flag = 0;
    std::memcpy(&flag, bytes.data(), sizeof flag);
    report.stop |= flag != 0;
    all.emplace_back(mine.size());
    std::memcpy(all.back().data(), bytes.data() + sizeof flag, wanted - sizeof flag);
  }
  double sum = 0;
  for (size_t a = 0; a < mine.size(); ++a)
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const MicroRecord& record = all[rank][a];
      report.tokens += record.tokens;
      sum += record.loss;
      if (!std::isfinite(record.loss) && report.bad_rank < 0)
        report.bad_rank = static_cast<int>(rank);
    }
  report.loss = report.tokens > 0 ? sum / static_cast<double>(report.tokens)
                                  : std::numeric_limits<double>::quiet_NaN();
  return report;
}

}  // namespace

std::string_view name_of(StepOutcome outcome) {
  switch (outcome) {
    case StepOutcome::updated: return "updated";
    case StepOutcome::no_tokens: return "no tokens";
    case StepOutcome::non_finite_loss: return "loss not finite";
    case StepOutcome::non_finite_norm: return "gradient norm not finite";
  }
  return "";
}

StepReport run_step(Engine& engine, comm::Group& world, const WeightedStep& step) {
  std::vector<MicroRecord> records;
  for (int64_t a = 0; a < step.micro_batches; ++a) {
    engine.set_gradient_sync(step.reduce_each || a + 1 == step.micro_batches);
    const MicroLoss loss = step.forward(a);
    loss.sum.backward();
    records.push_back({loss.sum.item<double>(), loss.tokens});
  }
  const bool stop = step.wants_to_stop && step.wants_to_stop();
  const comm::Identity id{.step = engine.steps_done(), .label = "losses"};
  StepReport report = combine(world.gather_bytes(message_of(records, stop), id), records);
  if (report.bad_rank >= 0 || report.tokens == 0) {
    engine.zero_grad();
    report.outcome = report.bad_rank >= 0 ? StepOutcome::non_finite_loss : StepOutcome::no_tokens;
    return report;
  }
  const StepResult result = engine.step(step.lr, 1.0 / static_cast<double>(report.tokens));
  report.grad_norm = result.grad_norm;
  report.clip_coefficient = result.clip_coefficient;
  if (result.skipped) report.outcome = StepOutcome::non_finite_norm;
  return report;
}

}  // namespace dovetail::trainer
