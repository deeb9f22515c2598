// From a configuration to the parts of a run.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "dovetail/comm/group.h"
#include "dovetail/engine/engine.h"
#include "dovetail/models/common/model.h"
#include "dovetail/trainer/config.h"
#include "dovetail/trainer/dataset.h"
#include "dovetail/trainer/sample_order.h"
#include "dovetail/update/lr.h"
#include "dovetail/update/optimizer.h"

namespace dovetail::trainer {

// Throws ConfigError, FileError.
Split load_data(const DataConfig& config);

// Throws ConfigError unless train.batch divides into ranks and micro-batches.
RankShare share_of(const TrainConfig& config, int64_t rank, int64_t ranks);

// The model of the [model] section with its initial weights. A vocabulary that the section leaves
// open is the data's. Throws ConfigError for a vocabulary smaller than the data's and for samples
// longer than the model's context.
std::unique_ptr<models::Model> make_model(const Config& config, int64_t data_vocab);

LrSchedule schedule_of(const OptimizerConfig& config, int64_t steps);
OptimizerOptions optimizer_options(const Config& config);
plan::PlanOptions plan_options(const ShardConfig& config, int64_t ranks);
EngineOptions engine_options(const Config& config, const models::Model& model, int64_t ranks);

// Every rank gives its digest; throws ConfigError on all, naming the first rank that differs from
// rank 0. Collective.
void agree(comm::Group& world, uint64_t digest, std::string_view what);

// Makes the run's folder. A run that is there already goes on in place with `resume`; otherwise its
// folder is kept under the first free name FOLDER.N, which is returned (empty: there was none). One
// process alone may call it.
std::string prepare_folder(const std::string& folder, bool resume);

}  // namespace dovetail::trainer
