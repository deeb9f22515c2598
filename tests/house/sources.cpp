#include "tests/house/sources.h"

#include <algorithm>
#include <fstream>
#include <regex>
#include <sstream>

namespace dovetail::house {
namespace {

const std::set<std::string> kSourceExtensions{".h", ".cpp", ".cu", ".cuh"};
const std::set<std::string> kKeywords{"TORCH", "OPTIMIZE", "DEPS", "LINK"};

// Removes comments and literals from one line; `in_comment` says whether a /* is open.
std::string strip(const std::string& line, bool& in_comment) {
  std::string code;
  char literal = 0;  // the quote that is open
  for (size_t i = 0; i < line.size(); ++i) {
    if (in_comment) {
      if (line.compare(i, 2, "*/") == 0) in_comment = false, ++i;
    } else if (literal) {
      if (line[i] == '\\')
        ++i;
      else if (line[i] == literal)
        literal = 0, code += line[i];
    } else if (line.compare(i, 2, "//") == 0) {
      break;
    } else if (line.compare(i, 2, "/*") == 0) {
      in_comment = true, ++i;
    } else {
      // 100'000 is no literal.
      const bool separator = line[i] == '\'' && i > 0 && std::isalnum(static_cast<unsigned char>(line[i - 1]));
      if ((line[i] == '"' || line[i] == '\'') && !separator) literal = line[i];
      code += line[i];
    }
  }
  return code;
}

}  // namespace

Layers parse_layers(const std::string& cmake) {
  Layers layers;
  const std::regex call(R"(dt_layer\(([^)]*)\))");
  const std::string text = std::regex_replace(cmake, std::regex("#[^\n]*"), "");
  for (std::sregex_iterator at(text.begin(), text.end(), call), end; at != end; ++at) {
    std::istringstream words((*at)[1].str());
    std::string name, word, section;
    words >> name;
    Layer layer{.deps = {}, .torch = false, .order = static_cast<int>(layers.size())};
    while (words >> word) {
      if (kKeywords.contains(word)) section = word;
      layer.torch = layer.torch || word == "TORCH";
      if (section == "DEPS" && word != section) layer.deps.insert(word);
    }
    layers[name] = layer;
  }
  return layers;
}

std::string SourceFile::layer() const {
  auto part = path.begin();
  if (part == path.end() || *part != "dovetail" || std::distance(part, path.end()) < 3) return "";
  return (++part)->string();
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<SourceFile> sources_below(const std::string& folder) {
  const std::filesystem::path root = DOVETAIL_SOURCE_DIR;
  std::vector<SourceFile> found;
  if (!std::filesystem::exists(root / folder)) return found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
    if (!entry.is_regular_file() || !kSourceExtensions.contains(entry.path().extension())) continue;
    SourceFile file{std::filesystem::relative(entry.path(), root), {}};
    std::istringstream in(read_file(entry.path()));
    for (std::string line; std::getline(in, line);) file.lines.push_back(line);
    found.push_back(std::move(file));
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return found;
}

std::vector<std::string> code_of(const std::vector<std::string>& lines) {
  std::vector<std::string> code;
  bool in_comment = false;
  for (const std::string& line : lines) code.push_back(strip(line, in_comment));
  return code;
}

std::string included_by(const std::string& line) {
  static const std::regex include(R"(^\s*#\s*include\s*[<"]([^>"]+)[>"])");
  std::smatch match;
  return std::regex_search(line, match, include) ? match[1].str() : "";
}

std::string include_complaint(const Layers& layers, const std::string& layer, const std::string& included) {
  static const std::regex torch("^(torch|ATen|c10|caffe2)/"), ours("^dovetail/([^/]+)/");
  const Layer& from = layers.at(layer);
  if (std::regex_search(included, torch)) return from.torch ? "" : "torch in a layer that is free of it";
  std::smatch match;
  if (!std::regex_search(included, match, ours)) return "";
  const std::string to = match[1];
  if (!layers.contains(to)) return "no such layer";
  return to == layer || from.deps.contains(to) ? "" : "an upward edge: " + layer + " may not include " + to;
}

std::string state_complaint(const std::string& code) {
  static const std::regex environment(R"(\b(secure_)?(getenv|setenv|putenv)\s*\(|\benviron\b)");
  static const std::regex ends(R"((^|[^\w.>])(exit|_exit|_Exit|quick_exit)\s*\()");
  static const std::regex thread(R"(\bthread_local\b|\b__thread\b)");
  static const std::regex constant(R"(\b(const|constexpr|constinit const|consteval)\b)");
  // `static` and then a name that is not followed by its parameters.
  static const std::regex local_static(R"(^\s*(inline\s+)?static\s+[^()]*[\w>\]&*]\s*(=|;|\{))");
  // A declaration at the margin: type, name, and an initializer or nothing.
  static const std::regex global(
      R"(^(inline\s+)?[A-Za-z_][\w:]*(<[^()]*>)?[\s&*]+[A-Za-z_]\w*(\[\w*\])?\s*(=.*|\{.*\})?;)");
  static const std::regex no_variable(
      R"(^\s*(static\s+)?(using|typedef|extern|class|struct|enum|union|namespace|template|concept|return|friend)\b)");
  if (std::regex_search(code, environment)) return "reads or writes the environment";
  if (std::regex_search(code, ends)) return "ends the process";
  if (std::regex_search(code, thread)) return "thread-local state";
  if (std::regex_search(code, constant) || std::regex_search(code, no_variable)) return "";
  if (std::regex_search(code, local_static)) return "static mutable state";
  return std::regex_search(code, global) ? "a mutable global" : "";
}

int columns(std::string_view line) {
  return static_cast<int>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace dovetail::house
