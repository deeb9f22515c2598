#include "dovetail/comm/arguments.h"

#include <cstring>

#include "dovetail/base/error.h"

namespace dovetail::comm {
namespace {

class Finished final : public Work {
 public:
  void wait() override {}
};

}  // namespace

void check_slices(std::span<const Interval> slices, int size) {
  DT_CHECK_EQ(slices.size(), static_cast<size_t>(size), "one slice per member");
  int64_t end = 0;
  for (const Interval& slice : slices) {
    DT_CHECK(slice.begin >= end && slice.end >= slice.begin, "slice [{}, {}) after {}: slices ascend", slice.begin,
             slice.end, end);
    end = slice.end;
  }
}

void check_gather(const GatherPlane& plane, int size) {
  check_slices(plane.slices, size);
  DT_CHECK(size == 1 || plane.whole != nullptr || plane.slices.back().end == 0, "a gather needs memory for the whole");
}

void check_reduce(const ReduceScatter& request, int size, int64_t scratch_bytes, bool on_host) {
  check_slices(request.slices, size);
  DT_CHECK(request.dtype == DType::f32 || request.dtype == DType::bf16, "sums take fp32 or bf16, got {}",
           name_of(request.dtype));
  DT_CHECK_GE(static_cast<int64_t>(request.scratch.size()), scratch_bytes, "scratch of a reduce_scatter");
  if (request.finished && !on_host)
    raise<ConfigError>("reduce_scatter: sums can be shown in memory of the host, got a device's");
}

SumOutput sum_output(const ReduceScatter& r) { return {r.accumulate, r.scale, r.finished}; }

int check_split(const std::vector<std::vector<int>>& groups, int size, int member) {
  std::vector<int> seen(static_cast<size_t>(size), 0);
  int mine = -1, total = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int m : groups[g]) {
      if (m < 0 || m >= size) raise<ConfigError>("split names member {} of a group of {}", m, size);
      if (seen[m]++) raise<ConfigError>("split names member {} twice", m);
      if (m == member) mine = static_cast<int>(g);
      ++total;
    }
  }
  if (total != size) raise<ConfigError>("split names {} of {} members, wanted each once", total, size);
  return mine;
}

void reduce_alone(const ReduceScatter& r) {
  const int only = 0;
  const std::byte* input = r.input + r.slices[0].begin * size_of(r.dtype);
  SumTree({&only, 1}).sum({&input, 1}, r.dtype, {r.output, static_cast<size_t>(r.slices[0].size())},
                          sum_output(r));
}

std::vector<OwnMessage> own_messages(std::span<const Send> sends, std::span<const Receive> receives, int member) {
  std::vector<OwnMessage> messages;
  size_t next = 0;
  for (const Send& s : sends) {
    if (s.to != member) continue;
    while (next < receives.size() && receives[next].from != member) ++next;
    DT_CHECK_LT(next, receives.size(), "member {} sends itself more messages than it receives", member);
    const Receive& r = receives[next++];
    DT_CHECK_EQ(s.bytes.size(), r.bytes.size(), "bytes from member {} to itself", member);
    if (!s.bytes.empty()) messages.push_back({s.bytes, r.bytes});
  }
  for (; next < receives.size(); ++next) {
    DT_CHECK(receives[next].from != member, "member {} receives more messages from itself than it sends", member);
  }
  return messages;
}

void copy_own(std::span<const Send> sends, std::span<const Receive> receives, int member) {
  for (const OwnMessage& m : own_messages(sends, receives, member))
    std::memmove(m.to.data(), m.from.data(), m.from.size());
}

WorkHandle finished_work() { return std::make_unique<Finished>(); }

}  // namespace dovetail::comm
