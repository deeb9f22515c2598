// Writing: in the background, complete or absent, with faults on any rank.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <condition_variable>
#include <csignal>
#include <limits>

#include "dovetail/base/error.h"
#include "tests/checkpoint/fixture.h"

namespace dovetail::checkpoint_test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Lets nobody write before it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

void expect_loads(const std::string& path, uint64_t seed) {
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 77);
    load_checkpoint(path, shard.state(), {}, group);
    EXPECT_THAT(shard.wrong_entries(seed), IsEmpty());
  });
}

TEST(Writer, TrainingGoesOnWhileItWritesAndCannotSpoilTheSnapshot) {
  const TempFolder folder;
  Gate gate;
  WriterOptions options{.folder = folder.path(), .vote_every = 1};
  options.files = std::make_shared<WatchedDisk>(
      [&](const std::string&, std::span<const std::byte>) { gate.pass(); });
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 1);
    shard.fill(10);
    CheckpointWriter writer(group, options);
    writer.begin(shard.state(), {}, usual_training(10));  // returns although nothing can be written
    shard.fill_byte(0xff);                                // the next step
    for (int i = 0; i < 5; ++i) EXPECT_FALSE(writer.poll());
    EXPECT_TRUE(writer.busy());
    EXPECT_THAT(list_checkpoints(folder.path()), testing::SizeIs(1));
    EXPECT_THAT(list_checkpoints(folder.path())[0].fault, HasSubstr("unfinished"));
    group.barrier({});
    gate.open();
    std::optional<SavedCheckpoint> saved;
    while (!saved) saved = writer.poll();
    EXPECT_FALSE(writer.busy());
    EXPECT_EQ(saved->path, folder / "step-00000010");
  });
  expect_loads(folder / "step-00000010", 10);
}

TEST(Writer, PollCommunicatesOnlyWhenItsTurnComes) {
  const TempFolder folder;
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 1);
    shard.fill(10);
    CheckpointWriter writer(group, {.folder = folder.path(), .vote_every = 4});
    const auto sent = [&] { return group.counters().read().control_sent; };
    const int64_t before = sent();
    writer.poll();
    EXPECT_EQ(sent(), before);  // nothing is being written
    writer.begin(shard.state(), {}, usual_training(10));
    const int64_t begun = sent();
    for (int i = 0; i < 3; ++i) writer.poll();
    EXPECT_EQ(sent(), begun);
    writer.poll();
    EXPECT_GT(sent(), begun);
    writer.finish();
  });
}

TEST(Writer, BeginFinishesTheOneBefore) {
  const TempFolder folder;
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 1);
    CheckpointWriter writer(group, {.folder = folder.path()});
    for (int64_t step : {1, 2, 3}) {
      shard.fill(step);
      writer.begin(shard.state(), {}, usual_training(step));
    }
    EXPECT_EQ(writer.last()->step, 2);
    EXPECT_EQ(writer.finish()->step, 3);
    EXPECT_FALSE(writer.finish());
  });
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000002", "step-00000003"));
}

TEST(Writer, KeepsTheLastOnes) {
  const TempFolder folder;
  for (int64_t step : {10, 20, 30}) save(folder.path(), 2, step, {.keep = 2});
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000020", "step-00000030"));
  save(folder.path(), 2, 30, {.keep = 2});  // again, after a resume
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000020", "step-00000030-2"));
  save(folder.path(), 2, 5, {.keep = 1});  // gone back: what came later stays
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("step-00000005", "step-00000020", "step-00000030-2"));
  save(folder.path(), 2, 40, {.keep = 1});
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000040"));
  save(folder.path(), 2, 50, {.keep = 0});
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000040", "step-00000050"));
}

TEST(Writer, ABrokenOneDoesNotCountAndIsNotRemoved) {
  const TempFolder folder;
  save(folder.path(), 1, 10, {.keep = 2});
  save(folder.path(), 1, 20, {.keep = 2});
  std::filesystem::remove(folder / "step-00000020/manifest.json");
  save(folder.path(), 1, 20, {.keep = 2});
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre("step-00000010", "step-00000020", "step-00000020-2"));
}

TEST(Writer, StartRemovesLeftovers) {
  const TempFolder folder;
  save(folder.path(), 1, 10);
  std::filesystem::create_directory(folder / ".writing-step-00000020");
  std::filesystem::create_directory(folder / ".removing-step-00000005");
  std::filesystem::create_directory(folder / "notes");
  comm::spawn(2, [&](comm::Group& group) {
    CheckpointWriter writer(group, {.folder = folder.path()});
    if (group.rank() == 0) {
      EXPECT_THAT(writer.leftovers_removed(), testing::SizeIs(2));
    }
  });
  EXPECT_THAT(names_in(folder.path()), ElementsAre("notes", "step-00000010"));
}

// The error of saving `step` where `spoil` has changed something; the same on all ranks, and
// nothing is left of it.
template <class E>
std::string failed_save(const std::string& folder, int64_t step, WriterOptions options,
                        const std::function<void(Shard&, TrainingState&, int rank)>& spoil = {}) {
  options.folder = folder;
  std::vector<std::string> texts(3);
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 4);
    shard.fill(step);
    TrainingState training = usual_training(step);
    if (spoil) spoil(shard, training, group.rank());
    CheckpointWriter writer(group, options);
    texts[group.rank()] = message_of<E>([&] {
      writer.begin(shard.state(), {}, training);
      writer.finish();
    });
    EXPECT_FALSE(writer.busy());
    group.barrier({});
  });
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
  return texts[0];
}

TEST(Writer, AWriteErrorOfOneRankIsEverybodysAndHarmsNothing) {
  const TempFolder folder;
  save(folder.path(), 2, 10);
  WriterOptions options;
  options.files =
      std::make_shared<WatchedDisk>([&](const std::string& path, std::span<const std::byte>) {
        if (path.ends_with("rank-00001.bin"))
          raise<FileError>("{}: cannot write at byte 0: No space left on device", path);
      });
  EXPECT_THAT(failed_save<FileError>(folder.path(), 20, options),
              AllOf(HasSubstr("rank 1: "), HasSubstr("step-00000020/rank-00001.bin: cannot write"),
                    HasSubstr("No space")));
  options.files =
      std::make_shared<WatchedDisk>([&](const std::string& path, std::span<const std::byte>) {
        if (path.ends_with("manifest.json")) raise<FileError>("{}: cannot write", path);
      });
  EXPECT_THAT(failed_save<FileError>(folder.path(), 20, options),
              AllOf(HasSubstr("rank 0: "), HasSubstr("manifest.json")));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000010"));
  expect_loads(folder / "step-00000010", 10);
}

// The real thing: the system ends a write half-way.
TEST(Writer, AFileThatCannotGrowIsNamed) {
  const TempFolder folder;
  save(folder.path(), 2, 10);
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 100'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = failed_save<FileError>(folder.path(), 20, {});
  setrlimit(RLIMIT_FSIZE, &limit);
  std::signal(SIGXFSZ, ignored);
  EXPECT_THAT(text, AllOf(HasSubstr(".bin: cannot write at byte 100000: File too large"),
                          HasSubstr("rank ")));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000010"));
  expect_loads(folder / "step-00000010", 10);
}

TEST(Writer, FolderThatCannotBeMadeIsNamed) {
  const TempFolder folder;
  std::filesystem::create_symlink("loop", folder / "loop");
  comm::spawn(2, [&](comm::Group& group) {
    EXPECT_THAT(
        message_of<FileError>([&] { CheckpointWriter(group, {.folder = folder / "loop/x"}); }),
        AllOf(HasSubstr("loop/x"), HasSubstr("rank 0")));
    group.barrier({});
  });
}

TEST(Writer, RefusesValuesThatAreNotFinite) {
  const TempFolder folder;
  save(folder.path(), 2, 10);
  const auto spoil = [](float value, size_t entry) {
    return [=](Shard& shard, TrainingState&, int) {
      StateEntry& e = shard.state()[entry];
      if (!e.elements.contains(150'000)) return;  // whoever holds it
      std::memcpy(e.data + (150'000 - e.elements.begin) * 4, &value, 4);
    };
  };
  EXPECT_THAT(failed_save<FileError>(folder.path(), 20, {},
                                     spoil(std::numeric_limits<float>::quiet_NaN(), 0)),
              HasSubstr("embed (weight): element 150000 is not finite"));
  EXPECT_THAT(failed_save<FileError>(folder.path(), 20, {},
                                     spoil(-std::numeric_limits<float>::infinity(), 2)),
              HasSubstr("embed (adamw.exp_avg_sq): element 150000 is not finite"));
  const auto spoil_bf16 = [](Shard& shard, TrainingState&, int) {
    StateEntry& e = shard.state()[9];
    const uint16_t nan = 0x7fc0;
    if (e.elements.contains(49'151)) std::memcpy(e.data + (49'151 - e.elements.begin) * 2, &nan, 2);
  };
  EXPECT_THAT(failed_save<FileError>(folder.path(), 20, {}, spoil_bf16),
              HasSubstr("wq (weight): element 49151 is not finite"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-00000010"));
}

TEST(Writer, MarksThemWhenAskedAndResumingPassesOver) {
  const TempFolder folder;
  save(folder.path(), 2, 10);
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 4);
    shard.fill(20);
    StateEntry& scale = shard.state()[3];
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (!scale.elements.empty()) std::memcpy(scale.data, &nan, 4);
    CheckpointWriter writer(group, {.folder = folder.path(), .non_finite = NonFinitePolicy::mark});
    writer.begin(shard.state(), {}, usual_training(20));
    ASSERT_TRUE(writer.finish());

    const auto loaded = load_newest(folder.path(), shard.state(), {}, group);
    EXPECT_EQ(loaded->training.step, 10);
    EXPECT_THAT(loaded->passed_over,
                ElementsAre(HasSubstr("not finite: scale (weight) element 0")));
    EXPECT_THAT(message_of<FileError>(
                    [&] { load_checkpoint(folder / "step-00000020", shard.state(), {}, group); }),
                HasSubstr("not finite"));
    group.barrier({});
    EXPECT_EQ(load_newest(folder.path(), shard.state(), {}, group, {.allow_non_finite = true})
                  ->training.step,
              20);
    std::vector<std::string> spoilt;
    if (!scale.elements.empty()) spoilt.push_back("scale/weight");
    EXPECT_EQ(shard.wrong_entries(20), spoilt);
  });
}

TEST(Writer, RanksThatDisagreeAreToldAboutWhat) {
  const TempFolder folder;
  EXPECT_THAT(failed_save<ConfigError>(folder.path(), 20, {},
                                       [](Shard& s, TrainingState&, int rank) {
                                         if (rank == 1) s.state()[3].field = "other";
                                       }),
              HasSubstr("ranks 0 and 1 do not save the same thing: \"scale (weight) fp32 []\" "
                        "against \"scale (other) fp32 []\""));
  EXPECT_THAT(failed_save<ConfigError>(folder.path(), 20, {},
                                       [](Shard&, TrainingState& t, int rank) {
                                         if (rank == 2) t.config = "other";
                                       }),
              AllOf(HasSubstr("ranks 0 and 2"), HasSubstr("config")));
  EXPECT_THAT(failed_save<ConfigError>(folder.path(), 20, {},
                                       [](Shard&, TrainingState& t, int) { t.trainer = "[1]"; }),
              HasSubstr("wanted a JSON object"));
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

TEST(Writer, ElementsThatNobodyOrTwoWroteAreFoundBeforeItIsComplete) {
  const TempFolder folder;
  EXPECT_THAT(
      failed_save<FileError>(folder.path(), 20, {},
                             [](Shard& s, TrainingState&, int) { s.state()[12].writer = false; }),
      HasSubstr("elements [0, 7) of bias (weight) were written by no rank"));
  EXPECT_THAT(failed_save<FileError>(folder.path(), 20, {},
                                     [](Shard& s, TrainingState&, int rank) {
                                       for (StateEntry& e : s.state()) e.writer = true;
                                     }),
              HasSubstr("elements [0, 3) of norm.count (buffer) were written twice"));
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

TEST(Writer, GivingUpLeavesNoCheckpoint) {
  const TempFolder folder;
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 4);
    shard.fill(20);
    CheckpointWriter writer(group, {.folder = folder.path()});
    writer.begin(shard.state(), {}, usual_training(20));
  });
  for (const ListedCheckpoint& c : list_checkpoints(folder.path())) EXPECT_TRUE(c.broken);
}

}  // namespace
}  // namespace dovetail::checkpoint_test
