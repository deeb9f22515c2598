// What every Group promises when ranks diverge, fall silent or die (cases.md B24's library half).
#include <gmock/gmock.h>

#include <numeric>
#include <thread>

#include "dovetail/base/error.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

class Faults : public testing::TestWithParam<World> {
 protected:
  static constexpr auto kDeadline = 1200ms;
  static constexpr auto kSlack = 2500ms;  // the machine may be busy

  int size() const { return GetParam().size; }
  // Runs body on each rank; returns every rank's CommError text, "" where there was none, and checks that all ended
  // in time.
  std::vector<std::string> errors(const std::function<void(Group&)>& body) {
    std::vector<std::string> texts(static_cast<size_t>(size()));
    run(GetParam(), [&](Group& g) {
      const auto start = std::chrono::steady_clock::now();
      try {
        body(g);
      } catch (const CommError& error) {
        texts[g.rank()] = error.what();
        peers_[g.rank()] = error.peer;
        EXPECT_LT(std::chrono::steady_clock::now() - start, kDeadline + kSlack) << error.what();
        EXPECT_THROW(g.barrier({}), CommError) << "after an error the group can only be destroyed";
      }
    }, kDeadline);
    return texts;
  }
  int peer(int rank) const { return peers_.at(rank); }

  std::array<int, 16> peers_{};
};

struct Reduction {
  std::vector<float> input, output;
  std::vector<std::byte> scratch;
  WorkHandle start(Group& g, int64_t each, const Identity& id) {
    const auto slices = even_slices(g.size(), each);
    input.assign(static_cast<size_t>(each * g.size()), 1.0f);
    output.assign(static_cast<size_t>(each), -7.0f);
    scratch.resize(static_cast<size_t>(g.reduce_scratch_bytes(DType::f32, slices)));
    return g.reduce_scatter(
        {std::as_bytes(std::span(input)).data(), DType::f32, slices, output.data(), true, scratch}, id);
  }
};

struct Gathering {
  std::vector<std::byte> whole;
  WorkHandle start(Group& g, int64_t each, const Identity& id) {
    whole.assign(static_cast<size_t>(each * g.size()), std::byte{0x5a});
    const GatherPlane plane{whole.data() + each * g.rank(), whole.data(), even_slices(g.size(), each)};
    return g.all_gather({&plane, 1}, id).work;
  }
};

TEST_P(Faults, DifferentIdentitiesNameBothSidesAndUseNoByte) {
  const auto texts = errors([&](Group& g) {
    Reduction r;
    const bool odd = g.rank() == 1;
    try {
      r.start(g, 1000, {Phase::reduce, odd ? 6 : 5, 7, odd ? "layers.6" : "layers.5"})->wait();
    } catch (...) {
      EXPECT_THAT(r.output, testing::Each(-7.0f));
      throw;
    }
    ADD_FAILURE() << "rank " << g.rank() << " saw no error";
  });
  for (int r = 0; r < size(); ++r) {
    EXPECT_THAT(texts[r], AllOf(HasSubstr("layers.5"), HasSubstr("layers.6"), HasSubstr("step 7"),
                                HasSubstr("rank 1: reduce")));
  }
  if (size() == 2) {
    EXPECT_EQ(peer(0), 1);
  }
}

TEST_P(Faults, DifferentStepsAndOperationsNeverPair) {
  const auto texts = errors([&](Group& g) {
    Reduction r;
    Gathering a;
    // The same bytes on the wire: a gather's slice against a reduce's.
    if (g.rank() == 0) r.start(g, 256, {Phase::reduce, 1, 3, "layers.1"})->wait();
    if (g.rank() != 0) a.start(g, 1024, {Phase::gather_forward, 1, 4, "layers.1"})->wait();
  });
  for (int r = 0; r < size(); ++r) {
    EXPECT_THAT(texts[r],
                AllOf(HasSubstr("reduce of layers.1, step 3"), HasSubstr("gather_forward of layers.1, step 4")));
  }
}

TEST_P(Faults, DifferentSizesNameBothSides) {
  const auto texts = errors([&](Group& g) {
    Gathering a;
    a.start(g, g.rank() == 1 ? 4000 : 1000, {Phase::gather_forward, 2, 1, "layers.2"})->wait();
  });
  for (int r = 0; r < size(); ++r) {
    EXPECT_THAT(texts[r], AllOf(HasSubstr("sizes"), HasSubstr("layers.2"), HasSubstr("4000"), HasSubstr("1000")));
  }
}

TEST_P(Faults, TheSameTotalInOtherMessagesIsAnError) {
  const auto texts = errors([&](Group& g) {
    std::vector<std::byte> out(100), in(100);
    const std::span o(out), i(in);
    const int peer = g.rank() == 0 ? 1 : 0;
    if (g.rank() > 1) return g.exchange({}, {}, {Phase::fragment, 0, 0, "cut"})->wait();
    const int cut = g.rank() == 0 ? 40 : 50;
    const Send sends[] = {{peer, o.first(cut)}, {peer, o.subspan(cut)}};
    const Receive receives[] = {{peer, i.first(cut)}, {peer, i.subspan(cut)}};
    g.exchange(sends, receives, {Phase::fragment, 0, 0, "cut"})->wait();
  });
  EXPECT_THAT(texts[0], HasSubstr("sizes"));
  EXPECT_THAT(texts[1], HasSubstr("sizes"));
}

TEST_P(Faults, MessageThatOnlyOneSideKnowsIsAnError) {
  const auto texts = errors([&](Group& g) {
    std::vector<std::byte> out(8);
    const Send send{1, out};
    g.exchange(g.rank() == 0 ? std::span(&send, 1) : std::span<const Send>{}, {}, {Phase::fragment, 9, 0, "lost"})
        ->wait();
  });
  EXPECT_THAT(texts[0], HasSubstr("rank 1 sends 0 bytes and expects 0"));
  EXPECT_THAT(texts[1], HasSubstr("rank 0 sends 8 bytes"));
}

// B24: rank 0 runs two micro-batches, rank 1 one and then a barrier.
TEST_P(Faults, RanksWithDifferentNumbersOfMicroBatches) {
  const auto texts = errors([&](Group& g) {
    for (int micro = 0; micro < (g.rank() == 1 ? 1 : 2); ++micro) {
      Gathering a;
      Reduction r;
      a.start(g, 512, {Phase::gather_forward, 0, 11, "layers.0"})->wait();
      r.start(g, 512, {Phase::reduce, 0, 11, "layers.0"})->wait();
    }
    g.barrier({Phase::control, -1, 11, "end of step"});
    ADD_FAILURE() << "rank " << g.rank() << " saw no error";
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, AllOf(HasSubstr("step 11"), HasSubstr("layers.0"), HasSubstr("rank 1: barrier")));
  }
}

// The same, but the barrier is on another group, so no headers meet.
TEST_P(Faults, DivergingOnDifferentGroupsEndsAtTheDeadline) {
  const auto texts = errors([&](Group& g) {
    std::vector<int> all(static_cast<size_t>(g.size()));
    std::iota(all.begin(), all.end(), 0);
    const auto other = g.split({all});
    Reduction r;
    if (g.rank() == 1) g.barrier({Phase::control, -1, 11, "end of step"});
    r.start(*other, 512, {Phase::reduce, 0, 11, "layers.0"})->wait();
  });
  EXPECT_THAT(texts[0],
              AllOf(HasSubstr("layers.0"), HasSubstr("step 11"), HasSubstr("rank 1"), HasSubstr("end of step")));
  EXPECT_THAT(texts[1], AllOf(HasSubstr("end of step"), HasSubstr("layers.0")));
}

TEST_P(Faults, ASilentRankIsNamedAtTheDeadline) {
  std::atomic<int> ended{0};
  const auto texts = errors([&](Group& g) {
    Gathering a;
    if (g.rank() == size() - 1) {  // alive, but does not come
      while (ended < size() - 1) std::this_thread::sleep_for(5ms);
      return;
    }
    const auto count = std::shared_ptr<void>(nullptr, [&](void*) { ++ended; });
    a.start(g, 100, {Phase::gather_forward, 7, 2, "layers.7"})->wait();
  });
  for (int r = 0; r + 1 < size(); ++r) {
    EXPECT_THAT(texts[r],
                AllOf(HasSubstr("layers.7"), HasSubstr("rank " + std::to_string(size() - 1)), HasSubstr("ms")));
    EXPECT_EQ(peer(r), size() - 1) << texts[r];
  }
}

TEST_P(Faults, ARankThatFailsIsNamedWithItsReasonLongBeforeTheDeadline) {
  std::vector<std::string> texts(static_cast<size_t>(size()));
  const auto start = std::chrono::steady_clock::now();
  try {
    run(GetParam(), [&](Group& g) {
      try {
        g.barrier({Phase::control, -1, 2, "start"});  // the world stands on every rank
        if (g.rank() == size() - 1) raise<FileError>("data.bin: truncated");
        g.barrier({Phase::control, -1, 3, "start"});
      } catch (const CommError& error) {
        texts[g.rank()] = error.what();
        throw;
      }
    }, 30s);
    ADD_FAILURE() << "no error";
  } catch (const FileError& error) {  // not the CommErrors that follow from it
    EXPECT_THAT(error.what(), HasSubstr("truncated"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
  for (int r = 0; r + 1 < size(); ++r) {
    EXPECT_THAT(texts[r],
                AllOf(HasSubstr("rank " + std::to_string(size() - 1)), HasSubstr("truncated"), HasSubstr("start")));
  }
}

TEST_P(Faults, ARankThatLeavesIsNamed) {
  std::vector<std::string> texts(static_cast<size_t>(size()));
  const auto errors_of = errors([&](Group& g) {
    if (g.rank() != 0) g.barrier({Phase::control, -1, 5, "late"});
  });
  for (int r = 1; r < size(); ++r) EXPECT_THAT(errors_of[r], HasSubstr("rank 0"));
}

TEST_P(Faults, OperationsInFlightGiveTheirMemoryBack) {
  const auto texts = errors([&](Group& g) {
    std::vector<Gathering> gathers(4);
    Gathering last;
    std::vector<WorkHandle> works;  // goes first
    for (auto& a : gathers) works.push_back(a.start(g, 200'000, {Phase::gather_forward, 0, 0, "a"}));
    if (g.rank() == 0) g.barrier({});
    works.push_back(last.start(g, 10, {Phase::gather_forward, 1, 0, "b"}));
    works.back()->wait();
  });
  for (const std::string& text : texts) EXPECT_THAT(text, HasSubstr("rank 0"));
}

TEST_P(Faults, DifferentSplitsNameBothSides) {
  if (size() < 3) GTEST_SKIP() << "needs three members";
  const auto texts = errors([&](Group& g) {
    std::vector<int> rest;
    for (int m = 2; m < g.size(); ++m) rest.push_back(m);
    std::vector<int> low{0, 1}, high = rest;
    if (g.rank() == 1) low = {1, 0};
    g.split({low, high});
  });
  EXPECT_THAT(texts[0], AllOf(HasSubstr("[0 1]"), HasSubstr("[1 0]"), HasSubstr("rank 1")));
}

std::vector<World> several_ranks() {
  std::vector<World> worlds;
  for (const World& w : all_worlds()) {
    if (w.size == 2 || w.size == 3 || w.size == 4) worlds.push_back(w);
  }
  return worlds;
}

INSTANTIATE_TEST_SUITE_P(Transports, Faults, testing::ValuesIn(several_ranks()), name_of_world);

}  // namespace
}  // namespace dovetail::comm
