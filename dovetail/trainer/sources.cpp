#include "dovetail/trainer/sources.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "dovetail/base/error.h"
#include "dovetail/trainer/mapped_file.h"

namespace dovetail::trainer {
namespace {

namespace fs = std::filesystem;

constexpr std::array kNotLibrary{"site-packages", "dist-packages", "test",
                                 "tests",         "idle_test",     "__pycache__"};

std::string python_library_folder() {
  const char* command =
      "python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))' 2>/dev/null";
  FILE* pipe = ::popen(command, "re");
  if (!pipe) raise<ConfigError>("data.sources: python-stdlib: cannot start python3");
  std::string path;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) path += static_cast<char>(c);
  const int status = ::pclose(pipe);
  while (!path.empty() && path.back() == '\n') path.pop_back();
  if (status != 0 || !fs::is_directory(path))
    raise<ConfigError>(
        "data.sources: python-stdlib: wanted the library folder of python3, got '{}' (status {})",
        path, status);
  return path;
}

bool ends_with_one(const std::string& name, const std::vector<std::string>& suffixes) {
  return suffixes.empty() || std::any_of(suffixes.begin(), suffixes.end(),
                                         [&](const std::string& s) { return name.ends_with(s); });
}

using Skip = std::vector<std::string>;  // names of folders that are not entered

std::vector<Document> folder_documents(const std::string& folder,
                                       const std::vector<std::string>& suffixes, const Skip& skip) {
  std::vector<Document> documents;
  const auto options = fs::directory_options::skip_permission_denied;
  for (auto it = fs::recursive_directory_iterator(folder, options); it != fs::end(it); ++it) {
    const std::string name = it->path().filename().string();
    if (it->is_directory()) {
      if (std::find(skip.begin(), skip.end(), name) != skip.end()) it.disable_recursion_pending();
      continue;
    }
    if (!it->is_regular_file() || !ends_with_one(name, suffixes)) continue;
    documents.push_back(
        {fs::relative(it->path(), folder).generic_string(), map_file(it->path().string())});
  }
  return documents;
}

// Throws FileError naming the sidecar, the key, what was wanted and what was got.
Document token_document(const std::string& path, const std::string& sidecar) {
  const auto json = nlohmann::json::parse(read_text_file(sidecar), nullptr, false);
  if (!json.is_object()) raise<FileError>("{}: wanted a JSON object", sidecar);
  auto number = [&](const char* key) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_number_integer() || it->get<int64_t>() < 1)
      raise<FileError>("{}: {}: wanted a positive integer, got {}", sidecar, key,
                       it == json.end() ? "nothing" : it->dump());
    return it->get<int64_t>();
  };
  const std::string dtype = json.contains("dtype") ? json["dtype"].dump() : "nothing";
  if (dtype != "\"uint16\"" && dtype != "\"uint32\"")
    raise<FileError>("{}: dtype: wanted \"uint16\" or \"uint32\", got {}", sidecar, dtype);
  const int width = dtype == "\"uint16\"" ? 2 : 4;
  Document document{fs::path(path).filename().string(), map_file(path), width,
                    number("vocab_size")};
  const int64_t count = number("count");
  if (static_cast<int64_t>(document.bytes->size()) != count * width)
    raise<FileError>("{}: wanted {} tokens of {} bytes as {} says, got {} bytes", path, count,
                     width, sidecar, document.bytes->size());
  return document;
}

std::vector<Document> documents_of(const std::string& source, const std::vector<std::string>& suffixes,
                                   const std::string& key) {
  if (source == "python-stdlib")
    return folder_documents(python_library_folder(), {".py"},
                            Skip(kNotLibrary.begin(), kNotLibrary.end()));
  if (!fs::exists(source)) raise<ConfigError>("{}: {}: no such file or folder", key, source);
  if (fs::is_directory(source)) return folder_documents(source, suffixes, {});
  const std::string sidecar = source + ".json";
  if (fs::exists(sidecar)) return {token_document(source, sidecar)};
  return {{fs::path(source).filename().string(), map_file(source)}};
}

}  // namespace

std::vector<Document> find_documents(const std::vector<std::string>& sources,
                                     const std::vector<std::string>& suffixes, const std::string& key) {
  std::vector<Document> all;
  for (const std::string& source : sources) {
    std::vector<Document> found = documents_of(source, suffixes, key);
    if (found.empty()) raise<ConfigError>("{}: {}: found no file to read", key, source);
    std::move(found.begin(), found.end(), std::back_inserter(all));
  }
  return all;
}

}  // namespace dovetail::trainer
