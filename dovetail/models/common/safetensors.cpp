#include "dovetail/models/common/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail::models {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little);

constexpr int64_t kLargestHeader = 100'000'000;  // the format's own limit

const std::vector<std::pair<std::string_view, at::ScalarType>> kTypes = {
    {"F32", at::kFloat}, {"BF16", at::kBFloat16}, {"F16", at::kHalf},  {"F64", at::kDouble},
    {"I64", at::kLong},  {"I32", at::kInt},       {"I16", at::kShort}, {"I8", at::kChar},
    {"U8", at::kByte},   {"BOOL", at::kBool}};

}  // namespace

struct SafetensorsFile::Mapping {
  char* data = nullptr;
  int64_t size = 0;

  explicit Mapping(const std::filesystem::path& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) raise<FileError>("{}: cannot be opened: {}", path.string(), std::strerror(errno));
    struct stat info{};
    const bool regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    size = regular ? info.st_size : 0;
    void* memory =
        size > 0 ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) : MAP_FAILED;
    const int error = errno;
    ::close(fd);
    if (!regular) raise<FileError>("{}: not a regular file", path.string());
    if (size < 8)
      raise<FileError>("{}: {} bytes are too few for a safetensors file", path.string(), size);
    if (memory == MAP_FAILED)
      raise<FileError>("{}: cannot be mapped: {}", path.string(), std::strerror(error));
    data = static_cast<char*>(memory);
  }
  ~Mapping() { ::munmap(data, static_cast<size_t>(size)); }
  Mapping(const Mapping&) = delete;
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), mapping_(std::make_shared<Mapping>(path)) {
  uint64_t length;
  std::memcpy(&length, mapping_->data, 8);
  if (length > static_cast<uint64_t>(kLargestHeader))
    raise<FileError>("{}: a header of {} bytes is no safetensors header", path.string(), length);
  if (static_cast<int64_t>(length) > mapping_->size - 8)
    raise<FileError>("{}: truncated: the header wants {} bytes, the file has {}", path.string(),
                     length + 8, mapping_->size);
  data_begin_ = 8 + static_cast<int64_t>(length);
  parse({mapping_->data + 8, static_cast<size_t>(length)}, mapping_->size - data_begin_);
}

namespace {

// Parses the header; a name that appears twice is a fault that the parser alone would hide.
json parse_object(std::string_view text, const std::string& path) {
  std::set<std::string> seen;
  std::string twice;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1)
      if (auto name = parsed.get<std::string>(); !seen.insert(name).second) twice = name;
    return true;
  };
  json header = json::parse(text.begin(), text.end(), watch, false);
  if (!header.is_object()) raise<FileError>("{}: the header is not a JSON object", path);
  if (!twice.empty()) raise<FileError>("{}: tensor {} appears twice", path, twice);
  return header;
}

SafetensorsFile::Entry parse_entry(const json& value, const std::string& name,
                                   const std::string& path) {
  if (!value.is_object() || !value.contains("dtype") || !value["dtype"].is_string() ||
      !value.contains("shape") || !value["shape"].is_array() || !value.contains("data_offsets") ||
      !value["data_offsets"].is_array() || value["data_offsets"].size() != 2)
    raise<FileError>("{}: tensor {}: wanted dtype, shape and data_offsets, got {}", path, name,
                     value.dump());
  SafetensorsFile::Entry entry;
  const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const auto& t) {
    return t.first == value["dtype"].get<std::string>();
  });
  if (type == kTypes.end())
    raise<FileError>("{}: tensor {}: dtype {} is not supported", path, name,
                     value["dtype"].get<std::string>());
  entry.dtype = type->second;
  int64_t bytes = static_cast<int64_t>(c10::elementSize(entry.dtype));
  for (const json& size : value["shape"]) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{1} << 40 ||
        __builtin_mul_overflow(bytes, size.get<int64_t>(), &bytes))
      raise<FileError>("{}: tensor {}: impossible shape {}", path, name, value["shape"].dump());
    entry.shape.push_back(size.get<int64_t>());
  }
  for (const json& offset : value["data_offsets"])
    if (!offset.is_number_unsigned() || offset.get<uint64_t>() > uint64_t{1} << 60)
      raise<FileError>("{}: tensor {}: impossible offsets {}", path, name,
                       value["data_offsets"].dump());
  entry.begin = value["data_offsets"][0].get<int64_t>();
  entry.end = value["data_offsets"][1].get<int64_t>();
  if (entry.end - entry.begin != bytes)
    raise<FileError>("{}: tensor {}: {} {} takes {} bytes, its offsets hold {}", path, name,
                     type->first, value["shape"].dump(), bytes, entry.end - entry.begin);
  return entry;
}

}  // namespace

void SafetensorsFile::parse(std::string_view header, int64_t data_bytes) {
  const json parsed = parse_object(header, path_.string());
  for (const auto& item : parsed.items()) {
    if (item.key() == "__metadata__") {
      for (const auto& note : item.value().items()) {
        if (!note.value().is_string())
          raise<FileError>("{}: metadata {} is not text", path_.string(), note.key());
        metadata_[note.key()] = note.value().get<std::string>();
      }
      continue;
    }
    entries_[item.key()] = parse_entry(item.value(), item.key(), path_.string());
  }
  std::vector<std::pair<const Entry*, const std::string*>> order;
  for (const auto& [name, entry] : entries_) order.emplace_back(&entry, &name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->end) < std::pair(b.first->begin, b.first->end);
  });
  int64_t reached = 0;
  for (const auto& [entry, name] : order) {
    if (entry->begin != reached)
      raise<FileError>(
          "{}: tensor {} starts at byte {} where {} was wanted: the tensors overlap or leave a "
          "hole",
          path_.string(), *name, entry->begin, reached);
    if (entry->end > data_bytes)
      raise<FileError>("{}: truncated: tensor {} ends at byte {} of the data, the file has {}",
                       path_.string(), *name, entry->end, data_bytes);
    reached = entry->end;
  }
  if (reached != data_bytes)
    raise<FileError>("{}: {} bytes of data after the last tensor", path_.string(),
                     data_bytes - reached);
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end()) raise<FileError>("{}: has no tensor {}", path_.string(), name);
  const Entry& entry = it->second;
  char* data = mapping_->data + data_begin_ + entry.begin;
  const auto keep = [mapping = mapping_](void*) {};
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(entry.dtype) == 0)
    return at::from_blob(data, entry.shape, keep, at::TensorOptions(entry.dtype));
  at::Tensor copy = at::empty(entry.shape, at::TensorOptions(entry.dtype));
  std::memcpy(copy.mutable_data_ptr(), data, static_cast<size_t>(entry.end - entry.begin));
  return copy;
}

namespace {

std::string header_of(const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto type = std::find_if(
        kTypes.begin(), kTypes.end(),
        [&, t = tensor.scalar_type()](const auto& known) { return known.second == t; });
    if (type == kTypes.end())
      raise<ConfigError>("tensor {}: safetensors have no dtype {}", name,
                         c10::toString(tensor.scalar_type()));
    if (header.contains(name) || name == "__metadata__")
      raise<ConfigError>("tensor {} is given twice", name);
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    header[name] = {{"dtype", type->first},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
  return text;
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string header = header_of(tensors, metadata);
  const uint64_t length = header.size();
  const std::filesystem::path partial = path.string() + ".partial";
  {
    std::ofstream out(partial, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out.write(header.data(), static_cast<std::streamsize>(header.size()));
    for (const auto& item : tensors) {
      const at::Tensor dense = item.second.detach().contiguous();
      if (dense.numel() > 0)
        out.write(static_cast<const char*>(dense.const_data_ptr()),
                  static_cast<std::streamsize>(dense.nbytes()));
    }
    out.flush();
    if (!out) raise<FileError>("{}: cannot be written: {}", partial.string(), std::strerror(errno));
  }
  std::error_code error;
  std::filesystem::rename(partial, path, error);
  if (error)
    raise<FileError>("{}: cannot be renamed to {}: {}", partial.string(), path.string(),
                     error.message());
}

SafetensorsSet::SafetensorsSet(const std::filesystem::path& path) {
  const auto single = path / "model.safetensors", index = path / "model.safetensors.index.json";
  const bool folder = std::filesystem::is_directory(path);
  if (folder ? !std::filesystem::exists(single) : path.extension() == ".json") {
    if (folder && !std::filesystem::exists(index))
      raise<FileError>("{}: holds neither model.safetensors nor model.safetensors.index.json",
                       path.string());
    read_index(folder ? index : path);
  } else {
    add_file(folder ? single : path);
  }
}

void SafetensorsSet::add_file(const std::filesystem::path& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  for (const auto& item : files_.back()->entries())
    if (!places_.emplace(item.first, files_.size() - 1).second)
      raise<FileError>("{}: tensor {} is in another file of the set too", path.string(),
                       item.first);
}

void SafetensorsSet::read_index(const std::filesystem::path& index) {
  std::ifstream in(index);
  const json parsed = json::parse(in, nullptr, false);
  if (!parsed.is_object() || !parsed.contains("weight_map") || !parsed["weight_map"].is_object())
    raise<FileError>("{}: wanted a JSON object with a weight_map", index.string());
  std::set<std::string> shards;
  for (const auto& item : parsed["weight_map"].items()) {
    if (!item.value().is_string())
      raise<FileError>("{}: tensor {}: wanted a file name", index.string(), item.key());
    const auto file = item.value().get<std::string>();
    if (std::filesystem::path(file).has_parent_path())
      raise<FileError>("{}: tensor {}: {} is not a plain file name", index.string(), item.key(),
                       file);
    if (shards.insert(file).second) add_file(index.parent_path() / file);
  }
  for (const auto& item : parsed["weight_map"].items())
    if (!contains(item.key()) ||
        file_of(item.key()).path().filename() != item.value().get<std::string>())
      raise<FileError>("{}: tensor {} is not in {}", index.string(), item.key(),
                       item.value().get<std::string>());
}

std::vector<std::string> SafetensorsSet::names() const {
  std::vector<std::string> out;
  for (const auto& item : places_) out.push_back(item.first);
  return out;
}

const SafetensorsFile& SafetensorsSet::file_of(const std::string& name) const {
  const auto it = places_.find(name);
  if (it == places_.end())
    raise<FileError>("{}: has no tensor {}", files_.front()->path().string(), name);
  return *files_[it->second];
}

const SafetensorsFile::Entry& SafetensorsSet::entry(const std::string& name) const {
  return file_of(name).entries().at(name);
}

}  // namespace dovetail::models
