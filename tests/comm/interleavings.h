// A model of who uses shared memory between which synchronisations, checked over every interleaving. Each rank is a
// straight program of atomic actions, named by the functions that they stand for; what lasts (a pass, a sum, a copy) is
// opened by one action and closed by a later one. A violation is a place that one rank writes while another reads or
// writes it, a read of another version than is due, or a state in which no rank can go on. Every place is written by
// one rank only, so where the ranks stand in their programs says all about the memory: a state is that and nothing
// else.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace dovetail::comm {

// What ranks wait for one another by; a mutation leaves some out.
enum Sync {
  vote,          // Runner::refresh: gather_bytes over `main`
  shards_ready,  // ShardGroup::start_refresh, an all_gather with buffers: its headers and messages
  shards_sent,   // and its sends, done once they are taken
  gather,        // PeerGroup::all_gather without a buffer: its headers
  posted,        // PeerOperation::tell, hear: where the operands of a reduction lie
  summed,        // in PeerAllReduce: the slice is summed
  taken,         // the operands have been read
  main_posted, main_taken,  // the same two words in ShardGroup::reduce_main
  norm,          // Stepper::measure: gather_bytes over the world
  pass_end,      // Runner::end_pass: barrier over `main`
  released,      // counts that ShardGroup::release leaves and drop_unread_shard looks at
  kSyncs
};
using Without = std::set<Sync>;
using Ranks = std::vector<int>;

constexpr int root = 0, block = 1, kGroups = 2;
constexpr int channel_of(Sync sync, int group) { return sync * kGroups + group; }

// Memory of a rank, which it alone writes, by numbers.
constexpr int kRanks = 4, kSlot = 4, kGradient = 5, kPlaces = 7;
constexpr int place(int rank, int number) { return rank * kPlaces + number; }
// In the rank's runtime shard, the slice of member k of its refresh group. In fp32 its own is its main weights.
constexpr int runtime(int rank, int group, int k) { return place(rank, group * 2 + k); }

constexpr uint8_t kNothing = 255;            // of memory without contents
struct Use { int place; uint8_t version; };  // that a reader must find, that a writer leaves
using Uses = std::vector<Use>;
// What follows from where a rank stands.
struct Moment {
  uint32_t reading = 0, writing = 0;  // places, as bits
  std::array<uint8_t, kRanks * kPlaces> expects{}, holds{};
  std::array<uint8_t, kSyncs * kGroups> said{};
};

class Program {
 public:
  Program(int rank, Without without) : rank_(rank), without_(std::move(without)) { now_.holds.fill(kNothing); }
  struct Action {
    std::string name;
    Ranks ranks{};  // have to say this so often first
    int channel = 0, count = 0;
  };
  std::vector<Action> actions;
  std::vector<Moment> moments;  // before each action

  void say(Sync sync, int group, const char* name) {
    if (without_.contains(sync)) return;
    add({name});
    ++now_.said[channel_of(sync, group)];
  }
  // Waits until all have said it as often as this rank.
  void hear(Sync sync, int group, const Ranks& ranks, const char* name) {
    const int channel = channel_of(sync, group);
    if (!without_.contains(sync)) add({name, ranks, channel, now_.said[channel]});
  }
  void meet(Sync sync, int group, const Ranks& ranks, const char* name) {
    say(sync, group, name);
    hear(sync, group, ranks, name);
  }
  void open(const Uses& reads, const Uses& writes, const char* name) {
    add({name});
    for (const Use& use : reads) now_.reading |= 1u << use.place, now_.expects[use.place] = use.version;
    for (const Use& use : writes) now_.writing |= 1u << use.place;
  }
  void close(const Uses& reads, const Uses& writes, const char* name) {
    add({name});
    for (const Use& use : reads) now_.reading &= ~(1u << use.place);
    for (const Use& use : writes) {
      EXPECT_EQ(use.place / kPlaces, rank_) << "a rank writes another's place: " << name;
      now_.writing &= ~(1u << use.place), now_.holds[use.place] = use.version;
    }
  }
  void access(const Uses& reads, const Uses& writes, const char* name) {
    open(reads, writes, name);
    close(reads, writes, name);
  }
  void add(Action action) {
    moments.push_back(now_);
    actions.push_back(std::move(action));
  }
 protected:
  const int rank_;
  const Without without_;
  Moment now_;
};

inline std::string violation_in(const std::vector<const Moment*>& ranks) {
  for (const Moment* mine : ranks) {
    for (const Moment* theirs : ranks)
      if (mine != theirs && (mine->writing & (theirs->reading | theirs->writing))) return "a place is written and used";
    for (uint32_t left = mine->reading; left != 0; left &= left - 1) {
      const int p = __builtin_ctz(left);
      if (ranks[p / kPlaces]->holds[p] != mine->expects[p]) return "a read of a version that is not due";
    }
  }
  return "";
}

struct Outcome { std::string violation; size_t states; };  // no violation: empty
// Depth first through all states that can be reached.
inline Outcome explore(std::vector<Program> ranks) {
  for (Program& rank : ranks) rank.add({"its end"});
  std::unordered_set<uint64_t> seen{0};
  std::vector<uint64_t> left{0};
  std::vector<const Moment*> now(ranks.size());
  while (!left.empty()) {
    const uint64_t state = left.back();
    left.pop_back();
    auto at = [&](size_t r) { return static_cast<size_t>(state >> 16 * r & 0xFFFF); };
    for (size_t r = 0; r < ranks.size(); ++r) now[r] = &ranks[r].moments[at(r)];
    bool ended = true, stuck = true;
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (at(r) + 1 == ranks[r].actions.size()) continue;
      ended = false;
      const Program::Action& next = ranks[r].actions[at(r)];
      auto has_said = [&](int peer) { return now[peer]->said[next.channel] >= next.count; };
      if (!std::ranges::all_of(next.ranks, has_said)) continue;
      stuck = false;
      const uint64_t after = state + (uint64_t{1} << 16 * r);
      if (seen.insert(after).second) left.push_back(after);
    }
    std::string violation = violation_in(now);
    if (violation.empty() && stuck && !ended) violation = "nobody can go on";
    if (violation.empty()) continue;
    for (size_t r = 0; r < ranks.size(); ++r)
      violation += "; rank " + std::to_string(r) + " before " + ranks[r].actions[at(r)].name;
    return {violation, seen.size()};
  }
  return {"", seen.size()};
}

}  // namespace dovetail::comm
