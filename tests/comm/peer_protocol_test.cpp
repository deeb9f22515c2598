// A model of who uses shared memory between which synchronisations (docs/peer.md), checked over every interleaving:
// the engine's passes over two groups, the root, read through the whole pass, and a block; a sum over all; slots that
// many groups are gathered into in turn.
#include "tests/comm/interleavings.h"

namespace dovetail::comm {
namespace {

struct Mode { int zero1, zero2, zero3; bool bf16; };  // zero1 is the world; fp32: main weights are runtime parameters

enum class Call {
  train,         // forward and backward
  step,          // Engine::step
  evaluate,      // forward without gradients
  forward_only,  // forward with gradients of which no backward follows
  read_all,      // gather_all, a read of module parameters, release_all
  write          // through Engine::parameters(), or a checkpoint that is loaded
};
using enum Call;
using Calls = std::vector<Call>;
class Rank : public Program {  // the engine of one rank
 public:
  Rank(const Mode& m, int rank, Without without, bool drops = false)
      : Program(rank, std::move(without)), mode_(m), drops_(drops) {
    for (int r = 0; r < m.zero1; ++r) {
      main_.push_back(r);
      if (r / m.zero3 == rank / m.zero3) gather_.push_back(r);
      if (r / m.zero2 == rank / m.zero2) reduce_.push_back(r);
      if (r % m.zero3 == rank % m.zero3) refresh_.push_back(r);
      if (r % m.zero2 == rank % m.zero2) reduce_main_.push_back(r);
    }
    if (!m.bf16) access({}, own_shards(), "ShardGroup::adopt");
  }

  void call(Call c) {
    if (c == train) forward(), drop_unread(), end_pass(), backward();
    if (c == evaluate) forward(), release(root), end_pass();
    if (c == forward_only) forward(), close(whole(root), {}, "the end of a forward pass"), end_pass();
    if (c == step) take_step();
    if (c == read_all) read_everything();
    if (c == write) write_main("a write of the user"), exposed_ = true;
  }

 private:
  int own(int rank, int group) const { return runtime(rank, group, rank / mode_.zero3); }
  Uses own_shards() const { return {{own(rank_, root), version_}, {own(rank_, block), version_}}; }
  Uses gradients() const { return {{place(rank_, kGradient + root), sum_}, {place(rank_, kGradient + block), sum_}}; }
  // A group's whole runtime parameters: every slice of the shards of the ranks that gather.
  Uses whole(int group) const {
    Uses uses;
    for (int r : gather_)
      for (int k = 0; k < std::ssize(refresh_); ++k) uses.push_back({runtime(r, group, k), version_});
    return uses;
  }
  void refresh() {
    meet(vote, 0, main_, "Runner::refresh");
    if (!stale_ && !exposed_) return;
    stale_ = false;
    gathered_ = encoded_ = {};
    if (refresh_.size() == 1) return;
    if (mode_.bf16) access({}, own_shards(), "ShardGroup::encode");
    for (int g : {root, block}) say(shards_ready, g, "ShardGroup::start_refresh");
    for (int g : {root, block}) {
      hear(shards_ready, g, refresh_, "P2POperation::wait_receives of a refresh");
      Uses from, to;
      for (int r : refresh_) {
        if (r == rank_) continue;
        from.push_back({own(r, g), version_});
        to.push_back({runtime(rank_, g, r / mode_.zero3), version_});
      }
      access(from, to, "PeerLink::take of a refresh");
      say(shards_sent, g, "PeerLink::take of a refresh");
    }
    for (int g : {root, block}) hear(shards_sent, g, refresh_, "P2POperation::wait_sends of a refresh");
  }
  bool encodes_into_place() const { return mode_.bf16 && refresh_.size() == 1; }
  void start_gather(int g) {
    if (gathered_[g]) return;
    if (encodes_into_place() && !std::exchange(encoded_[g], true))
      access({}, {own_shards()[g]}, "ShardGroup::start_gather: encode_into");
    say(gather, g, "ShardGroup::start_gather");
  }
  void use(int g, const char* name) {
    if (!std::exchange(gathered_[g], true)) hear(gather, g, gather_, "ShardGroup::finish_gather");
    open(whole(g), {}, name);
  }
  void release(int g) {
    close(whole(g), {}, "ShardGroup::release"), gathered_[g] = false;
    if (encodes_into_place()) say(released, g, "ShardGroup::release: released_by");
  }
  // Runner::after_forward of training, which looks whether all have released the block. Where it drops they had: to
  // wait for that leaves out no interleaving in which it happens, and no drop is another program.
  void drop_unread() {
    if (!encodes_into_place() || !drops_ || !std::exchange(encoded_[block], false)) return;
    hear(released, block, gather_, "ShardGroup::drop_unread_shard");
    access({}, {{own(rank_, block), kNothing}}, "ShardGroup::drop_shard");
  }
  // Runner::before_forward, after_forward. The root stays open.
  void forward() {
    if (std::exchange(spent_, false)) access({}, gradients(), "ShardGroup::discard_spent_gradient");
    refresh();
    for (int g : {root, block}) start_gather(g);  // Runner::gather_ahead with prefetch 1
    use(root, "forward of root");
    use(block, "forward of block");
    release(block);
  }
  // Runner::before_backward, after_backward, end_backward with pending_reductions 0: one slot serves both groups.
  void backward() {
    ++sum_;
    start_gather(block);
    use(block, "backward of block");
    for (int g : {block, root}) {
      access({}, {{place(rank_, kSlot), ++slot_}}, "ShardGroup::contribution");
      release(g);
      reduce(posted, taken, g, reduce_, kSlot, slot_, {gradients()[g]});
      if (encodes_into_place() && std::exchange(encoded_[g], false))
        access({}, {{own(rank_, g), kNothing}}, "ShardGroup::finish_reduce: PeerAllocator::zero");
    }
    end_pass();
  }
  // PeerReduceScatter: second_act and complete.
  void reduce(Sync before, Sync after, int g, const Ranks& ranks, int operand, uint8_t version, const Uses& output) {
    Uses operands;
    for (int r : ranks) operands.push_back({place(r, operand), version});
    meet(before, g, ranks, "PeerOperation::hear: posted");
    access(operands, output, "PeerReduceScatter::sum");
    meet(after, g, ranks, "PeerOperation::hear: taken");
  }
  void end_pass() { if (!mode_.bf16) meet(pass_end, 0, main_, "Runner::end_pass"); }
  void take_step() {  // Stepper::step, ShardGroup::reduce_main
    for (int g = 0; g < kGroups && reduce_main_.size() > 1; ++g)
      reduce(main_posted, main_taken, g, reduce_main_, kGradient + g, sum_, {});
    meet(norm, 0, main_, "Stepper::measure");
    write_main("Stepper::update");
    stale_ = spent_ = true;
  }
  void write_main(const char* name) {  // private memory in bf16
    ++version_;
    if (!mode_.bf16) access({}, own_shards(), name);
  }
  void read_everything() {
    if (stale_ || exposed_) refresh();
    for (int g : {root, block}) start_gather(g), use(g, "a read of module parameters");
    for (int g : {root, block}) release(g);
    end_pass();  // Runner::release_all
  }

  const Mode mode_;
  const bool drops_;  // the block's shard goes in every forward pass of training
  Ranks main_, gather_, reduce_, refresh_, reduce_main_;
  uint8_t version_ = 0, slot_ = 0, sum_ = 0;  // of main weights, of what gradient slots and gradient shards hold
  bool stale_ = true, exposed_ = false, spent_ = false;
  std::array<bool, kGroups> gathered_{}, encoded_{};
};

// drops: per rank, as a bit; see Rank.
Outcome run(const Mode& mode, const Calls& calls, const Without& without = {}, unsigned drops = 0) {
  std::vector<Program> ranks;
  for (int r = 0; r < mode.zero1; ++r) {
    Rank rank(mode, r, without, drops >> r & 1);
    for (Call c : calls) rank.call(c);
    ranks.push_back(rank);
  }
  return explore(ranks);
}
constexpr Mode fp32{2, 2, 2, false}, bf16{2, 2, 2, true}, fp32_copies{4, 2, 2, false}, bf16_copies{4, 2, 2, true};
bool holds(const Mode& mode, const Calls& calls, const Without& without = {}) {
  return run(mode, calls, without).violation.empty();
}
bool breaks(const Mode& mode, const Calls& calls, const Without& without = {}) {
  return run(mode, calls, without).violation.starts_with("a ");  // of memory, not of progress
}

TEST(PeerProtocol, HoldsInEveryMode) {
  size_t states = 0;
  for (const bool b : {false, true})
    for (const Mode& m : {Mode{2, 2, 2, b}, {3, 3, 3, b}, {4, 4, 4, b}, {4, 4, 2, b}, {4, 2, 2, b}})
      for (const Calls& calls : {Calls{train, step, evaluate, train, step, train, evaluate, step},
                                 Calls{evaluate, write, evaluate, train, write, train, step, write, train, step},
                                 Calls{train, forward_only, step, forward_only, train, read_all, step, evaluate}}) {
        const Outcome outcome = run(m, calls);
        EXPECT_EQ(outcome.violation, "") << m.zero1 << "," << m.zero2 << "," << m.zero3 << (b ? " bf16" : " fp32");
        states += outcome.states;
      }
  RecordProperty("states", std::to_string(states));
}

TEST(PeerProtocol, NeedsTheVote) {
  EXPECT_TRUE(breaks(bf16, {evaluate, write, evaluate}, {vote}));
  EXPECT_TRUE(holds(fp32_copies, {write, forward_only, forward_only}, {vote}));  // the end of a pass would do
  EXPECT_TRUE(breaks(fp32_copies, {write, forward_only, forward_only}, {vote, pass_end}));
  EXPECT_TRUE(holds(fp32, {train, step, evaluate, write, train, step}, {vote}));  // nothing is copied between shards
  EXPECT_TRUE(holds(bf16, {train, step, train, step}, {vote}));  // a reduction ends a backward pass
  EXPECT_TRUE(holds(bf16, {train, forward_only, step, train}, {vote}));  // and the norm is in a step
  EXPECT_TRUE(breaks(bf16, {train, forward_only, step, train}, {vote, norm}));
}

TEST(PeerProtocol, NeedsTheBarrierOfGathers) {
  for (const Mode& m : {bf16, fp32_copies, bf16_copies}) EXPECT_TRUE(breaks(m, {train, step, train}, {gather}));
  EXPECT_TRUE(holds(fp32, {train, step, evaluate, write, train, step}, {gather}));  // the vote is one
  EXPECT_TRUE(breaks(fp32, {train, step, train}, {gather, vote}));
  EXPECT_TRUE(breaks(bf16_copies, {evaluate}, {shards_ready}));
  EXPECT_TRUE(holds(fp32_copies, {train, step, train}, {shards_ready}));  // main weights are written before the vote
  EXPECT_TRUE(breaks(fp32_copies, {train, step, train}, {shards_ready, vote}));
  EXPECT_TRUE(breaks(bf16_copies, {train, write, train, write, evaluate}, {shards_sent, vote}));
}

TEST(PeerProtocol, NeedsTheEndOfAPassBeforeWritesOfTheUser) {
  for (const Mode& m : {fp32, fp32_copies}) EXPECT_TRUE(breaks(m, {evaluate, write}, {pass_end}));
  EXPECT_TRUE(holds(fp32_copies, {train, step, evaluate, train, step}, {pass_end}));  // without such writes
  EXPECT_TRUE(holds(fp32, {train, write, train, write, train}, {pass_end}));  // the reduction of the root comes last
  for (const Call read : {forward_only, read_all}) {
    EXPECT_TRUE(breaks(fp32, {read, write}, {pass_end}));
    for (const Mode& m : {fp32, bf16}) EXPECT_TRUE(holds(m, {read, write, evaluate}));
  }
}

TEST(PeerProtocol, NeedsTheNormBeforeTheUpdate) {
  for (const Call read : {forward_only, read_all}) EXPECT_TRUE(breaks(fp32, {train, read, step}, {norm, pass_end}));
  EXPECT_TRUE(holds(fp32_copies, {train, step, evaluate, train, step}, {norm}));  // all passes have ended
}

TEST(PeerProtocol, NeedsTheWordsOfReductions) {
  for (const Sync word : {posted, taken}) EXPECT_TRUE(breaks(bf16, {train}, {word}));
  EXPECT_TRUE(breaks(bf16_copies, {train, step}, {main_posted}));
  EXPECT_TRUE(holds(bf16_copies, {train, step, train, step}, {main_taken}));  // the norm comes after it
  EXPECT_TRUE(breaks(bf16_copies, {train, step, train}, {main_taken, norm}));
}

TEST(PeerProtocol, NeedsTheCountsBeforeAShardIsDroppedInForward) {
  const Calls calls{train, step, evaluate, train, write, train, step};
  bool broken = false;
  for (const Mode& m : {bf16, Mode{3, 3, 3, true}})
    for (unsigned drops = 0; drops < 1u << m.zero1; ++drops) {
      EXPECT_EQ(run(m, calls, {}, drops).violation, "") << drops;
      broken |= run(m, calls, {released}, drops).violation.starts_with("a ");
    }
  EXPECT_TRUE(broken);
}

TEST(PeerProtocol, SeesARankThatWaitsForNobody) {
  Rank alone(fp32, 0, {}), other(fp32, 1, {});
  alone.call(evaluate);
  EXPECT_TRUE(explore({alone, other}).violation.starts_with("nobody"));
}

// Of an operand whose slices are places: its input is version 1, the sum 2, what the next step writes there 3.
TEST(PeerProtocol, AllReduceNeedsItsThreeWords) {
  auto all_reduce = [](int size, const Without& without) {
    std::vector<Program> ranks;
    for (int me = 0; me < size; ++me) {
      Ranks all;
      Uses input, before, after;
      for (int m = 0; m < size; ++m) {
        all.push_back(m), input.push_back({place(m, me), 1});
        before.push_back({place(me, m), 1}), after.push_back({place(me, m), 3});
      }
      Program& p = ranks.emplace_back(me, without);
      p.access({}, before, "its gradients");
      p.meet(posted, 0, all, "posted");
      p.access(input, {}, "SumTree::sum");
      p.access({}, {{place(me, me), 2}}, "its slice of its own operand");
      p.meet(summed, 0, all, "summed");
      for (int m : all)
        if (m != me) p.access({{place(m, m), 2}}, {{place(me, m), 2}}, "a copy of a sum");
      p.meet(taken, 0, all, "taken");
      p.access({}, after, "the next gradients");
    }
    return explore(ranks).violation;
  };
  for (int size : {2, 3, 4}) EXPECT_EQ(all_reduce(size, {}), "");
  for (const Sync word : {posted, summed, taken}) EXPECT_TRUE(all_reduce(3, {word}).starts_with("a "));
}

// Gathers one after another, each begun before the unit before it computes, into slots (GatherSlots). A rank reads what
// it has gathered, or, where its backward pass has no use for the unit, releases it at once: odd gathers of the ranks
// in `skip`. Slots follow from what all ranks have published, or only from what each sees free itself.
Outcome run_slots(int size, int slots, unsigned skip, bool asks_all) {
  constexpr int kGathers = 8;
  const unsigned all = (1u << slots) - 1;
  std::vector<Program> ranks;
  Ranks everyone;
  for (int r = 0; r < size; ++r) ranks.emplace_back(r, Without{}), everyone.push_back(r);
  std::vector<unsigned> free(size, all), published(size, all);
  std::vector<std::vector<int>> taken(size);
  for (int n = 0; n < kGathers; ++n) {
    unsigned known = all;
    for (unsigned theirs : published) known &= theirs;
    for (int r = 0; r < size; ++r) {
      if (n > 0) ranks[r].hear(gather, 0, everyone, "ShardGroup::finish_gather of the last one");
      const unsigned choice = asks_all ? known : free[r];
      EXPECT_NE(choice, 0u) << "gather " << n << " finds no slot";
      const int slot = __builtin_ctz(choice | 1u << slots);
      taken[r].push_back(slot);
      free[r] &= ~(1u << slot);
      published[r] = free[r];
      ranks[r].access({}, {{place(r, slot), static_cast<uint8_t>(n)}}, "ShardGroup::start_gather: encode_into");
      ranks[r].say(gather, 0, "ShardGroup::start_gather");
      if (n == 0) continue;
      Uses whole;
      for (int m : everyone) whole.push_back({place(m, taken[r][n - 1]), static_cast<uint8_t>(n - 1)});
      const bool skips = n % 2 == 0 && skip >> r & 1;
      if (!skips) ranks[r].access(whole, {}, "a unit's pass");
      free[r] |= 1u << taken[r][n - 1];
    }
  }
  return explore(ranks);
}

TEST(PeerProtocol, SlotsFollowFromWhatAllHavePublished) {
  for (int size : {2, 3})
    for (unsigned skip = 0; skip < 1u << size; ++skip) {
      EXPECT_EQ(run_slots(size, 3, skip, true).violation, "") << size << " ranks, skip " << skip;
      EXPECT_TRUE(run_slots(size, 3, skip, false).violation.starts_with("a ")) << size << " ranks, skip " << skip;
    }
}

}  // namespace
}  // namespace dovetail::comm
