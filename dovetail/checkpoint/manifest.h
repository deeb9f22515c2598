// The manifest of a checkpoint: what is stored, where it lies and how it is checksummed
// (docs/checkpoint-format.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/dtype.h"
#include "dovetail/base/interval.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail {

inline constexpr int64_t kCheckpointVersion = 1;
inline constexpr int64_t kChunkBytes = int64_t{1} << 20;
inline constexpr std::string_view kManifestName = "manifest.json";

// Fields with a meaning of their own; all others are optimizer state.
inline constexpr std::string_view kWeightField = "weight";
inline constexpr std::string_view kBufferField = "buffer";

// What resuming needs besides tensors. Equal on all ranks.
struct TrainingState {
  int64_t step = 0;     // optimizer steps done
  std::string degrees;  // "4,2,2"
  uint64_t plan_hash = 0;
  std::string optimizer;  // descriptions of the update operations, a line each
  std::string config;     // text of the configuration
  std::string trainer =
      "{}";  // JSON object: position in the data, random state; comes back with the same content
  bool operator==(const TrainingState&) const = default;
};

// One stored field of one tensor.
struct StoredEntry {
  std::string tensor;
  std::string field;
  std::vector<int64_t> shape;  // of the field's values, row-major
  DType dtype = DType::f32;

  int64_t numel() const;
  std::string name() const { return tensor + " (" + field + ")"; }
  bool operator==(const StoredEntry&) const = default;
};

// Elements of an entry at a place of a file.
struct Record {
  int64_t entry = 0;
  Interval elements;
  int64_t offset = 0;  // bytes
  bool operator==(const Record&) const = default;
};

struct DataFile {
  std::string name;  // without folder
  int64_t bytes = 0;
  std::vector<uint64_t> checksums;  // XXH3-64 of each chunk
  std::vector<Record> records;
  bool operator==(const DataFile&) const = default;
};

// The first value that is not finite among those of an entry that a rank wrote.
struct NonFinite {
  int64_t entry = 0;
  int64_t element = 0;
  bool operator==(const NonFinite&) const = default;
};

// One rank's part: a file without name where it wrote none.
struct RankShare {
  DataFile file;
  std::vector<NonFinite> non_finite;
};

struct Manifest {
  TrainingState training;
  int64_t world = 1;
  int64_t chunk_bytes = kChunkBytes;
  std::vector<StoredEntry> entries;
  std::vector<TensorAlias> aliases;
  std::vector<DataFile> files;
  std::vector<NonFinite> non_finite;

  int64_t data_bytes() const;  // of all files
};

// The whole text of manifest.json.
std::string to_text(const Manifest& manifest);
// Checks seal, version and everything that validate() checks; FileErrors name `file`.
Manifest parse_manifest(std::string_view text, const std::string& file);

std::string to_text(const RankShare& share);
RankShare parse_share(std::string_view text);

// Checks that the manifest is whole: names, ranges, and every element of every entry in exactly one
// record. Throws FileError with `file` and the entry or file at fault.
void validate(const Manifest& manifest, const std::string& file);

// Throws ConfigError unless the text is a JSON object.
void check_json_object(const std::string& text, std::string_view what);

}  // namespace dovetail
