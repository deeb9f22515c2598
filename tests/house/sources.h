// The source files of the repository and the layers that CMake declares, as the house tests see them.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace dovetail::house {

struct Layer {
  std::set<std::string> deps;  // itself not among them
  bool torch = false;
  int order = 0;               // place in the list, lowest first
};
using Layers = std::map<std::string, Layer>;

// The dt_layer() calls of a CMake file.
Layers parse_layers(const std::string& cmake);

struct SourceFile {
  std::filesystem::path path;      // relative to the repository
  std::vector<std::string> lines;  // as they are
  std::string layer() const;       // the folder below dovetail/; "" elsewhere
};

std::string read_file(const std::filesystem::path& path);

// All .h, .cpp, .cu and .cuh files below a folder of the repository; none when there is no such folder.
std::vector<SourceFile> sources_below(const std::string& folder);

// The same lines without comments and with the contents of string and character literals removed.
std::vector<std::string> code_of(const std::vector<std::string>& lines);

// The file that a line includes, "" when it includes none: dovetail/base/error.h.
std::string included_by(const std::string& line);

// Complaints, as "what is wrong", about an include of a file of `layer`; empty when it may stay.
std::string include_complaint(const Layers& layers, const std::string& layer, const std::string& included);
// About a line of code below the trainer (from code_of).
std::string state_complaint(const std::string& code);
// Characters of a line, not bytes.
int columns(std::string_view line);

}  // namespace dovetail::house
