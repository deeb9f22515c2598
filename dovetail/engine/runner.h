// Drives the groups of one rank through forward and backward passes: what is gathered, released and reduced when
// (plan/schedule.h states the rules).
//
// Order. Collectives are issued in the same order on every rank. Gathers follow the order in which
// units run. Reductions follow one fixed order, the reverse of the forward order with the root
// last, whatever order gradients arrive in: a group that is ready early waits its turn, and what no
// gradient reached by the end of backward is reduced then, as zeros. The forward order is the
// plan's until the first step, and what all ranks have seen from then on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dovetail/engine/context.h"
#include "dovetail/engine/shard_group.h"

namespace dovetail::engine_detail {

class Runner : public std::enable_shared_from_this<Runner> {
 public:
  explicit Runner(Context& context);

  std::vector<std::unique_ptr<ShardGroup>>& groups() { return groups_; }
  // ModelUnit::behind_units. Before the first pass.
  void reduce_when_written(int64_t group);

  // Called by the units' hooks.
  void before_forward(int64_t group, std::span<at::Tensor* const> inputs);
  void after_forward(int64_t group, std::span<at::Tensor* const> outputs);
  void forward_failed() noexcept;
  void before_backward(int64_t group);
  void after_backward(int64_t group);
  // A gradient of the parameter is about to be written by a kernel; empty handle where it cannot be written directly.
  at::Tensor direct_contribution(int64_t group, size_t parameter, bool few_rows, bool& fresh);
  // autograd has accumulated `given` into the leaf's .grad: move that to the gradient buffer.
  void take_gradient(int64_t group, size_t parameter, const at::Tensor& given);

  bool in_backward();
  int64_t broken_backwards() const { return broken_backwards_; }
  void set_sync(bool sync);
  // The main weights were or may have been written: the next root forward starts from them.
  void mark_stale() { stale_ = true; }
  void expose() { exposed_ = true; }
  bool exposed() const { return exposed_; }

  // Reduces what `fill` writes as this rank's gradients, as a backward pass would.
  void inject(const std::function<void(ShardGroup&)>& fill);
  void drop_gradients();
  void complete_gradients();  // main gradients from gradient shards

  void gather(int64_t group);
  void release(int64_t group);
  void gather_all();
  void release_all();

  // Throws StateError where a call is out of order: inside of a backward pass, or after a pass that failed. Leaves a
  // backward pass that threw: collective, where all ranks' did.
  void check_idle(const char* call);
  // Group numbers in the order in which units ran in this step's first forward; for adoption once all ranks agree.
  std::vector<int64_t> observed_order() const;
  // Of `order` and of the messages of all ranks, which hold their own from byte `at` on: adopted where all are equal.
  void adopt_order(const std::vector<int64_t>& order, const std::vector<std::vector<std::byte>>& all, size_t at);

 private:
  bool root_is(int64_t group) const { return group == std::ssize(groups_) - 1; }
  void make_gather_slots();
  void leave_broken_backward();
  void refresh();
  void end_pass();
  void gather_groups();
  void register_accumulators();
  void cast_inputs(std::span<at::Tensor* const> inputs) const;
  void start_gather(int64_t group, bool backward);
  void gather_ahead(int64_t group, bool backward);
  bool gathers_after(int64_t group) const;
  void count_written(int64_t group, int64_t elements);
  void leaf_is_done(int64_t group, size_t parameter);
  void is_ready(int64_t group);
  void join_skipped_gathers(int64_t group);
  void begin_backward();
  void end_backward();
  bool takes_part(int64_t group) const;
  std::vector<int64_t> reduce_order() const;
  void advance_reductions(bool last);
  bool has_its_turn(int64_t group) const;
  void launch_reduction(int64_t group);
  void finish_reductions(size_t left);
  size_t most_in_flight() const;
  void trim_pools();
  void trim_gather_slots();
  void trim_gradients();
  void restore_pools();
  void trace_backward(int64_t group);  // from here on; -1: none
  void audit() const;

  struct GroupRun {
    int64_t forward_uses = 0;    // forwards of this unit whose backward has not come yet
    bool used = false;           // in a forward since the last optimizer step
    bool ready = false;          // may be reduced in this backward
    bool reduced = false;        // was, in this backward
    bool gathered_backward = false;  // was gathered for this backward
    bool contributed = false;    // a gradient arrived in this backward
    bool when_written = false;   // ready once all leaves are done
    std::vector<bool> leaves_done;  // in this backward, by parameter; or none yet
    bool done_again = false;     // in some backward a leaf was, more than once: no sign that all is written
    int64_t unwritten = 0;       // elements until half of its gradient is there, while gathers wait for that
    std::vector<c10::intrusive_ptr<torch::autograd::Node>> accumulators;  // per parameter; null while frozen
  };

  Context& context_;
  const bool in_place_;                // gathers are views of memory that ranks share
  const bool peers_read_main_;         // and main weights are in it
  std::vector<std::unique_ptr<GatherSlots>> gather_slots_;  // of groups that are alike
  std::vector<std::unique_ptr<ShardGroup>> groups_;
  std::vector<GroupRun> runs_;
  std::vector<int64_t> order_;         // of all groups but the root
  std::vector<int64_t> observed_;
  std::vector<int64_t> arrived_;       // groups in the order in which they became ready in the last backward
  int64_t depth_ = 0;                  // nesting of unit forwards
  bool stale_ = true, exposed_ = false;
  bool sync_ = true;
  bool in_backward_ = false;
  std::weak_ptr<void> callback_;       // of autograd at the end of this backward; gone without a call where it threw
  int64_t broken_backwards_ = 0;       // left so far
  bool graph_wanted_ = false;          // this backward builds a graph: units stay gathered after it
  bool after_graph_ = false;           // the last one did: gradients may now arrive in any order
  bool all_gathered_ = false;          // gather_all()
  bool failed_ = false;
  int64_t traced_backward_ = -1;       // the unit whose backward span is open
  std::vector<int64_t> queue_;         // reduce order of this backward
  size_t next_ = 0;                    // in queue_
  std::deque<int64_t> in_flight_;
  std::vector<int64_t> unread_;        // released in this forward pass; other ranks may still read them
};

}  // namespace dovetail::engine_detail
