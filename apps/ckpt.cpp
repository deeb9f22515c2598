// dovetail ckpt inspect|verify FOLDER, for one checkpoint or a folder of them.
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "apps/commands.h"
#include "dovetail/base/error.h"
#include "dovetail/checkpoint/inspect.h"

namespace dovetail::apps {
namespace {

bool is_checkpoint(const std::string& folder) {
  return std::filesystem::exists(folder + "/" + std::string(kManifestName));
}

int inspect(const std::string& folder) {
  if (!std::filesystem::exists(folder)) raise<FileError>("ckpt: no such folder: {}", folder);
  fmt::print("{}", is_checkpoint(folder) ? describe(Checkpoint(folder)) : describe_folder(folder));
  return 0;
}

int verify_all_bytes(const std::string& folder) {
  const Checkpoint checkpoint(folder);
  fmt::print("{}", describe_verification(checkpoint));
  return verify(checkpoint).empty() ? 0 : 1;
}

}  // namespace

void add_checkpoint(CLI::App& app, Action& action) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "look at checkpoints")->require_subcommand(1);
  auto folder = std::make_shared<std::string>();
  CLI::App* inspecting =
      ckpt->add_subcommand("inspect", "what a checkpoint, or a folder of checkpoints, holds");
  inspecting->add_option("folder", *folder)->required();
  inspecting->callback([=, &action] { action = [=] { return inspect(*folder); }; });
  CLI::App* verifying =
      ckpt->add_subcommand("verify", "read every byte of a checkpoint and compare the checksums");
  verifying->add_option("folder", *folder)->required();
  verifying->callback([=, &action] { action = [=] { return verify_all_bytes(*folder); }; });
}

}  // namespace dovetail::apps
