// Manifest to JSON and back.
#include <nlohmann/json.hpp>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/checkpoint/manifest.h"

namespace dovetail {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "dovetail-checkpoint";
constexpr size_t kHexDigits = 16;

std::string to_hex(uint64_t value) { return fmt::format("{:016x}", value); }

uint64_t from_hex(std::string_view digits) {
  uint64_t value = 0;
  if (digits.size() != kHexDigits)
    raise<FileError>("wanted 16 hexadecimal digits, got \"{}\"", digits);
  for (char c : digits) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) raise<FileError>("wanted 16 hexadecimal digits, got \"{}\"", digits);
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  return value;
}

Json json_of(const DataFile& file) {
  std::string checksums;
  checksums.reserve(file.checksums.size() * kHexDigits);
  for (uint64_t sum : file.checksums) checksums += to_hex(sum);
  Json records = Json::array();
  for (const Record& r : file.records)
    records.push_back({r.entry, r.elements.begin, r.elements.end, r.offset});
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"checksums", std::move(checksums)},
          {"records", std::move(records)}};
}

DataFile data_file_of(const Json& json) {
  DataFile file{.name = json.at("name").get<std::string>(),
                .bytes = json.at("bytes").get<int64_t>(),
                .checksums = {},
                .records = {}};
  const auto& digits = json.at("checksums").get_ref<const std::string&>();
  if (digits.size() % kHexDigits != 0) raise<FileError>("checksums of {} are cut", file.name);
  for (size_t i = 0; i < digits.size(); i += kHexDigits)
    file.checksums.push_back(from_hex(std::string_view(digits).substr(i, kHexDigits)));
  for (const Json& r : json.at("records"))
    file.records.push_back({.entry = r.at(0).get<int64_t>(),
                            .elements = {r.at(1).get<int64_t>(), r.at(2).get<int64_t>()},
                            .offset = r.at(3).get<int64_t>()});
  return file;
}

Json json_of(const std::vector<NonFinite>& list) {
  Json json = Json::array();
  for (const NonFinite& n : list) json.push_back({n.entry, n.element});
  return json;
}

std::vector<NonFinite> non_finite_of(const Json& json) {
  std::vector<NonFinite> list;
  for (const Json& n : json) list.push_back({n.at(0).get<int64_t>(), n.at(1).get<int64_t>()});
  return list;
}

Json json_of(const Manifest& m) {
  Json entries = Json::array(), files = Json::array(), aliases = Json::object();
  for (const StoredEntry& e : m.entries)
    entries.push_back({{"tensor", e.tensor},
                       {"field", e.field},
                       {"shape", e.shape},
                       {"dtype", std::string(name_of(e.dtype))}});
  for (const DataFile& f : m.files) files.push_back(json_of(f));
  for (const TensorAlias& a : m.aliases) aliases[a.alias] = a.tensor;
  const TrainingState& t = m.training;
  return {{"format", std::string(kFormat)},
          {"version", kCheckpointVersion},
          {"step", t.step},
          {"world", m.world},
          {"degrees", t.degrees},
          {"plan_hash", to_hex(t.plan_hash)},
          {"optimizer", t.optimizer},
          {"config", t.config},
          {"trainer", Json::parse(t.trainer)},
          {"chunk_bytes", m.chunk_bytes},
          {"entries", std::move(entries)},
          {"aliases", std::move(aliases)},
          {"files", std::move(files)},
          {"non_finite", json_of(m.non_finite)}};
}

Manifest manifest_of(const Json& json) {
  const auto format = json.at("format").get<std::string>();
  if (format != kFormat) raise<FileError>("wanted format \"{}\", got \"{}\"", kFormat, format);
  const auto version = json.at("version").get<int64_t>();
  if (version != kCheckpointVersion)
    raise<FileError>("wanted version {}, got {}", kCheckpointVersion, version);
  Manifest m;
  m.training = {.step = json.at("step").get<int64_t>(),
                .degrees = json.at("degrees").get<std::string>(),
                .plan_hash = from_hex(json.at("plan_hash").get<std::string>()),
                .optimizer = json.at("optimizer").get<std::string>(),
                .config = json.at("config").get<std::string>(),
                .trainer = json.at("trainer").dump()};
  m.world = json.at("world").get<int64_t>();
  m.chunk_bytes = json.at("chunk_bytes").get<int64_t>();
  for (const Json& e : json.at("entries"))
    m.entries.push_back({.tensor = e.at("tensor").get<std::string>(),
                         .field = e.at("field").get<std::string>(),
                         .shape = e.at("shape").get<std::vector<int64_t>>(),
                         .dtype = parse_dtype(e.at("dtype").get<std::string>())});
  for (const auto& [alias, tensor] : json.at("aliases").items())
    m.aliases.push_back({.alias = alias, .tensor = tensor.get<std::string>()});
  for (const Json& f : json.at("files")) m.files.push_back(data_file_of(f));
  m.non_finite = non_finite_of(json.at("non_finite"));
  return m;
}

std::string seal_of(std::string_view content) {
  return fmt::format("{{\"seal\":\"xxh3-64\",\"checksum\":\"{}\",\"bytes\":{},\"manifest\":\n",
                     to_hex(hash64(content)), content.size());
}

// The content of a sealed text.
std::string_view open_seal(std::string_view text) {
  const size_t line = text.find('\n');
  if (line == std::string_view::npos) raise<FileError>("no seal in the first line");
  const std::string_view content = text.substr(line + 1);
  const Json head =
      Json::parse(std::string(text.substr(0, line)) + "0}", nullptr, /*allow_exceptions=*/false);
  if (!head.is_object() || head.value("seal", "") != "xxh3-64")
    raise<FileError>("no seal in the first line");
  const auto bytes = head.at("bytes").get<uint64_t>();
  if (bytes != content.size())
    raise<FileError>("wanted {} bytes after the first line, got {}", bytes, content.size());
  const uint64_t wanted = from_hex(head.at("checksum").get<std::string>()), got = hash64(content);
  if (wanted != got)
    raise<FileError>("checksum: wanted {}, got {}: it was altered", to_hex(wanted), to_hex(got));
  return content;
}

}  // namespace

std::string to_text(const Manifest& manifest) {
  const std::string content = json_of(manifest).dump() + "\n}\n";
  return seal_of(content) + content;
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  Manifest manifest;
  try {
    const std::string_view content = open_seal(text);
    manifest = manifest_of(Json::parse(content.substr(0, content.rfind('}'))));
  } catch (const Json::exception& e) {
    raise<FileError>("{}: not a checkpoint manifest: {}", file, e.what());
  } catch (const Error& e) {
    raise<FileError>("{}: {}", file, e.what());
  }
  validate(manifest, file);
  return manifest;
}

std::string to_text(const RankShare& share) {
  return Json{{"file", json_of(share.file)}, {"non_finite", json_of(share.non_finite)}}.dump();
}

RankShare parse_share(std::string_view text) {
  const Json json = Json::parse(text);
  return {.file = data_file_of(json.at("file")),
          .non_finite = non_finite_of(json.at("non_finite"))};
}

void check_json_object(const std::string& text, std::string_view what) {
  if (!Json::parse(text, nullptr, /*allow_exceptions=*/false).is_object())
    raise<ConfigError>("{}: wanted a JSON object, got \"{}\"", what, text.substr(0, 60));
}

}  // namespace dovetail
