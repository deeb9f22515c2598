#include "dovetail/trainer/metrics.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "dovetail/base/error.h"

namespace dovetail::trainer {

MetricsFile::MetricsFile(std::string path, int64_t steps_done) : path_(std::move(path)) {
  std::vector<nlohmann::json> kept;
  if (steps_done > 0)
    for (auto& line : read_metrics(path_))
      if (line.value("step", int64_t{0}) <= steps_done) kept.push_back(std::move(line));
  // Through a second file, so that a kill in between loses nothing.
  const std::string fresh = path_ + ".new";
  out_.open(fresh, std::ios::trunc);
  for (const auto& line : kept) write(line);
  out_.close();
  if (!out_) raise<FileError>("{}: cannot write: {}", fresh, std::strerror(errno));
  std::filesystem::rename(fresh, path_);
  out_.open(path_, std::ios::app);
}

void MetricsFile::write(const nlohmann::json& line) {
  out_ << line.dump() << '\n' << std::flush;
  if (!out_) raise<FileError>("{}: cannot write: {}", path_, std::strerror(errno));
}

std::vector<nlohmann::json> read_metrics(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream in(path);
  for (std::string text; std::getline(in, text);) {
    auto line = nlohmann::json::parse(text, nullptr, false);
    if (line.is_object()) lines.push_back(std::move(line));
  }
  return lines;
}

}  // namespace dovetail::trainer
