// Checks of what callers pass to a Group, shared by its implementations. A broken one is a bug of the caller in
// Dovetail.
#pragma once

#include <span>
#include <vector>

#include "dovetail/comm/group.h"
#include "dovetail/comm/tree_sum.h"

namespace dovetail::comm {

// One slice per member, ascending and disjoint.
void check_slices(std::span<const Interval> slices, int size);
void check_gather(const GatherPlane& plane, int size);
// on_host: whether the memory named is the host's. Throws ConfigError where sums cannot be shown.
void check_reduce(const ReduceScatter& request, int size, int64_t scratch_bytes, bool on_host = true);
// What becomes of the request's sum.
SumOutput sum_output(const ReduceScatter& request);
// Lists that name each of `size` members once; throws ConfigError. Returns the index of the list that holds `member`.
int check_split(const std::vector<std::vector<int>>& groups, int size, int member);

// A reduce-scatter of one member: widen and assign or add.
void reduce_alone(const ReduceScatter& request);

// Messages of a member to itself, matched in order: each send with its receive, of equal sizes.
struct OwnMessage { std::span<const std::byte> from; std::span<std::byte> to; };
std::vector<OwnMessage> own_messages(std::span<const Send> sends, std::span<const Receive> receives, int member);
// Copies them, in host memory.
void copy_own(std::span<const Send> sends, std::span<const Receive> receives, int member);

// A handle of something that is over.
WorkHandle finished_work();

}  // namespace dovetail::comm
