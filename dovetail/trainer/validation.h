// Validation loss over a fixed set of samples, shared among the ranks.
#pragma once

#include <cstdint>

#include "dovetail/comm/group.h"
#include "dovetail/engine/engine.h"
#include "dovetail/models/common/model.h"
#include "dovetail/trainer/dataset.h"

namespace dovetail::trainer {

struct ValidationResult {
  double loss = 0;  // nats per token
  int64_t tokens = 0;
  double bits_per_token() const;  // bits per byte where tokens are bytes
};

// The loss over `samples` samples spread evenly over the data (0 or more than there are: all), by
// forward passes of kValidationRows samples, dealt to the ranks in turn. The same bits for any
// number of ranks. Collective.
inline constexpr int64_t kValidationRows = 8;
ValidationResult validate(models::Model& model, Engine& engine, comm::Group& world,
                          const Dataset& data, int64_t samples);

}  // namespace dovetail::trainer
