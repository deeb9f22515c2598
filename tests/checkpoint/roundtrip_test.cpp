// Saved at one world size, loaded at another.
#include <gmock/gmock.h>

#include "dovetail/base/error.h"
#include "dovetail/checkpoint/inspect.h"
#include "tests/checkpoint/fixture.h"

namespace dovetail::checkpoint_test {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

class RoundTrip : public testing::TestWithParam<int> {};

TEST_P(RoundTrip, EveryOtherWorldReadsTheSameBits) {
  const TempFolder folder;
  save(folder.path(), GetParam(), 20);
  for (int world = 1; world <= 4; ++world) {
    for (uint64_t split = 0; split < 3; ++split) {
      comm::spawn(world, [&](comm::Group& group) {
        Shard shard = random_shard(usual_model(), group, 100 + split);
        shard.fill_byte(0xa5);
        const TrainingState t =
            load_checkpoint(folder / "step-00000020", shard.state(), {{"head", "embed"}}, group);
        EXPECT_EQ(t, usual_training(20));
        EXPECT_THAT(shard.wrong_entries(20), IsEmpty()) << "world " << world << " split " << split;
      });
    }
  }
}

TEST_P(RoundTrip, RanksWithNothingToWriteHaveNoFile) {
  const TempFolder folder;
  const std::vector<EntrySpec> model{{"scale", "weight", {}, DType::f32},
                                     {"none", "weight", {0}, DType::bf16}};
  save(folder.path(), GetParam(), 1, {}, model);
  const Checkpoint checkpoint(folder / "step-00000001");
  EXPECT_EQ(checkpoint.manifest().files.size(), 1u);
  EXPECT_EQ(checkpoint.manifest().data_bytes(), 4);
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = random_shard(model, group, 5);
    load_checkpoint(folder / "step-00000001", shard.state(), {}, group);
    EXPECT_THAT(shard.wrong_entries(1), IsEmpty());
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, RoundTrip, testing::Range(1, 5));

TEST(RoundTrip, NothingAtAllIsACheckpointToo) {
  const TempFolder folder;
  const std::vector<EntrySpec> model{{"none", "weight", {0}, DType::f32}};
  save(folder.path(), 2, 1, {}, model);
  EXPECT_THAT(Checkpoint(folder / "step-00000001").manifest().files, IsEmpty());
  comm::spawn(2, [&](comm::Group& group) {
    Shard shard = random_shard(model, group, 5);
    EXPECT_EQ(load_checkpoint(folder / "step-00000001", shard.state(), {}, group).step, 1);
  });
}

// A rank reads no more than the chunks that hold its elements.
TEST(RoundTrip, ReadsOnlyWhatTheRankNeeds) {
  const TempFolder folder;
  const std::vector<EntrySpec> model{{"w", "weight", {8 << 20}, DType::u8}};
  save(folder.path(), 1, 1, {}, model);
  const Checkpoint checkpoint(folder / "step-00000001");
  Shard shard(model, {{(3 << 20) - 1, (4 << 20) + 1}}, 0);
  const ReadPlan plan = plan_reads(checkpoint, shard.state(), {}, LoadFields::all);
  EXPECT_EQ(chunks_of(checkpoint, plan.pieces), (std::vector<ChunkRef>{{0, 2}, {0, 3}, {0, 4}}));
  EXPECT_EQ(plan.staging_bytes, (1 << 20) + 2);
}

class Mismatch : public testing::Test {
 protected:
  // The error of loading into a changed model; the state must not change.
  std::string refused(const std::function<void(std::vector<EntrySpec>&)>& change,
                      LoadFields fields = LoadFields::all) {
    std::vector<EntrySpec> model = usual_model();
    change(model);
    std::string text;
    comm::spawn(2, [&](comm::Group& group) {
      Shard shard = random_shard(model, group, 3);
      shard.fill_byte(0x5a);
      const auto before = shard.bytes();
      const std::string mine = message_of<ConfigError>([&] {
        load_checkpoint(folder_ / "step-00000020", shard.state(), {}, group, {.fields = fields});
      });
      EXPECT_EQ(shard.bytes(), before);
      if (group.rank() == 0) text = mine;
      group.barrier({});
    });
    return text;
  }

  void SetUp() override { save(folder_.path(), 2, 20); }
  const TempFolder folder_;
};

TEST_F(Mismatch, NamesTheThingWantedAndGot) {
  EXPECT_THAT(refused([](auto& m) { m.erase(m.begin(), m.begin() + 3); }),
              HasSubstr("the checkpoint has tensor embed (weight), which is not wanted (and 2 more "
                        "differences)"));
  EXPECT_THAT(refused([](auto& m) { m.push_back({"new", "weight", {2}, DType::f32}); }),
              HasSubstr("tensor new is wanted, the checkpoint does not have it"));
  EXPECT_THAT(
      refused([](auto& m) { m[0].shape = {301, 997}; }),
      HasSubstr("tensor embed (weight): shape [301, 997] wanted, the checkpoint has [997, 301]"));
  EXPECT_THAT(refused([](auto& m) { m[0].dtype = DType::bf16; }),
              HasSubstr("tensor embed (weight): dtype bf16 wanted, the checkpoint has fp32"));
  EXPECT_THAT(
      refused([](auto& m) { m[1].field = "muon.momentum"; }),
      HasSubstr(
          "tensor embed: field muon.momentum is wanted, the checkpoint has weight, adamw.exp_avg, "
          "adamw.exp_avg_sq (and 1 more differences)"));
  EXPECT_THAT(
      refused([](auto& m) { m.erase(m.begin() + 1); }),
      HasSubstr("tensor embed: the checkpoint has field adamw.exp_avg, which is not wanted"));
  EXPECT_THAT(refused([](auto& m) { m[0].shape = {301, 997}; }, LoadFields::weights),
              HasSubstr("shape"));
}

TEST_F(Mismatch, WeightsAloneLoadUnderAnotherOptimizer) {
  std::vector<EntrySpec> model = usual_model();
  for (EntrySpec& e : model)
    if (e.field == "adamw.exp_avg") e.field = "muon.momentum";
  comm::spawn(3, [&](comm::Group& group) {
    Shard shard = random_shard(model, group, 3);
    shard.fill_byte(0);
    load_checkpoint(folder_ / "step-00000020", shard.state(), {}, group,
                    {.fields = LoadFields::weights});
    for (const std::string& wrong : shard.wrong_entries(20))
      EXPECT_TRUE(!wrong.ends_with("/weight") && !wrong.ends_with("/buffer")) << wrong;
    for (const StateEntry& e : shard.state()) {
      if (e.field == "weight" || e.field == "buffer") continue;
      for (int64_t i = 0; i < e.elements.size() * size_of(e.dtype); ++i)
        ASSERT_EQ(e.data[i], std::byte(0));
    }
  });
}

// The checkpoint stores "embed", also known as "head".
TEST(Aliases, TiedTensorsAreFoundUnderEitherName) {
  const TempFolder folder;
  const std::vector<EntrySpec> tied{{"embed", "weight", {40, 7}, DType::f32}};
  save(folder.path(), 2, 1, {}, tied);
  const auto load = [&](const std::vector<EntrySpec>& model,
                        const std::vector<TensorAlias>& aliases) {
    comm::spawn(3, [&](comm::Group& group) {
      Shard shard = random_shard(model, group, 9);
      load_checkpoint(folder / "step-00000001", shard.state(), aliases, group);
      for (size_t i = 0; i < model.size(); ++i) {  // every one has the values of entry 0
        const StateEntry& e = shard.state()[i];
        for (int64_t k = 0; k < e.elements.size(); ++k) {
          float wanted;
          put_value(DType::f32, 1, 0, e.elements.begin + k, reinterpret_cast<std::byte*>(&wanted));
          ASSERT_EQ(std::memcmp(&wanted, e.data + 4 * k, 4), 0);
        }
      }
    });
  };
  load({{"head", "weight", {40, 7}, DType::f32}}, {{"embed", "head"}});
  load({{"head", "weight", {40, 7}, DType::f32}, {"embed", "weight", {40, 7}, DType::f32}}, {});
}

TEST(Inspect, DescribesAndExportsWithoutRanks) {
  const TempFolder folder;
  save(folder.path(), 3, 20);
  const Checkpoint checkpoint(folder / "step-00000020");
  const std::string text = describe(checkpoint);
  EXPECT_THAT(text,
              HasSubstr("step 20, written by 3 ranks with degrees 1,1,1, plan fedcba9876543210"));
  EXPECT_THAT(
      text,
      HasSubstr("embed [997, 301]: weight fp32, adamw.exp_avg fp32, adamw.exp_avg_sq fp32\n"));
  EXPECT_THAT(text,
              HasSubstr("codes [300, 5]: weight bf16, adam8.exp_avg u8, adam8.scale fp32 [6]\n"));
  EXPECT_THAT(text, HasSubstr("head is embed\n"));
  EXPECT_THAT(describe_verification(checkpoint), HasSubstr("sound: "));
  EXPECT_THAT(describe_folder(folder.path()), HasSubstr("step-00000020: complete\n"));

  const auto weights = export_weights(checkpoint);
  ASSERT_EQ(weights.size(), 6u);
  EXPECT_EQ(weights[0].name, "embed");
  EXPECT_EQ(weights[0].shape, (std::vector<int64_t>{997, 301}));
  ASSERT_EQ(weights[3].name, "wq");
  for (int64_t i = 0; i < 512 * 96; ++i) {
    uint32_t bits = 0;
    put_value(DType::bf16, 20, 9, i, reinterpret_cast<std::byte*>(&bits));
    ASSERT_EQ(std::bit_cast<uint32_t>(weights[3].data[i]), bits << 16);
  }
  EXPECT_EQ(read_weight(checkpoint, "head").data.size(), 997u * 301);
  EXPECT_THAT(message_of<ConfigError>([&] { read_weight(checkpoint, "nobody"); }),
              HasSubstr("nobody"));
}

}  // namespace
}  // namespace dovetail::checkpoint_test
