// Processes killed at every step of writing, and at any time: the last complete checkpoint
// survives.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include "dovetail/base/error.h"
#include "tests/checkpoint/fixture.h"
#include "tests/checkpoint/kill_helper.h"

namespace dovetail::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using testing::IsEmpty;

// Kills the process at the `point`-th place: before or in the middle of an operation.
class KillingDisk final : public DiskDouble {
 public:
  explicit KillingDisk(int64_t point) : left_(point) {}

  void create_folder(const std::string& path) override {
    around([&] { DiskDouble::create_folder(path); });
  }
  void rename(const std::string& from, const std::string& to) override {
    around([&] { DiskDouble::rename(from, to); });
  }
  void sync_folder(const std::string& path) override {
    around([&] { DiskDouble::sync_folder(path); });
  }
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    std::unique_ptr<OutputFile> file;
    around([&] { file = DiskDouble::create(path); });
    return std::make_unique<File>(*this, std::move(file));
  }
  void remove_folder(const std::string& path) override {
    pass();
    if (fs::exists(path) && !fs::is_empty(path)) {
      fs::remove(fs::directory_iterator(path)->path());
      pass();
    }
    DiskDouble::remove_folder(path);
  }

 private:
  class File final : public OutputFile {
   public:
    File(KillingDisk& disk, std::unique_ptr<OutputFile> file)
        : disk_(disk), file_(std::move(file)) {}
    void write(std::span<const std::byte> bytes) override {
      file_->write(bytes.first(bytes.size() / 2));
      disk_.pass();
      file_->write(bytes.subspan(bytes.size() / 2));
    }
    void finish() override {
      disk_.around([&] { file_->finish(); });
    }

   private:
    KillingDisk& disk_;
    std::unique_ptr<OutputFile> file_;
  };

  template <class F>
  void around(F&& f) {
    pass();
    f();
    pass();
  }
  void pass() {
    if (left_.fetch_sub(1) == 1) ::kill(::getpid(), SIGKILL);
  }

  std::atomic<int64_t> left_;
};

std::vector<EntrySpec> small_model() {
  return {{"w", "weight", {400, 1000}, DType::f32},
          {"w", "adamw.exp_avg", {400, 1000}, DType::f32},
          {"scale", "weight", {}, DType::f32}};
}

pid_t start_helper(const std::string& folder, int64_t point) {
  const std::string point_text = std::to_string(point);
  const pid_t child = fork();
  if (child == 0) {
    execl("/proc/self/exe", "test_checkpoint", kHelperFlag, folder.c_str(), point_text.c_str(),
          nullptr);
    _exit(127);
  }
  return child;
}

// What a restart does. Returns the step it resumes at, 0 for none.
int64_t restart(const std::string& folder) {
  int64_t step = 0;
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = random_shard(small_model(), group, 8);
    bool unfinished = false;
    for (const auto& c : list_checkpoints(folder))
      unfinished |= c.path.find("/.writing-") != std::string::npos;
    group.barrier({});
    std::optional<LoadedCheckpoint> loaded;
    std::string reasons;
    try {
      loaded = load_newest(folder, shard.state(), {}, group);
      if (loaded)
        reasons = fmt::format("{}", loaded->passed_over.empty() ? "" : loaded->passed_over[0]);
    } catch (const FileError& e) {
      reasons = e.what();  // killed before there was a first one
    }
    EXPECT_EQ(unfinished,
              reasons.find("unfinished: its writing was broken off") != std::string::npos)
        << reasons;
    if (loaded) {
      EXPECT_THAT(shard.wrong_entries(loaded->training.step), IsEmpty());
      if (group.rank() == 0) step = loaded->training.step;
    }
    group.barrier({});
    CheckpointWriter writer(group, {.folder = folder, .keep = 1});
    shard.fill(1000);
    writer.begin(shard.state(), {}, usual_training(1000));
    EXPECT_TRUE(writer.finish());
  });
  EXPECT_THAT(names_in(folder), testing::ElementsAre("step-00001000"));
  return step;
}

TEST(Kill, AtEveryPointOfWritingTheLastCompleteOneSurvives) {
  int64_t last = 0;
  bool ended = false;
  std::vector<int64_t> resumed;
  for (int64_t point = 1; !ended; ++point) {
    ASSERT_LT(point, 500);
    const TempFolder folder;
    int status = 0;
    ASSERT_GT(waitpid(start_helper(folder.path(), point), &status, 0), 0);
    ended = WIFEXITED(status);
    ASSERT_TRUE(ended ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL) << status;
    const int64_t step = restart(folder.path());
    EXPECT_GE(step, last) << "point " << point;
    last = step;
    resumed.push_back(step);
  }
  EXPECT_EQ(resumed.front(), 0);
  EXPECT_EQ(resumed.back(), 20);
  EXPECT_THAT(resumed, testing::Contains(10));
}

// Waits until a name with this beginning is in the folder.
void wait_for_name(const std::string& folder, std::string_view prefix) {
  const auto starts = [&](const std::string& name) { return name.starts_with(prefix); };
  while (std::ranges::none_of(names_in(folder), starts))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(Kill, AtAnyTimeTheLastCompleteOneSurvives) {
  std::mt19937 random(7);
  for (int i = 0; i < 12; ++i) {
    const TempFolder folder;
    const bool after_one = i % 2 == 1;
    const pid_t child = start_helper(folder.path(), kForever);
    wait_for_name(folder.path(), after_one ? "step-" : ".writing-");
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 50'000));
    ::kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const int64_t step = restart(folder.path());
    if (after_one) {
      EXPECT_GT(step, 0);
    }
  }
}

}  // namespace

int run_kill_helper(const std::string& folder, int64_t point) {
  const auto disk = std::make_shared<KillingDisk>(point == kForever ? -1 : point);
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(small_model(), group, 6);
    CheckpointWriter writer(group, {.folder = folder, .keep = 1, .files = disk});
    for (int64_t step = 10; step <= 20 || point == kForever; step += 10) {
      shard.fill(step);
      writer.begin(shard.state(), {}, usual_training(step));
      writer.finish();
      if (step >= 900) step = 10;
    }
  });
  return 0;
}

}  // namespace dovetail::checkpoint_test
