// Reading a checkpoint: its manifest, then verified chunks of its files.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dovetail/checkpoint/file.h"
#include "dovetail/checkpoint/manifest.h"
#include "dovetail/comm/group.h"

namespace dovetail {

// A run of an entry's elements at its place.
struct StoredRun {
  Interval elements;
  int64_t file = 0;    // index into manifest().files
  int64_t offset = 0;  // bytes
};

// An opened checkpoint. Immutable; holds no file open.
class Checkpoint {
 public:
  // Opening checks the manifest, its step against the folder's name, and presence and size of every
  // file. FileError names the file.
  explicit Checkpoint(std::string folder);

  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  uint64_t manifest_hash() const { return manifest_hash_; }
  std::string path_of(int64_t file) const;

  // Index of the entry; aliases of tied parameters are followed. -1 where there is none.
  int64_t find(std::string_view tensor, std::string_view field) const;
  // The name under which the tensor is stored: itself unless it is an alias.
  std::string stored_name(std::string_view tensor) const;
  // Where the entry's elements lie, ascending; together all of them.
  std::span<const StoredRun> runs(int64_t entry) const { return runs_[entry]; }
  // Entries with bytes in a range of a file: for messages.
  std::string contents_of(int64_t file, Interval bytes) const;
  // Names the values that are not finite where the checkpoint was marked so; empty otherwise.
  std::string non_finite_text() const;

 private:
  std::string folder_;
  Manifest manifest_;
  uint64_t manifest_hash_ = 0;
  std::map<std::pair<std::string, std::string>, int64_t, std::less<>> index_;
  std::map<std::string, std::string, std::less<>> aliases_;
  std::vector<std::vector<StoredRun>> runs_;
};

struct ChunkRef {
  int64_t file = 0;
  int64_t chunk = 0;
  auto operator<=>(const ChunkRef&) const = default;
};

// Every chunk of every file, in order.
std::vector<ChunkRef> all_chunks(const Checkpoint& checkpoint);

// Reads chunks one after the other, hands on those whose checksum agrees, and throws FileError
// (file, bytes, what lies there) at the first that does not.
class ChunkReader {
 public:
  // `use` gets the bytes of a verified chunk; they are valid during the call. Chunks ascending.
  using Use = std::function<void(ChunkRef, std::span<const std::byte>)>;
  ChunkReader(const Checkpoint& checkpoint, std::vector<ChunkRef> chunks, Use use);

  // Goes on until the time; true when all chunks are read.
  bool run_until(std::chrono::steady_clock::time_point time);
  void run();

 private:
  void read_next();

  const Checkpoint& checkpoint_;
  const std::vector<ChunkRef> chunks_;
  const Use use_;
  size_t next_ = 0;
  std::unique_ptr<InputFile> file_;
  int64_t open_ = -1;
  std::unique_ptr<std::byte[]> buffer_;
};

// Every fault of every file's bytes; empty when the checkpoint is sound. One process.
std::vector<std::string> verify(const Checkpoint& checkpoint);

// Opens on all ranks, or throws the same error on all; they must see the same manifest. Collective.
Checkpoint open_checkpoint(const std::string& folder, comm::Group& world);
// All bytes, each read by one rank: the same FileError on all ranks if any is damaged. Collective.
void verify(const Checkpoint& checkpoint, comm::Group& world);
// Runs the readers of all ranks to their end, voting often enough that none is taken for dead. The
// first fault is thrown on all ranks. Collective.
void run_voting(ChunkReader& reader, comm::Group& world, int64_t step, std::string_view what);

}  // namespace dovetail
