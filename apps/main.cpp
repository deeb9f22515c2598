#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>

#include "apps/commands.h"
#include "dovetail/base/error.h"

int main(int argc, char** argv) {
  CLI::App app{"Dovetail: sharded data-parallel training", "dovetail"};
  app.require_subcommand(1);
  dovetail::apps::Action action;
  dovetail::apps::add_train(app, action, argv[0]);
  dovetail::apps::add_checkpoint(app, action);
  dovetail::apps::add_plan(app, action);
  try {
    app.parse(argc, argv);
    return action();
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  } catch (const dovetail::ConfigError& e) {
    fmt::print(stderr, "dovetail: error: {}\n", e.what());
    return 2;
  } catch (const c10::Error& e) {  // without the frames of torch
    fmt::print(stderr, "dovetail: error: {}\n", e.what_without_backtrace());
    return 1;
  } catch (const std::exception& e) {
    fmt::print(stderr, "dovetail: error: {}\n", e.what());
    return 1;
  }
}
