#include "dovetail/checkpoint/folder.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "dovetail/base/error.h"
#include "dovetail/checkpoint/reader.h"

namespace dovetail {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr size_t kDigits = 8;

std::optional<int64_t> parse_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size() || value < 0)
    return std::nullopt;
  return value;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> names;
  fs::directory_iterator it(folder, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  while (!error && it != fs::directory_iterator{}) {
    names.push_back(it->path().filename().string());
    it.increment(error);
  }
  if (error) raise<FileError>("{}: cannot read folder: {}", folder, error.message());
  std::ranges::sort(names);
  return names;
}

void examine(ListedCheckpoint& listed) {
  try {
    const Checkpoint checkpoint(listed.path);
    listed.fault = checkpoint.non_finite_text();
  } catch (const FileError& e) {
    listed.fault = e.what();
    listed.broken = true;
  }
}

}  // namespace

std::string to_text(const CheckpointName& name) {
  const std::string text = fmt::format("{}{:08}", kPrefix, name.step);
  return name.save == 1 ? text : fmt::format("{}-{}", text, name.save);
}

std::optional<CheckpointName> parse_checkpoint_name(std::string_view text) {
  if (!text.starts_with(kPrefix)) return std::nullopt;
  text.remove_prefix(kPrefix.size());
  const size_t dash = text.find('-');
  if (text.substr(0, dash).size() < kDigits) return std::nullopt;
  const auto step = parse_number(text.substr(0, dash));
  const auto save = dash == std::string_view::npos ? 1 : parse_number(text.substr(dash + 1));
  if (!step || !save) return std::nullopt;
  return CheckpointName{*step, *save};
}

std::vector<ListedCheckpoint> list_checkpoints(const std::string& folder) {
  std::vector<ListedCheckpoint> list;
  for (const std::string& text : names_in(folder)) {
    const bool writing = text.starts_with(kWritingPrefix);
    const auto name = parse_checkpoint_name(writing ? text.substr(kWritingPrefix.size()) : text);
    if (!name) continue;
    list.push_back({.path = folder + "/" + text, .name = *name, .fault = {}, .broken = false});
    if (!writing) {
      examine(list.back());
    } else {
      list.back().fault = fmt::format(
          "{}: unfinished: its writing was broken off or is still going on", list.back().path);
      list.back().broken = true;
    }
  }
  std::ranges::stable_sort(list, std::ranges::greater{}, &ListedCheckpoint::name);
  return list;
}

CheckpointName free_name(const std::string& folder, int64_t step) {
  CheckpointName free{step, 1};
  for (const std::string& text : names_in(folder))
    if (const auto name = parse_checkpoint_name(text); name && name->step == step)
      free.save = std::max(free.save, name->save + 1);
  return free;
}

std::vector<std::string> superfluous(const std::string& folder, const CheckpointName& newest,
                                     int64_t keep) {
  DT_CHECK_GE(keep, 1);
  std::vector<std::string> paths;
  int64_t good = 1, last_step = newest.step;
  for (const ListedCheckpoint& c : list_checkpoints(folder)) {
    if (c.broken || c.name >= newest) continue;
    const bool again = c.name.step == last_step;  // an earlier save of a step already counted
    if (again || good >= keep) {
      paths.push_back(c.path);
    } else if (c.fault.empty()) {
      ++good;
      last_step = c.name.step;
    }
  }
  return paths;
}

void remove_checkpoint(FileSystem& files, const std::string& path) {
  const fs::path from(path);
  const std::string to =
      (from.parent_path() / (std::string(kRemovingPrefix) + from.filename().string())).string();
  files.remove_folder(to);
  files.rename(path, to);
  files.remove_folder(to);
}

std::vector<std::string> remove_leftovers(FileSystem& files, const std::string& folder) {
  std::vector<std::string> removed;
  for (const std::string& text : names_in(folder)) {
    if (!text.starts_with(kWritingPrefix) && !text.starts_with(kRemovingPrefix)) continue;
    files.remove_folder(folder + "/" + text);
    removed.push_back(folder + "/" + text);
  }
  return removed;
}

}  // namespace dovetail
