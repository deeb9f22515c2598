// A made-up model whose every value is known, held in arbitrary shards, and folders that vanish
// after the test.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/checkpoint/file.h"
#include "dovetail/checkpoint/load.h"
#include "dovetail/checkpoint/writer.h"
#include "dovetail/comm/threads/spawn.h"

namespace dovetail::checkpoint_test {

class TempFolder {
 public:
  TempFolder();
  ~TempFolder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

struct EntrySpec {
  std::string tensor, field;
  std::vector<int64_t> shape;
  DType dtype = DType::f32;
  bool replicated = false;  // every rank holds all of it, rank 0 writes
  int64_t numel() const;
};

// Some chunks long: a scalar, tensors without elements, all dtypes, large and tiny tensors, a
// buffer.
std::vector<EntrySpec> usual_model();

// The value of an element at a time: any bits of the dtype that are finite.
void put_value(DType dtype, uint64_t seed, int64_t entry, int64_t element, std::byte* to);

// One rank's shard, with its own memory.
class Shard {
 public:
  Shard(const std::vector<EntrySpec>& model, const std::vector<Interval>& intervals, int rank);

  const ShardedState& state() const { return state_; }
  ShardedState& state() { return state_; }
  void fill(uint64_t seed);  // known values
  void fill_byte(int value);
  // Entries whose bits are not those of the seed; empty when all are.
  std::vector<std::string> wrong_entries(uint64_t seed) const;
  std::vector<std::byte> bytes() const;

 private:
  std::vector<EntrySpec> model_;
  std::vector<std::vector<std::byte>> memory_;
  ShardedState state_;
};

// Per entry, the interval of `rank`: random cuts, many of them empty, in random order of ranks.
// Equal calls on all ranks give one partition.
std::vector<Interval> random_intervals(const std::vector<EntrySpec>& model, int world, int rank,
                                       uint64_t seed);

Shard random_shard(const std::vector<EntrySpec>& model, const comm::Group& world, uint64_t seed);

TrainingState usual_training(int64_t step);

// Saves the model at a step (values of seed = step) from `world` ranks; a model that starts with
// "embed" ties "head" to it.
void save(const std::string& folder, int world, int64_t step, WriterOptions options = {},
          const std::vector<EntrySpec>& model = usual_model());

// What f throws as E; empty text and a test failure if it does not.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// Passes everything on.
class DiskDouble : public FileSystem {
 public:
  void create_folder(const std::string& path) override { disk_->create_folder(path); }
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    return disk_->create(path);
  }
  void rename(const std::string& from, const std::string& to) override { disk_->rename(from, to); }
  void sync_folder(const std::string& path) override { disk_->sync_folder(path); }
  void remove_folder(const std::string& path) override { disk_->remove_folder(path); }

 private:
  std::shared_ptr<FileSystem> disk_ = make_disk();
};

// Calls `before` ahead of each write of a file.
class WatchedDisk : public DiskDouble {
 public:
  using Before = std::function<void(const std::string& path, std::span<const std::byte> bytes)>;
  explicit WatchedDisk(Before before) : before_(std::move(before)) {}
  std::unique_ptr<OutputFile> create(const std::string& path) override;

 private:
  Before before_;
};

std::vector<std::string> names_in(const std::string& folder);

}  // namespace dovetail::checkpoint_test
