#include "dovetail/trainer/validation.h"

#include <ATen/ops/item.h>

#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail::trainer {
namespace {

struct PassRecord {
  double loss = 0;
  int64_t tokens = 0;
};

// Sample numbers of pass `pass`; -1 beyond the last.
std::vector<int64_t> samples_of_pass(int64_t pass, int64_t samples, int64_t available) {
  std::vector<int64_t> rows(kValidationRows, -1);
  for (int64_t i = 0; i < kValidationRows; ++i) {
    const int64_t k = pass * kValidationRows + i;
    if (k < samples) rows[static_cast<size_t>(i)] = k * available / samples;
  }
  return rows;
}

}  // namespace

double ValidationResult::bits_per_token() const { return loss / std::numbers::ln2; }

ValidationResult validate(models::Model& model, Engine& engine, comm::Group& world,
                          const Dataset& data, int64_t samples) {
  const int64_t available = data.samples();
  if (available < 1)
    raise<ConfigError>("validation: there is no validation data (data.validation_fraction is 0)");
  if (samples == 0 || samples > available) samples = available;
  const int64_t passes = ceil_div(samples, kValidationRows);
  const int64_t rounds = ceil_div(passes, world.size());  // every rank runs so many
  std::vector<PassRecord> mine;
  {
    const at::NoGradGuard no_grad;
    for (int64_t round = 0; round < rounds; ++round) {
      const TokenBatch batch =
          data.batch(samples_of_pass(round * world.size() + world.rank(), samples, available));
      const ops::LossSum loss = model.loss(batch.inputs, batch.targets);
      mine.push_back({loss.sum.item<double>(), loss.count});
    }
  }
  const auto bytes = std::as_bytes(std::span(mine));
  const comm::Identity id{.step = engine.steps_done(), .label = "validation losses"};
  const auto all = world.gather_bytes(bytes, id);
  ValidationResult result;
  for (int64_t round = 0; round < rounds; ++round)
    for (const auto& rank : all) {
      PassRecord record;
      std::memcpy(&record, rank.data() + static_cast<size_t>(round) * sizeof record, sizeof record);
      result.loss += record.loss;
      result.tokens += record.tokens;
    }
  result.loss /= static_cast<double>(result.tokens);
  return result;
}

}  // namespace dovetail::trainer
