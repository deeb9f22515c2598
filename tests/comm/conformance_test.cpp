// One body for all transports: what every Group promises (dovetail/comm/group.h).
#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "dovetail/base/error.h"
#include "tests/comm/reference.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

class Conformance : public testing::TestWithParam<World> {
 protected:
  int size() const { return GetParam().size; }
  void each(const std::function<void(Group&)>& body, std::chrono::milliseconds deadline = kSpawnDeadline) {
    run(GetParam(), body, deadline);
  }
  // Slices that differ in size, some of them empty.
  std::vector<Interval> ragged(int64_t unit) const {
    std::vector<int64_t> sizes;
    for (int m = 0; m < size(); ++m) sizes.push_back(m % 3 == 1 ? 0 : unit * (m + 1) + m);
    return slices_of(sizes);
  }
};

uint16_t to_bf16(float v) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16); }
// Not inlined: g++ 12 folds `c ? v : truncated(v)` to v.
[[gnu::noinline]] float truncated(float v) { return std::bit_cast<float>(static_cast<uint32_t>(to_bf16(v)) << 16); }

// Gathers planes whose shards hold byte_at(1000*plane + member, i), in place or from elsewhere; checks every byte.
void check_gather(Group& group, const std::vector<std::vector<Interval>>& slices, bool in_place) {
  std::vector<std::vector<std::byte>> whole, shard;
  std::vector<GatherPlane> planes;
  for (size_t p = 0; p < slices.size(); ++p) {
    const Interval mine = slices[p][group.rank()];
    whole.emplace_back(static_cast<size_t>(slices[p].back().end), std::byte{0xee});
    shard.emplace_back(static_cast<size_t>(mine.size()));
    for (int64_t i = 0; i < mine.size(); ++i) shard[p][i] = byte_at(1000 * p + group.rank(), i);
  }
  for (size_t p = 0; p < slices.size(); ++p) {
    const std::byte* from = shard[p].data();
    if (in_place && !shard[p].empty()) {
      std::memcpy(whole[p].data() + slices[p][group.rank()].begin, from, shard[p].size());
      from = whole[p].data() + slices[p][group.rank()].begin;
    }
    planes.push_back({from, whole[p].data(), slices[p]});
  }
  Gathered gathered = group.all_gather(planes, {Phase::gather_forward, 3, 5, "planes"});
  gathered.work->wait();
  ASSERT_EQ(gathered.whole.size(), slices.size());
  for (size_t p = 0; p < slices.size(); ++p) {
    for (int m = 0; m < group.size(); ++m) {
      const Interval s = slices[p][m];
      for (int64_t i = 0; i < s.size(); ++i) {
        ASSERT_EQ(gathered.whole[p][s.begin + i], byte_at(1000 * p + m, i))
            << "plane " << p << " member " << m << " byte " << i;
      }
    }
  }
}

// Reduces value_at(rank, i) and compares with the tree's definition, bit for bit.
void check_reduce(Group& group, const std::vector<Interval>& slices, DType dtype, bool accumulate, float scale = 1) {
  const int64_t total = slices.back().end;
  std::vector<float> f32(static_cast<size_t>(total));
  std::vector<uint16_t> bf16(static_cast<size_t>(total));
  const int me = group.global_ranks()[group.rank()];
  for (int64_t i = 0; i < total; ++i) {
    f32[i] = value_at(me, i);
    bf16[i] = to_bf16(f32[i]);
  }
  const Interval mine = slices[group.rank()];
  std::vector<float> output(static_cast<size_t>(mine.size()), 0.5f);
  std::vector<std::byte> scratch(static_cast<size_t>(group.reduce_scratch_bytes(dtype, slices)));
  ReduceScatter request;
  request.input = dtype == DType::f32 ? std::as_bytes(std::span(f32)).data() : std::as_bytes(std::span(bf16)).data();
  request.dtype = dtype;
  request.slices = slices;
  request.output = output.data();
  request.accumulate = accumulate;
  request.scale = scale;
  // Every element is shown once, in order, as it stays.
  std::vector<float> shown;
  request.finished = [&](int64_t begin, std::span<const float> run) {
    ASSERT_EQ(begin, std::ssize(shown));
    shown.insert(shown.end(), run.begin(), run.end());
  };
  request.scratch = scratch;
  group.reduce_scatter(request, {Phase::reduce, 2, 9, "gradients"})->wait();
  std::vector<int> ranks(group.global_ranks().begin(), group.global_ranks().end());
  std::ranges::sort(ranks);
  for (int64_t i = 0; i < mine.size(); ++i) {
    const float sum = scale * tree_value(ranks, [&](int r) {
      const float v = value_at(r, mine.begin + i);
      return dtype == DType::f32 ? v : truncated(v);
    });
    ASSERT_EQ(output[i], accumulate ? 0.5f + sum : sum) << name_of(dtype) << " element " << i;
  }
  ASSERT_EQ(shown, output);
}

TEST_P(Conformance, GathersEvenSlices) {
  each([&](Group& g) {
    for (int64_t n : {0, 1, 7, 4096, 100'003}) check_gather(g, {even_slices(g.size(), n)}, true);
  });
}

TEST_P(Conformance, GathersRaggedSlicesFromElsewhere) {
  each([&](Group& g) {
    for (int64_t n : {1, 33, 5000}) check_gather(g, {ragged(n)}, false);
  });
}

TEST_P(Conformance, GathersSeveralPlanesAsOne) {
  each([&](Group& g) {
    const Counts before = g.counters().read();
    check_gather(g, {even_slices(g.size(), 4096), ragged(5), even_slices(g.size(), 128), even_slices(g.size(), 4096)},
                 true);
    const Counts moved = g.counters().read() - before;
    EXPECT_EQ(moved.of(Phase::gather_forward).operations, g.size() > 1 ? 1 : 0);
  });
}

TEST_P(Conformance, GathersLargeSlices) {
  each([&](Group& g) { check_gather(g, {even_slices(g.size(), (8 << 20) / g.size() + 3)}, true); });
}

TEST_P(Conformance, GatherOfOneMemberIsItsShard) {
  each([&](Group& g) {
    EXPECT_EQ(g.needs_gather_buffer(), g.size() > 1 && GetParam().transport != "peer");
    if (g.size() > 1) return;
    std::vector<std::byte> shard(10);
    const GatherPlane plane{shard.data(), nullptr, even_slices(1, 10)};
    Gathered gathered = g.all_gather({&plane, 1}, {});
    gathered.work->wait();
    EXPECT_EQ(gathered.whole[0], shard.data());
  });
}

TEST_P(Conformance, ReducesOverTheTree) {
  each([&](Group& g) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      for (int64_t n : {0, 1, 5, 1027, 40'001}) {
        check_reduce(g, even_slices(g.size(), n), dtype, false);
        check_reduce(g, even_slices(g.size(), n), dtype, true);
        check_reduce(g, even_slices(g.size(), n), dtype, false, 0.3f);
        check_reduce(g, even_slices(g.size(), n), dtype, true, 0.25f);
      }
    }
  });
}

TEST_P(Conformance, ReducesRaggedAndLargeSlices) {
  each([&](Group& g) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      check_reduce(g, ragged(1), dtype, false);
      check_reduce(g, ragged(3001), dtype, true);
    }
    check_reduce(g, even_slices(g.size(), (1 << 20) / g.size() + 1), DType::f32, true);
  });
}

TEST_P(Conformance, AllReduceGivesTheSameBitsEverywhere) {
  each([&](Group& g) {
    for (int64_t n : {0, 1, 3, 15, 16, 17, 1000, 300'001}) {
      std::vector<float> data(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) data[i] = value_at(g.rank(), i);
      std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(n)));
      g.all_reduce(data, scratch, {Phase::norm, -1, 1, "norm"})->wait();
      for (int64_t i = 0; i < n; ++i) {
        ASSERT_EQ(data[i], tree_value(iota(g.size()), [&](int r) { return value_at(r, i); })) << i << " of " << n;
      }
    }
  });
}

TEST_P(Conformance, ExchangeMatchesMessagesInOrder) {
  each([&](Group& g) {
    const int n = g.size(), me = g.rank();
    // Two messages to the next member, one to itself, and the last member has only its receive.
    std::vector<std::byte> a(10), b(10), own(5), in_a(10), in_b(10), in_own(5);
    for (int i = 0; i < 10; ++i) a[i] = byte_at(me, i), b[i] = byte_at(100 + me, i);
    for (int i = 0; i < 5; ++i) own[i] = byte_at(200 + me, i);
    const int to = (me + 1) % n, from = (me + n - 1) % n;
    std::vector<Send> sends{{me, own}};
    std::vector<Receive> receives{{me, in_own}};
    if (n > 1 && me != n - 1) sends.insert(sends.begin(), {{to, a}, {to, b}});
    if (n > 1 && from != n - 1) receives.insert(receives.end(), {{from, in_a}, {from, in_b}});
    g.exchange(sends, receives, {Phase::fragment, 4, 2, "heads"})->wait();
    EXPECT_EQ(in_own, own);
    if (n > 1 && from != n - 1) {
      for (int i = 0; i < 10; ++i) {
        EXPECT_EQ(in_a[i], byte_at(from, i));
        EXPECT_EQ(in_b[i], byte_at(100 + from, i));
      }
    }
    g.exchange({}, {}, {Phase::fragment, 4, 2, "nothing"})->wait();
  });
}

TEST_P(Conformance, GatherBytesKeepsMemberOrderAndLengths) {
  each([&](Group& g) {
    const Counts before = g.counters().read();
    std::vector<std::byte> mine(static_cast<size_t>(g.rank() * 3));
    for (size_t i = 0; i < mine.size(); ++i) mine[i] = byte_at(g.rank(), i);
    const auto all = g.gather_bytes(mine, {Phase::control, -1, 0, "vote"});
    ASSERT_EQ(all.size(), static_cast<size_t>(g.size()));
    for (int m = 0; m < g.size(); ++m) {
      ASSERT_EQ(all[m].size(), static_cast<size_t>(m * 3));
      for (size_t i = 0; i < all[m].size(); ++i) EXPECT_EQ(all[m][i], byte_at(m, i));
    }
    const Counts moved = g.counters().read() - before;
    EXPECT_EQ(moved.sent(), 0);
    EXPECT_EQ(moved.control_sent, (g.size() - 1) * (64 + g.rank() * 3));
  });
}

TEST_P(Conformance, BarrierHoldsUntilTheLastComes) {
  std::atomic<int> arrived{0};
  each([&](Group& g) {
    for (int round = 1; round <= 3; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds(g.rank() * 3));
      ++arrived;
      g.barrier({Phase::control, -1, round, "round"});
      EXPECT_GE(arrived.load(), round * g.size());
    }
  });
}

TEST_P(Conformance, OperationsOverlapAndAreWaitedOutOfOrder) {
  each([&](Group& g) {
    const int n = g.size();
    constexpr int kOperations = 6;
    std::vector<std::vector<float>> data(kOperations), inputs(kOperations), outputs(kOperations);
    std::vector<std::vector<std::byte>> scratch(2 * kOperations), whole(kOperations);
    std::vector<WorkHandle> works;
    const auto slices = even_slices(n, 1000);
    for (int k = 0; k < kOperations; ++k) {
      data[k].assign(50, static_cast<float>(g.rank() + k));
      scratch[k].resize(static_cast<size_t>(g.all_reduce_scratch_bytes(50)));
      works.push_back(g.all_reduce(data[k], scratch[k], {Phase::norm, k, 0, "a"}));
      inputs[k].assign(static_cast<size_t>(1000 * n), static_cast<float>(g.rank() * 2 + k));
      outputs[k].resize(1000);
      auto& s = scratch[kOperations + k];
      s.resize(static_cast<size_t>(g.reduce_scratch_bytes(DType::f32, slices)));
      works.push_back(g.reduce_scatter(
          {std::as_bytes(std::span(inputs[k])).data(), DType::f32, slices, outputs[k].data(), false, s},
          {Phase::reduce, k, 0, "b"}));
      whole[k].resize(static_cast<size_t>(100 * n));
      std::fill_n(whole[k].begin() + 100 * g.rank(), 100, static_cast<std::byte>(g.rank() + k));
      const GatherPlane plane{whole[k].data() + 100 * g.rank(), whole[k].data(), even_slices(n, 100)};
      works.push_back(g.all_gather({&plane, 1}, {Phase::gather_backward, k, 0, "c"}).work);
    }
    // Each rank has an order of its own.
    for (size_t i = 0; i < works.size(); ++i) works[(i * 7 + static_cast<size_t>(g.rank()) * 5) % works.size()]->wait();
    const float ranks = static_cast<float>(n * (n - 1) / 2);
    for (int k = 0; k < kOperations; ++k) {
      EXPECT_THAT(data[k], testing::Each(ranks + static_cast<float>(n * k)));
      EXPECT_THAT(outputs[k], testing::Each(2 * ranks + static_cast<float>(n * k)));
      if (n > 1) {
        for (int m = 0; m < n; ++m) EXPECT_EQ(whole[k][100 * m + 99], static_cast<std::byte>(m + k));
      }
    }
  });
}

TEST_P(Conformance, DroppedHandlesFinishTheirOperation) {
  each([&](Group& g) {
    std::vector<float> data(1000, 1.0f);
    std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(1000)));
    g.all_reduce(data, scratch, {Phase::norm, -1, 0, "dropped"});
    EXPECT_THAT(data, testing::Each(static_cast<float>(g.size())));
  });
}

TEST_P(Conformance, CountersEqualTheFormula) {
  each([&](Group& g) {
    const int64_t n = g.size(), me = g.rank();
    const auto slices = ragged(100);
    const int64_t own = slices[me].size(), total = slices.back().end;
    Counts before = g.counters().read();
    check_gather(g, {slices, even_slices(g.size(), 64)}, true);
    Counts moved = g.counters().read() - before;
    EXPECT_EQ(moved.of(Phase::gather_forward), (PhaseCount{(n - 1) * (own + 64), total - own + (n - 1) * 64, n > 1}));
    EXPECT_EQ(moved.sent(), moved.of(Phase::gather_forward).sent);
    EXPECT_EQ(moved.control_sent, 64 * (n - 1));
    EXPECT_EQ(moved.control_received, 64 * (n - 1));

    for (DType dtype : {DType::f32, DType::bf16}) {
      before = g.counters().read();
      check_reduce(g, slices, dtype, false);
      moved = g.counters().read() - before;
      EXPECT_EQ(moved.of(Phase::reduce),
                (PhaseCount{(total - own) * size_of(dtype), (n - 1) * own * size_of(dtype), n > 1}));
    }

    before = g.counters().read();
    std::vector<float> data(static_cast<size_t>(n * 160));
    std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(n * 160)));
    g.all_reduce(data, scratch, {Phase::norm, -1, 0, "n"})->wait();
    moved = g.counters().read() - before;
    EXPECT_EQ(moved.of(Phase::norm).sent, 2 * (n - 1) * 160 * 4);
    EXPECT_EQ(moved.of(Phase::norm).received, 2 * (n - 1) * 160 * 4);

    before = g.counters().read();
    g.barrier({});
    moved = g.counters().read() - before;
    EXPECT_EQ(moved.sent() + moved.received(), 0);
    EXPECT_EQ(moved.control_sent, 64 * (n - 1));
  });
}

TEST_P(Conformance, SplitNumbersMembersInTheOrderGiven) {
  each([&](Group& g) {
    std::vector<int> reversed = iota(g.size());
    std::ranges::reverse(reversed);
    const auto turned = g.split({reversed});
    EXPECT_EQ(turned->rank(), g.size() - 1 - g.rank());
    EXPECT_EQ(turned->global_ranks()[turned->rank()], g.rank());
    check_gather(*turned, {ragged(10)}, true);
    check_reduce(*turned, ragged(10), DType::f32, false);  // the tree is still over global ranks
    if (g.size() < 4) return;
    // Shard order of zero1 = 4, zero2 = zero3 = 2 on ranks 0..3; the rest alone.
    std::vector<std::vector<int>> lists{{0, 2, 1, 3}};
    for (int m = 4; m < g.size(); ++m) lists.push_back({m});
    const auto shards = g.split(lists);
    EXPECT_EQ(shards->size(), g.rank() < 4 ? 4 : 1);
    check_gather(*shards, {even_slices(shards->size(), 9)}, true);
    check_reduce(*shards, even_slices(shards->size(), 77), DType::bf16, true);
    // Groups of groups, used in turn with their parents.
    if (g.rank() < 4) {
      const auto pair = shards->split({{1, 0}, {2, 3}});
      EXPECT_EQ(pair->size(), 2);
      check_reduce(*pair, even_slices(2, 50), DType::f32, false);
      check_gather(*shards, {even_slices(4, 11)}, false);
    }
    g.barrier({});
  });
}

TEST_P(Conformance, HierarchicalAndFlatSumsAgreeBitForBit) {
  if (size() != 4 && size() != 8) GTEST_SKIP() << "powers of two with two levels";
  each([&](Group& g) {
    const int n = g.size();
    for (int inner = 2; inner < n; inner *= 2) {
      const int outer = n / inner;
      std::vector<std::vector<int>> rows, columns;
      for (int o = 0; o < outer; ++o) {
        rows.emplace_back();
        for (int i = 0; i < inner; ++i) rows.back().push_back(o * inner + i);
      }
      for (int i = 0; i < inner; ++i) {
        columns.emplace_back();
        for (int o = 0; o < outer; ++o) columns.back().push_back(o * inner + i);
      }
      const auto row = g.split(rows), column = g.split(columns);
      const int64_t each = 301, total = each * n;
      std::vector<float> input(static_cast<size_t>(total));
      for (int64_t i = 0; i < total; ++i) input[i] = value_at(g.rank(), i);
      // First over the row into slices of total / inner, then over the column into slices of `each`.
      std::vector<float> middle(static_cast<size_t>(total / inner)), output(static_cast<size_t>(each));
      const auto wide = even_slices(inner, total / inner), narrow = even_slices(outer, each);
      std::vector<std::byte> scratch(static_cast<size_t>(std::max(row->reduce_scratch_bytes(DType::f32, wide),
                                                                  column->reduce_scratch_bytes(DType::f32, narrow))));
      row->reduce_scatter({std::as_bytes(std::span(input)).data(), DType::f32, wide, middle.data(), false, scratch},
                          {Phase::reduce, 0, 0, "rows"})->wait();
      column
          ->reduce_scatter(
              {std::as_bytes(std::span(middle)).data(), DType::f32, narrow, output.data(), false, scratch},
              {Phase::reduce_main, 0, 0, "columns"})
          ->wait();
      const int64_t begin = row->rank() * (total / inner) + column->rank() * each;
      for (int64_t i = 0; i < each; ++i) {
        ASSERT_EQ(output[i], tree_value(iota(n), [&](int r) { return value_at(r, begin + i); })) << "inner " << inner;
      }
    }
  });
}

TEST_P(Conformance, SplitsThatDoNotNameEachMemberOnceAreRefused) {
  each([&](Group& g) {
    EXPECT_THROW(g.split({}), ConfigError);
    std::vector<int> twice = iota(g.size());
    twice.push_back(0);
    EXPECT_THROW(g.split({twice}), ConfigError);
    EXPECT_THROW(g.split({{g.size()}}), ConfigError);
    g.barrier({});  // nothing was sent
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Conformance, testing::ValuesIn(all_worlds()), name_of_world);

}  // namespace
}  // namespace dovetail::comm
