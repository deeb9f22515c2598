// The subcommands of `dovetail`. Each adds its options to the application; main() calls what was chosen.
#pragma once

#include <CLI/CLI.hpp>

#include <functional>

namespace dovetail::apps {

// Run after parsing; returns the exit code.
using Action = std::function<int()>;

void add_train(CLI::App& app, Action& action, const char* program);
void add_checkpoint(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);

}  // namespace dovetail::apps
