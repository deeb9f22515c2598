// dovetail plan MODEL.json --zero1 D [...] | dovetail plan --instance FILE [--json]
#include <fmt/format.h>

#include <memory>

#include "apps/commands.h"
#include "dovetail/base/error.h"
#include "dovetail/plan/plan_command.h"

namespace dovetail::apps {

void add_plan(CLI::App& app, Action& action) {
  auto command = std::make_shared<plan::PlanCommand>();
  CLI::App* sub =
      app.add_subcommand("plan", "lay a model's parameters out over ranks, before any job starts");
  CLI::Option* model =
      sub->add_option("model", command->model, "JSON inventory of the model's parameters");
  CLI::Option* instance =
      sub->add_option("--instance", command->instance, "JSON planner instance, in units");
  instance->excludes(model);
  CLI::Option* zero1 = sub->add_option("--zero1", command->zero1,
                                       "ranks that share main weights and optimizer state");
  sub->add_option("--zero2", command->zero2,
                  "ranks that share gradients (default: zero3 if given, else zero1)");
  sub->add_option("--zero3", command->zero3,
                  "ranks that share runtime parameters (default: zero1)");
  sub->add_option("--block", command->block,
                  "element, row, 32-row, 128-row, head, expert or matrix")
      ->capture_default_str();
  sub->add_option("--segments", command->segments, "most segments a group is planned as (1 to 3)")
      ->capture_default_str();
  sub->add_option("--alignment", command->alignment, "elements that starts are rounded to")
      ->capture_default_str();
  sub->add_flag("--orient", command->orient,
                "store matrices transposed where that makes blocks agree, experts one by one");
  sub->add_flag("--json", command->json, "print JSON");
  sub->callback([=, &action] {
    if (command->model.empty() && command->instance.empty())
      throw CLI::RequiredError("plan: MODEL.json or --instance FILE");
    if (!command->model.empty() && zero1->empty()) throw CLI::RequiredError("plan: --zero1");
    if (!command->instance.empty())  // an instance says all this itself
      for (const char* name : {"--zero1", "--zero2", "--zero3", "--block", "--segments", "--alignment", "--orient"})
        if (!sub->get_option(name)->empty()) throw CLI::ExcludesError("--instance", name);
    action = [=] {
      fmt::print("{}", plan::run_plan_command(*command));
      return 0;
    };
  });
}

}  // namespace dovetail::apps
