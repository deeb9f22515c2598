#include "tests/checkpoint/fixture.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"

namespace dovetail::checkpoint_test {

namespace fs = std::filesystem;

TempFolder::TempFolder() {
  std::string name = testing::TempDir() + "dovetail-checkpoint-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) raise<FileError>("{}: cannot create", name);
  path_ = name;
}

int64_t EntrySpec::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

std::vector<EntrySpec> usual_model() {
  std::vector<EntrySpec> model;
  const auto trained = [&](const std::string& name, std::vector<int64_t> shape, DType dtype) {
    model.push_back({name, "weight", shape, dtype});
    model.push_back({name, "adamw.exp_avg", shape, DType::f32});
    model.push_back({name, "adamw.exp_avg_sq", shape, DType::f32});
  };
  trained("embed", {997, 301}, DType::f32);
  trained("scale", {}, DType::f32);
  trained("none", {0, 5}, DType::f32);
  trained("wq", {512, 96}, DType::bf16);
  trained("bias", {7}, DType::f32);
  model.push_back({"codes", "weight", {300, 5}, DType::bf16});
  model.push_back({"codes", "adam8.exp_avg", {300, 5}, DType::u8});
  model.push_back({"codes", "adam8.scale", {6}, DType::f32});
  model.push_back({"norm.count", "buffer", {3}, DType::i64, true});
  return model;
}

void put_value(DType dtype, uint64_t seed, int64_t entry, int64_t element, std::byte* to) {
  const int64_t key[2] = {entry, element};
  uint64_t bits = hash64(std::as_bytes(std::span(key)), seed);
  if (dtype == DType::f32) bits &= 0xbfffffffu;  // the exponent is never all ones
  if (dtype == DType::bf16) bits &= 0xbfffu;
  std::memcpy(to, &bits, size_of(dtype));
}

Shard::Shard(const std::vector<EntrySpec>& model, const std::vector<Interval>& intervals, int rank)
    : model_(model) {
  for (size_t i = 0; i < model.size(); ++i) {
    const EntrySpec& e = model[i];
    const Interval held = e.replicated ? Interval{0, e.numel()} : intervals[i];
    memory_.emplace_back(held.size() * size_of(e.dtype));
    state_.push_back({.tensor = e.tensor,
                      .field = e.field,
                      .shape = e.shape,
                      .dtype = e.dtype,
                      .elements = held,
                      .data = memory_.back().data(),
                      .writer = !e.replicated || rank == 0});
  }
}

void Shard::fill(uint64_t seed) {
  for (size_t i = 0; i < state_.size(); ++i) {
    const StateEntry& e = state_[i];
    for (int64_t k = 0; k < e.elements.size(); ++k)
      put_value(e.dtype, seed, static_cast<int64_t>(i), e.elements.begin + k,
                e.data + k * size_of(e.dtype));
  }
}

void Shard::fill_byte(int value) {
  for (auto& m : memory_) std::ranges::fill(m, std::byte(value));
}

std::vector<std::string> Shard::wrong_entries(uint64_t seed) const {
  std::vector<Interval> intervals;
  for (const StateEntry& e : state_) intervals.push_back(e.elements);
  Shard wanted(model_, intervals, 0);
  wanted.fill(seed);
  std::vector<std::string> wrong;
  for (size_t i = 0; i < state_.size(); ++i)
    if (memory_[i] != wanted.memory_[i]) wrong.push_back(state_[i].tensor + "/" + state_[i].field);
  return wrong;
}

std::vector<std::byte> Shard::bytes() const {
  std::vector<std::byte> all;
  for (const auto& m : memory_) all.insert(all.end(), m.begin(), m.end());
  return all;
}

std::vector<Interval> random_intervals(const std::vector<EntrySpec>& model, int world, int rank,
                                       uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + world);
  std::vector<Interval> mine;
  for (const EntrySpec& e : model) {
    std::vector<int64_t> cuts{0, e.numel()};
    for (int i = 1; i < world; ++i)
      cuts.push_back(random() % 3 == 0 ? cuts[random() % cuts.size()]
                                       : static_cast<int64_t>(random() % (e.numel() + 1)));
    std::ranges::sort(cuts);
    std::vector<int> order(world);
    for (int i = 0; i < world; ++i) order[i] = i;
    std::ranges::shuffle(order, random);
    mine.push_back({cuts[order[rank]], cuts[order[rank] + 1]});
  }
  return mine;
}

Shard random_shard(const std::vector<EntrySpec>& model, const comm::Group& world, uint64_t seed) {
  return Shard(model, random_intervals(model, world.size(), world.rank(), seed), world.rank());
}

TrainingState usual_training(int64_t step) {
  return {.step = step,
          .degrees = "1,1,1",
          .plan_hash = 0xfedcba9876543210u,
          .optimizer = "adamw lr=1e-3\nclip",
          .config = "[model]\nname = \"tiny\"\n",
          .trainer = R"({"position":[3,17],"seed":18446744073709551615})"};
}

void save(const std::string& folder, int world, int64_t step, WriterOptions options,
          const std::vector<EntrySpec>& model) {
  options.folder = folder;
  std::vector<TensorAlias> aliases;
  if (model[0].tensor == "embed") aliases.push_back({"head", "embed"});
  comm::spawn(world, [&](comm::Group& group) {
    Shard shard = random_shard(model, group, step);
    shard.fill(step);
    CheckpointWriter writer(group, options);
    writer.begin(shard.state(), aliases, usual_training(step));
    const auto saved = writer.finish();
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->step, step);
    EXPECT_EQ(saved->cleanup_fault, "");
  });
}

namespace {

class WatchedFile final : public OutputFile {
 public:
  WatchedFile(std::string path, std::unique_ptr<OutputFile> file, const WatchedDisk::Before& before)
      : path_(std::move(path)), file_(std::move(file)), before_(before) {}
  void write(std::span<const std::byte> bytes) override {
    before_(path_, bytes);
    file_->write(bytes);
  }
  void finish() override { file_->finish(); }

 private:
  const std::string path_;
  const std::unique_ptr<OutputFile> file_;
  const WatchedDisk::Before& before_;
};

}  // namespace

std::unique_ptr<OutputFile> WatchedDisk::create(const std::string& path) {
  return std::make_unique<WatchedFile>(path, DiskDouble::create(path), before_);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(folder))
    names.push_back(e.path().filename().string());
  std::ranges::sort(names);
  return names;
}

}  // namespace dovetail::checkpoint_test
