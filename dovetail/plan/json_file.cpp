#include "dovetail/plan/json_file.h"

#include <filesystem>
#include <fstream>
#include <iterator>

namespace dovetail::plan {

std::string read_text_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in.is_open() || std::filesystem::is_directory(path))
    raise<FileError>("{}: cannot be read", path);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (in.bad()) raise<FileError>("{}: cannot be read", path);
  return text;
}

nlohmann::json parse_json(std::string_view text, const std::string& path) {
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& e) {
    raise<FileError>("{}: not JSON, at byte {}", path, e.byte);
  }
}

}  // namespace dovetail::plan
