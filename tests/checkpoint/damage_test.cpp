// Damaged checkpoints are refused on all ranks before anything has changed.
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/checkpoint/inspect.h"
#include "tests/checkpoint/fixture.h"

namespace dovetail::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

void replace_text(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = read_text(path);
  const size_t at = text.find(from);
  ASSERT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  std::ofstream(path, std::ios::trunc) << text;
}

void flip_bit(const std::string& path, int64_t byte, int bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(byte);
  const int value = file.get() ^ (1 << bit);
  file.seekp(byte);
  file.put(static_cast<char>(value));
}

struct Damage {
  std::string name;
  std::function<void(const std::string& folder)> inflict;
  std::string file, reason;  // in the message
};

std::ostream& operator<<(std::ostream& out, const Damage& d) { return out << d.name; }

const std::vector<Damage> kDamages{
    {"ManifestGone", [](const std::string& f) { fs::remove(f + "/manifest.json"); },
     "/manifest.json", "cannot open"},
    {"ManifestCut",
     [](const std::string& f) {
       fs::resize_file(f + "/manifest.json", fs::file_size(f + "/manifest.json") / 2);
     },
     "/manifest.json", "bytes after the first line"},
    {"ManifestEmpty", [](const std::string& f) { fs::resize_file(f + "/manifest.json", 0); },
     "/manifest.json", "no seal"},
    {"ManifestAltered",
     [](const std::string& f) { replace_text(f + "/manifest.json", "\"scale\"", "\"scala\""); },
     "/manifest.json", "checksum"},
    {"ManifestOfAnotherStep",
     [](const std::string& f) {
       fs::copy_file(f + "/../other/step-00000030/manifest.json", f + "/manifest.json",
                     fs::copy_options::overwrite_existing);
     },
     "/manifest.json", "wanted step 20, got 30"},
    {"FileGone", [](const std::string& f) { fs::remove(f + "/rank-00001.bin"); }, "/rank-00001.bin",
     "cannot open"},
    {"FileCutInHalf",
     [](const std::string& f) {
       fs::resize_file(f + "/rank-00001.bin", fs::file_size(f + "/rank-00001.bin") / 2);
     },
     "/rank-00001.bin", "bytes, got"},
    {"FileLonger",
     [](const std::string& f) {
       fs::resize_file(f + "/rank-00001.bin", fs::file_size(f + "/rank-00001.bin") + 1);
     },
     "/rank-00001.bin", "bytes, got"},
    {"OneBitOfOneWeight", [](const std::string& f) { flip_bit(f + "/rank-00001.bin", 12345, 0); },
     "/rank-00001.bin", "bytes [0, 1048576) are damaged"},
    {"LastBitOfAFile",
     [](const std::string& f) {
       flip_bit(f + "/rank-00000.bin",
                static_cast<int64_t>(fs::file_size(f + "/rank-00000.bin")) - 1, 7);
     },
     "/rank-00000.bin", "are damaged"},
    {"FileOfAnotherCheckpoint",
     [](const std::string& f) {
       fs::copy_file(f + "/../other/step-00000030/rank-00001.bin", f + "/rank-00001.bin",
                     fs::copy_options::overwrite_existing);
     },
     "/rank-00001.bin", "are damaged"},
    {"FilesSwapped",
     [](const std::string& f) {
       fs::rename(f + "/rank-00000.bin", f + "/x");
       fs::rename(f + "/rank-00001.bin", f + "/rank-00000.bin");
       fs::rename(f + "/x", f + "/rank-00001.bin");
     },
     "/rank-0000", "are damaged"},
    {"FileIsAFolder",
     [](const std::string& f) {
       fs::remove(f + "/rank-00001.bin");
       fs::create_directory(f + "/rank-00001.bin");
     },
     "/rank-00001.bin", "got"},
    {"FolderUnreadable",
     [](const std::string& f) {
       fs::remove_all(f);
       fs::create_symlink(fs::path(f).filename(), f);  // a link to itself
     },
     "/manifest.json", "cannot open"},
};

class Refused : public testing::TestWithParam<Damage> {
 protected:
  // Two ranks with halves of everything, so that files have equal sizes.
  static Shard half(const std::vector<EntrySpec>& model, const comm::Group& group) {
    std::vector<Interval> intervals;
    for (const EntrySpec& e : model)
      intervals.push_back(
          {e.numel() * group.rank() / group.size(), e.numel() * (group.rank() + 1) / group.size()});
    return Shard(model, intervals, group.rank());
  }

  static void save_halves(const std::string& folder, int64_t step) {
    comm::spawn(2, [&](comm::Group& group) {
      Shard shard = half(model(), group);
      shard.fill(step);
      CheckpointWriter writer(group, {.folder = folder});
      writer.begin(shard.state(), {}, usual_training(step));
      writer.finish();
    });
  }

  static std::vector<EntrySpec> model() {
    return {{"embed", "weight", {1000, 300}, DType::f32},
            {"embed", "adamw.exp_avg", {1000, 300}, DType::f32},
            {"scale", "weight", {2}, DType::f32}};
  }

  void SetUp() override {
    save_halves(folder_.path(), 10);
    save_halves(folder_.path(), 20);
    save_halves(folder_ / "other", 30);
    GetParam().inflict(folder_ / "step-00000020");
  }
  const TempFolder folder_;
};

TEST_P(Refused, OnAllRanksBeforeAnythingChanged) {
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = half(model(), group);
    shard.fill_byte(0x77);
    const auto before = shard.bytes();
    const std::string text = message_of<FileError>(
        [&] { load_checkpoint(folder_ / "step-00000020", shard.state(), {}, group); });
    EXPECT_THAT(text,
                AllOf(HasSubstr("step-00000020" + GetParam().file), HasSubstr(GetParam().reason)))
        << group.rank();
    EXPECT_EQ(shard.bytes(), before);
    group.barrier({});
  });
}

TEST_P(Refused, TheOneBeforeIsLoadedAndTheReasonTold) {
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = half(model(), group);
    const auto loaded = load_newest(folder_.path(), shard.state(), {}, group);
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->path, folder_ / "step-00000010");
    EXPECT_EQ(loaded->training.step, 10);
    ASSERT_EQ(loaded->passed_over.size(), 1u);
    EXPECT_THAT(loaded->passed_over[0], HasSubstr(GetParam().file));
    EXPECT_THAT(shard.wrong_entries(10), IsEmpty());
  });
}

INSTANTIATE_TEST_SUITE_P(Damages, Refused, testing::ValuesIn(kDamages),
                         [](const auto& i) { return i.param.name; });

TEST(Damage, VerifyFindsEveryDamagedChunkAndSaysWhatLiesThere) {
  const TempFolder folder;
  save(folder.path(), 1, 20);
  flip_bit(folder / "step-00000020/rank-00000.bin", 1 << 20, 3);
  flip_bit(folder / "step-00000020/rank-00000.bin", 3 << 20, 3);
  const Checkpoint checkpoint(folder / "step-00000020");
  const auto faults = verify(checkpoint);
  ASSERT_EQ(faults.size(), 2u);
  EXPECT_THAT(faults[0], AllOf(HasSubstr("[1048576, 2097152)"),
                               HasSubstr("embed (weight), embed (adamw.exp_avg)")));
  EXPECT_THAT(describe_verification(checkpoint), HasSubstr("damaged:"));
  comm::spawn(3, [&](comm::Group& group) {
    EXPECT_THAT(message_of<FileError>([&] { verify(checkpoint, group); }),
                HasSubstr("rank-00000.bin"));
    group.barrier({});
  });
}

TEST(Damage, SealedManifestThatContradictsItselfIsRefused) {
  const TempFolder folder;
  save(folder.path(), 2, 20);
  const Manifest good = Checkpoint(folder / "step-00000020").manifest();
  EXPECT_EQ(to_text(parse_manifest(to_text(good), "m")), to_text(good));
  const auto reason = [&](const std::function<void(Manifest&)>& change) {
    Manifest m = good;
    change(m);
    return message_of<FileError>([&] { parse_manifest(to_text(m), "the-file"); });
  };
  EXPECT_THAT(reason([](Manifest& m) { m.files[0].records.pop_back(); }),
              HasSubstr("were written by no rank"));
  EXPECT_THAT(reason([](Manifest& m) { m.files[0].records.push_back(m.files[0].records[0]); }),
              HasSubstr("were written twice"));
  EXPECT_THAT(reason([](Manifest& m) { m.files[0].records[0].offset = m.files[0].bytes; }),
              HasSubstr("outside of"));
  EXPECT_THAT(reason([](Manifest& m) { m.files[0].records[0].entry = 99; }),
              HasSubstr("entry number 99"));
  EXPECT_THAT(reason([](Manifest& m) { m.files[0].name = "../x"; }),
              HasSubstr("the-file: \"../x\" is not the name"));
  EXPECT_THAT(reason([](Manifest& m) { m.files[0].checksums.pop_back(); }), HasSubstr("checksums"));
  EXPECT_THAT(reason([](Manifest& m) { m.entries.push_back(m.entries[0]); }),
              HasSubstr("listed twice"));
  EXPECT_THAT(reason([](Manifest& m) { m.aliases[0].tensor = "nobody"; }),
              HasSubstr("unknown tensor nobody"));
}

TEST(Damage, AVersionFromTheFutureIsNamed) {
  const TempFolder folder;
  save(folder.path(), 1, 20);
  std::string text = read_text(folder / "step-00000020/manifest.json");
  const size_t line = text.find('\n');
  std::string content = text.substr(line + 1);
  content.replace(content.find("\"version\":1"), 11, "\"version\":2");
  const std::string seal =
      fmt::format("{{\"seal\":\"xxh3-64\",\"checksum\":\"{:016x}\",\"bytes\":{},\"manifest\":\n",
                  hash64(content), content.size());
  EXPECT_THAT(message_of<FileError>([&] { parse_manifest(seal + content, "m.json"); }),
              HasSubstr("m.json: wanted version 1, got 2"));
}

// Reads as a user without rights: in a child, since this process may be root.
TEST(Damage, FolderWithoutPermissionIsAnErrorThatNamesIt) {
  const TempFolder folder;
  save(folder.path(), 1, 20);
  ASSERT_EQ(chmod(folder.path().c_str(), 0), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && setuid(65534) != 0) _exit(1);
    std::string text = "nothing was thrown";
    try {
      list_checkpoints(folder.path());
    } catch (const FileError& e) {
      text = e.what();
    }
    _exit(::write(ends[1], text.data(), text.size()) < 0);
  }
  close(ends[1]);
  std::string text(1000, '\0');
  text.resize(std::max<ssize_t>(0, ::read(ends[0], text.data(), text.size())));
  close(ends[0]);
  waitpid(child, nullptr, 0);
  chmod(folder.path().c_str(), 0700);
  EXPECT_EQ(text, folder.path() + ": cannot read folder: Permission denied");
}

TEST(Damage, NoSoundCheckpointListsAllReasons) {
  const TempFolder folder;
  save(folder.path(), 1, 10);
  save(folder.path(), 1, 20);
  fs::remove(folder / "step-00000010/manifest.json");
  flip_bit(folder / "step-00000020/rank-00000.bin", 5, 5);
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(usual_model(), group, 1);
    EXPECT_THAT(
        message_of<FileError>([&] { load_newest(folder.path(), shard.state(), {}, group); }),
        AllOf(HasSubstr("step-00000010/manifest.json"), HasSubstr("step-00000020/rank-00000.bin")));
    group.barrier({});
    EXPECT_FALSE(load_newest(folder / "nowhere", shard.state(), {}, group));
  });
}

}  // namespace
}  // namespace dovetail::checkpoint_test
