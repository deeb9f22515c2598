// `dovetail plan`: an inventory or an instance in, its report out.
#pragma once

#include <cstdint>
#include <string>

namespace dovetail::plan {

struct PlanCommand {
  std::string model;     // path of an inventory, or
  std::string instance;  // path of an instance (then the rest but json is the file's)
  int64_t zero1 = 0;
  int64_t zero2 = 0;  // 0: zero3 where that is given, else zero1
  int64_t zero3 = 0;  // 0: zero1
  std::string block = "row";
  int segments = 1;
  int64_t alignment = 64;  // elements
  bool orient = false;
  bool json = false;
};

// What the command prints. Throws ConfigError and FileError.
std::string run_plan_command(const PlanCommand& command);

}  // namespace dovetail::plan
