// dovetail train CONFIG.toml [--nproc N] [--set key=value]... [--resume] [--eval]
#include <memory>

#include "apps/commands.h"
#include "dovetail/trainer/launch.h"

namespace dovetail::apps {

void add_train(CLI::App& app, Action& action, const char* program) {
  auto command = std::make_shared<trainer::TrainCommand>();
  CLI::App* train = app.add_subcommand("train", "train a model as a configuration says");
  train->add_option("config", command->config, "TOML file")->required();
  train->add_option("--nproc", command->ranks, "ranks to start on this host")
      ->check(CLI::Range(1, 4096));
  train->add_option("--set", command->overrides, "KEY.PATH=VALUE, over what the file says")
      ->allow_extra_args(false);
  train->add_flag("--resume", command->resume,
                  "go on from the newest sound checkpoint of the run's folder");
  train->add_flag("--eval", command->evaluate,
                  "only measure the validation loss of the newest checkpoint");
  train->add_flag("--trace", command->trace,
                  "record some steps: RUN/trace.json for Perfetto, RUN/trace.txt and the log for "
                  "where the time goes");
  train->callback([=, &action] {
    action = [=] {
      return trainer::run_train_command(*command, program, trainer::process_environment());
    };
  });
}

}  // namespace dovetail::apps
