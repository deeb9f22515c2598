// One group on one rank: its storage and its state machine.
//
// Storage, one allocation per role for all segments, one behind the other:
//   runtime        zero3 shard, every plane of the format; none where plan::encodes_at_gather(). Where the ranks that
//                  gather share memory, one allocation of all of them holds the whole, this rank's shard in its place;
//                  what is encoded for each gather lies in slots of all of them instead, where groups are alike
//   main           zero1 shard; where the runtime format is the plain array of the main dtype there is no
//                  allocation and main weights are views of the runtime shard
//   gradient       zero2 shard, fp32; main_gradient: zero1 shard, the same memory where zero1 == zero2
//   accumulator    whole gradient, fp32, only with local accumulation over zero2 > 1
// Whole runtime parameters and gradients as kernels write them lie in slots of the pool while they are needed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/engine/context.h"
#include "dovetail/engine/gather_slots.h"
#include "dovetail/engine/unit_model.h"
#include "dovetail/layout/shard_chain.h"
#include "dovetail/numerics/reproducible_sum.h"
#include "dovetail/plan/format.h"
#include "dovetail/plan/schedule.h"
#include "dovetail/storage/views.h"

namespace dovetail::engine_detail {

enum class Residence : uint8_t { released, gathering, gathered };
enum class GradientState : uint8_t { closed, open, reducing };

// One parameter of the group on this rank.
struct GroupParameter {
  int64_t index = 0;         // in the plan
  at::Tensor leaf;           // the module's runtime parameter
  int64_t segment = 0;       // index into the group's segments
  Placement placement;
  ShardChain chain;
  int contributions = 0;     // to the open gradient
  bool contributed = false;  // in this optimizer step, on this rank
};

// A segment of a bucket with its places inside the group's allocations (bytes).
struct GroupSegment {
  const SegmentLayout* layout = nullptr;
  plan::Format format;
  Interval main;              // zero1 interval in element space
  std::vector<int64_t> runtime_offset;  // per plane, in the runtime allocation
  std::vector<int64_t> whole_offset;    // per plane, in a gather slot or the allocation of all ranks
  int64_t main_offset = 0, gradient_offset = 0, main_gradient_offset = 0;
  int64_t slot_offset = 0;         // in a gradient slot
  int64_t accumulator_offset = 0;
  std::unique_ptr<BindableStorage> storage;  // under the runtime parameters: plane 0, whole
};

class ShardGroup {
 public:
  // Lays the storage out. Parameters are added by adopt().
  ShardGroup(Context& context, int64_t index);

  const plan::SlotBytes& slot_bytes() const { return slot_bytes_; }
  const plan::GroupPlan& planned() const { return context_.plan.groups[index_]; }
  std::string title() const;  // for messages
  Residence residence() const { return residence_; }
  GradientState gradient_state() const { return gradient_state_; }
  bool empty() const { return elements_ == 0; }
  std::vector<GroupParameter>& parameters() { return parameters_; }
  bool trainable() const;  // any parameter requires a gradient
  int64_t trainable_elements() const;  // of parameters that require one, without padding

  // Copies this rank's part of the parameter's value into the main weights and makes its tensor a runtime parameter.
  void adopt(int64_t index, const UnitParameter& parameter);
  // Where each rank's zero3 shard is its own zero1 shard in another dtype, it exists from a gather that wants it until
  // all ranks have released that.
  bool encodes_into_place() const;
  // Its gathers lie in these wherever one is free. With encodes_into_place(), on all ranks alike.
  void use_slots(GatherSlots& slots) { slots_ = &slots; }
  // This rank's bytes of the whole, where it is gathered in place.
  std::vector<Interval> own_bytes() const;
  int64_t whole_bytes() const;
  void on_residence_change(std::function<void(bool gathered)> call) { residence_changed_ = std::move(call); }

  // Main weights -> runtime shard (own slice); no copy where they are the same memory.
  void encode();
  // Makes the runtime shard whole over the zero1/zero3 ranks. Null where one rank holds it.
  comm::WorkHandle start_refresh();

  void start_gather(bool backward);  // released -> gathering
  void finish_gather();              // gathering -> gathered
  void release();                    // gathered or gathering -> released
  // Gives an encoded shard's pages back until the next gather, once no rank reads it any more; false: some still may.
  bool drop_unread_shard();

  // The place of the parameter's next contribution, as ops::GradientSink has it; opens the gradient.
  at::Tensor contribution(GroupParameter& parameter, bool few_rows, bool& fresh);
  void open_gradient();
  // Zeroes what got no contribution, then adds the slot to the accumulator or starts the reduction. open -> reducing.
  // `sync` false: the gradient stays in the accumulator. open -> closed.
  void start_reduce(bool sync);
  void finish_reduce();  // reducing -> closed

  // Adds what gradient shards hold to the main gradients, summed over all ranks. Nothing where they hold nothing.
  void reduce_main();
  bool has_gradient() const { return gradient_valid_ || main_gradient_valid_; }
  // Adds this rank's summand of a parameter's gradient so far: the sum of those of all ranks is the gradient.
  void add_gradient_to(const GroupParameter& p, float* whole) const;
  // Adds the squares of the zero1 gradients of trainable parameters. What their last reduction has summed on its way is
  // taken from there unless `written`, which says that gradients were writable since.
  void add_squares(ReproducibleSum& sum, bool written) const;
  void drop_gradient();
  void abandon_gradient();  // one that is open and will not be reduced
  // Gradient shards that hold nothing of this step take no memory until they are written again.
  void discard_spent_gradient();

  // Memory of the parameter's zero1 part.
  std::byte* main_at(const GroupParameter& p) const;
  float* main_gradient_at(const GroupParameter& p) const;
  // What they lie in.
  const Memory& main_memory(const GroupParameter& p) const;
  const Memory& main_gradient_memory() const;
  // Elements of this rank's zero1 intervals, all segments: the element space of optimizer fields, and the place of a
  // parameter in it.
  int64_t main_elements() const { return main_elements_; }
  int64_t main_position(const GroupParameter& p) const;

  const std::vector<GroupSegment>& segments() const { return segments_; }
  void unbind_all();

 private:
  void lay_out();
  void encode_into(const GroupSegment& segment, std::byte* zero3_shard);  // this rank's zero1 part
  float* gradient_at(const GroupParameter& p) const;  // its part of the zero2 gradient shard
  // A complete gradient is the start of further sums, where both lie in the same memory: on the first replica only.
  bool sums_onto_complete() const;
  void drop_shard();
  // In memory that the ranks share: how many gathers of this group the member has released.
  std::atomic<uint64_t>& released_by(int member) const;
  std::byte* written_at(const GroupParameter& p) const;  // where the open gradient is written
  void zero_written(const GroupParameter& p);
  void zero_missing();
  // Of runs of a gradient shard that begins at element `shard` of the segment.
  std::function<void(int64_t, std::span<const float>)> square_runs(int64_t segment, int64_t shard);
  std::vector<bool> trainable_mask() const;
  void begin_squares();
  void accumulate_slot();

  Context& context_;
  int64_t index_;
  std::function<void(bool)> residence_changed_;
  const plan::SlotBytes slot_bytes_;
  int64_t elements_ = 0;
  int64_t main_elements_ = 0;
  std::vector<GroupSegment> segments_;
  std::vector<GroupParameter> parameters_;
  std::optional<ReproducibleSum> squares_;  // taken in the last reduction, of the parameters in `squared_`
  std::vector<bool> squared_;
  Buffer runtime_, main_, gradient_, main_gradient_, accumulator_;

  Residence residence_ = Residence::released;
  uint64_t gathers_ = 0;                // begun so far, the same on all ranks that gather together
  std::byte* released_ = nullptr;       // see released_by(); null where they share no memory
  GatherSlots* slots_ = nullptr;
  int slot_ = GatherSlots::kNone;       // of slots_, that this gather lies in
  SlotPool::Slot gather_slot_;
  comm::WorkHandle gather_work_;
  std::vector<const std::byte*> gathered_;
  std::vector<size_t> gathered_segment_;  // segment of each gathered plane 0

  GradientState gradient_state_ = GradientState::closed;
  SlotPool::Slot gradient_slot_, scratch_slot_;
  std::vector<comm::WorkHandle> reduce_work_;
  bool direct_ = false;             // the open gradient is written into the shard
  bool encoded_ = true;             // see encodes_into_place()
  bool sparse_ = false;             // few of its rows are written, the others were zeroed
  bool gradient_valid_ = false;     // the shard holds something of this step that the main gradient has not
  // The main gradient holds what reduce_main() has summed; never where shards are the main gradients of all ranks.
  bool main_gradient_valid_ = false;
  bool accumulator_valid_ = false;  // so does the accumulator
  bool gradient_spent_ = false;     // an earlier step's gradient still takes memory
};

}  // namespace dovetail::engine_detail
