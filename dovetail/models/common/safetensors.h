// Safetensors files: 8 bytes header length, little endian; a JSON header of names, dtypes, shapes
// and byte ranges; data. Reading maps the file and checks all of the header against the format
// before anything is used; every fault is a FileError naming the file and, where there is one, the
// tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace dovetail::models {

class SafetensorsFile {
 public:
  struct Entry {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
    int64_t begin, end;  // bytes from the start of the data
  };

  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, Entry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // A view of the mapped file (private to the process: writes do not reach the file) that keeps the
  // mapping alive; a copy where the file leaves the data misaligned.
  at::Tensor tensor(const std::string& name) const;

 private:
  struct Mapping;
  void parse(std::string_view header, int64_t data_bytes);

  std::filesystem::path path_;
  std::shared_ptr<Mapping> mapping_;
  int64_t data_begin_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Writes the tensors (any strides, on the CPU) in the order given, under a temporary name that is
// then renamed. Throws FileError where the file cannot be written, ConfigError for a dtype that the
// format lacks or a name given twice.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// All tensors of a file, of a folder (model.safetensors, or the shards that
// model.safetensors.index.json names), or of such an index file.
class SafetensorsSet {
 public:
  explicit SafetensorsSet(const std::filesystem::path& path);
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return places_.count(name) > 0; }
  const SafetensorsFile& file_of(const std::string& name) const;
  const SafetensorsFile::Entry& entry(const std::string& name) const;
  at::Tensor tensor(const std::string& name) const { return file_of(name).tensor(name); }

 private:
  void add_file(const std::filesystem::path& path);
  void read_index(const std::filesystem::path& index);

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, size_t> places_;
};

}  // namespace dovetail::models
