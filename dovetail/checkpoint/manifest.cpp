#include "dovetail/checkpoint/manifest.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail {
namespace {

void check_entries(const Manifest& m, const std::string& file) {
  std::set<std::pair<std::string, std::string>> seen;
  for (const StoredEntry& e : m.entries) {
    if (std::ranges::any_of(e.shape, [](int64_t d) { return d < 0; }))
      raise<FileError>("{}: {} has a negative dimension", file, e.name());
    if (!seen.emplace(e.tensor, e.field).second)
      raise<FileError>("{}: {} is listed twice", file, e.name());
  }
  std::set<std::string> tensors;
  for (const StoredEntry& e : m.entries) tensors.insert(e.tensor);
  for (const TensorAlias& a : m.aliases) {
    if (!tensors.contains(a.tensor))
      raise<FileError>("{}: alias {} of unknown tensor {}", file, a.alias, a.tensor);
    if (tensors.contains(a.alias))
      raise<FileError>("{}: {} is both a tensor and an alias", file, a.alias);
  }
}

void check_record(const Manifest& m, const DataFile& f, const Record& r, const std::string& file) {
  if (r.entry < 0 || r.entry >= static_cast<int64_t>(m.entries.size()))
    raise<FileError>("{}: {} holds an entry number {} of {}", file, f.name, r.entry,
                     m.entries.size());
  const StoredEntry& e = m.entries[r.entry];
  const int64_t bytes = r.elements.size() * size_of(e.dtype);
  if (r.elements.empty() || !Interval{0, e.numel()}.contains(r.elements) || r.offset < 0 ||
      r.offset > f.bytes - bytes)
    raise<FileError>(
        "{}: {} holds elements [{}, {}) of {} at byte {}: outside of {} elements or {} bytes", file,
        f.name, r.elements.begin, r.elements.end, e.name(), r.offset, e.numel(), f.bytes);
}

void check_files(const Manifest& m, const std::string& file) {
  if (m.chunk_bytes <= 0) raise<FileError>("{}: chunk_bytes is {}", file, m.chunk_bytes);
  std::set<std::string> names;
  for (const DataFile& f : m.files) {
    if (f.name.empty() || f.name.front() == '.' || f.name.find('/') != std::string::npos ||
        f.name == kManifestName)
      raise<FileError>("{}: \"{}\" is not the name of a data file", file, f.name);
    if (!names.insert(f.name).second) raise<FileError>("{}: {} is listed twice", file, f.name);
    const int64_t chunks = f.bytes < 0 ? -1 : ceil_div(f.bytes, m.chunk_bytes);
    if (chunks != static_cast<int64_t>(f.checksums.size()))
      raise<FileError>("{}: {} of {} bytes has {} checksums", file, f.name, f.bytes,
                       f.checksums.size());
    for (const Record& r : f.records) check_record(m, f, r, file);
  }
}

void check_coverage(const Manifest& m, const std::string& file) {
  std::vector<IntervalList> held(m.entries.size());
  for (const DataFile& f : m.files)
    for (const Record& r : f.records) held[r.entry].push_back(r.elements);
  for (size_t i = 0; i < held.size(); ++i) {
    const StoredEntry& e = m.entries[i];
    std::ranges::sort(held[i]);
    held[i].push_back({e.numel(), e.numel()});
    int64_t next = 0;
    for (Interval run : held[i]) {
      if (run.begin > next)
        raise<FileError>("{}: elements [{}, {}) of {} were written by no rank", file, next,
                         run.begin, e.name());
      if (run.begin < next)
        raise<FileError>("{}: elements [{}, {}) of {} were written twice", file, run.begin,
                         std::min(next, run.end), e.name());
      next = run.end;
    }
  }
}

}  // namespace

int64_t StoredEntry::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

int64_t Manifest::data_bytes() const {
  int64_t n = 0;
  for (const DataFile& f : files) n += f.bytes;
  return n;
}

void validate(const Manifest& manifest, const std::string& file) {
  check_entries(manifest, file);
  check_files(manifest, file);
  check_coverage(manifest, file);
  for (const NonFinite& n : manifest.non_finite)
    if (n.entry < 0 || n.entry >= static_cast<int64_t>(manifest.entries.size()))
      raise<FileError>("{}: non_finite names entry {} of {}", file, n.entry,
                       manifest.entries.size());
}

}  // namespace dovetail
