// A group's gradients: where kernels write them, their reduction, what is left of them between steps.
#include <algorithm>
#include <functional>

#include "dovetail/base/error.h"
#include "dovetail/comm/tree_sum.h"
#include "dovetail/engine/shard_group.h"
#include "dovetail/engine/slices.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::engine_detail {

void ShardGroup::open_gradient() {
  DT_CHECK(gradient_state_ == GradientState::closed, "the gradient of {} is open already", title());
  // Kernels write the shard itself where it is the whole gradient in their format and holds nothing of this step yet.
  const bool plain = std::all_of(segments_.begin(), segments_.end(),
                                 [](const GroupSegment& s) { return s.format.gradient == DType::f32; });
  direct_ = plain && context_.degrees().zero2 == 1 && !gradient_valid_ && !sums_onto_complete() &&
            context_.gradient_factor == 1;
  if (!direct_) gradient_slot_ = context_.pool->acquire(slot_bytes_.gradient);
  for (GroupParameter& p : parameters_) p.contributions = 0;
  sparse_ = false;
  gradient_state_ = GradientState::open;
}

std::byte* ShardGroup::written_at(const GroupParameter& p) const {
  const GroupSegment& s = segments_[p.segment];
  std::byte* base = direct_ ? gradient_.data() + s.gradient_offset : gradient_slot_.data() + s.slot_offset;
  return base + p.placement.offset * size_of(s.format.gradient);
}

at::Tensor ShardGroup::contribution(GroupParameter& p, bool few_rows, bool& fresh) {
  if (gradient_state_ == GradientState::reducing) finish_reduce();
  if (gradient_state_ == GradientState::closed) open_gradient();
  fresh = p.contributions++ == 0;
  p.contributed = true;
  if (fresh && few_rows) {
    zero_written(p);
    fresh = false;
    sparse_ = true;
  }
  return tensor_at(written_at(p), p.leaf.sizes(), segments_[p.segment].format.gradient);
}

void ShardGroup::zero_written(const GroupParameter& p) {
  const int64_t bytes = p.placement.numel * size_of(segments_[p.segment].format.gradient);
  if (direct_)
    gradient_.zero(written_at(p), bytes);
  else
    gradient_slot_.zero(written_at(p), bytes);
}

void ShardGroup::zero_missing() {
  for (const GroupParameter& p : parameters_)
    if (p.contributions == 0) zero_written(p);
}

void ShardGroup::accumulate_slot() {
  const int self = 0;
  const comm::SumTree tree(std::span<const int>(&self, 1));
  for (const GroupSegment& s : segments_) {
    const std::byte* input = gradient_slot_.data() + s.slot_offset;
    auto* output = reinterpret_cast<float*>(accumulator_.data() + s.accumulator_offset);
    tree.sum(std::span(&input, 1), s.format.gradient, {output, static_cast<size_t>(s.layout->size())},
             {.accumulate = accumulator_valid_});
  }
  accumulator_valid_ = true;
  gradient_slot_.reset();
}

std::vector<bool> ShardGroup::trainable_mask() const {
  std::vector<bool> mask;
  for (const GroupParameter& p : parameters_) mask.push_back(p.leaf.requires_grad());
  return mask;
}

void ShardGroup::begin_squares() {
  squares_.emplace();
  squared_ = trainable_mask();
}

// Not of padding, which holds anything.
std::function<void(int64_t, std::span<const float>)> ShardGroup::square_runs(int64_t segment, int64_t shard) {
  return [this, segment, shard](int64_t begin, std::span<const float> run) {
    const int64_t at = shard + begin;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!squared_[i] || parameters_[i].segment != segment) continue;
      const Interval part =
          intersect(parameters_[i].placement.interval(), {at, at + static_cast<int64_t>(run.size())});
      if (!part.empty()) squares_->add(run.subspan(part.begin - at, part.size()));
    }
  };
}

void ShardGroup::add_squares(ReproducibleSum& sum, bool written) const {
  if (squares_ && !written && squared_ == trainable_mask()) return sum.merge(*squares_);
  for (const GroupParameter& p : parameters_)
    if (p.leaf.requires_grad())
      sum.add({main_gradient_at(p), static_cast<size_t>(p.chain.held(Level::zero1).size())});
}

void ShardGroup::start_reduce(bool sync) {
  if (gradient_state_ == GradientState::closed) open_gradient();
  DT_CHECK(gradient_state_ == GradientState::open, "the gradient of {} is being reduced already", title());
  zero_missing();
  squares_.reset();
  if (direct_) {
    gradient_state_ = GradientState::reducing;
    return;
  }
  const bool local = plan::accumulates_locally(context_.plan);
  if (local) accumulate_slot();
  if (local && !sync) {
    gradient_state_ = GradientState::closed;
    return;
  }
  comm::Group& ranks = *context_.ranks.reduce;
  // The plan foresees what our own collectives need; a backend's may want more.
  int64_t wanted = 0, scratch = 0;
  for (const GroupSegment& s : segments_)
    wanted += ranks.reduce_scratch_bytes(local ? DType::f32 : s.format.gradient,
                                         even_slices(ranks.size(), s.layout->shard2));
  wanted = std::max(wanted, slot_bytes_.scratch);
  if (wanted > 0) scratch_slot_ = context_.scratch_pool->acquire(wanted);
  // What is final is measured on the way. More micro-batches may come, so only the first of them are.
  const plan::Degrees& d = context_.degrees();
  if (!has_gradient() && d.zero1 == d.zero2 && context_.ranks.replica->size() == 1) begin_squares();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const GroupSegment& s = segments_[i];
    comm::ReduceScatter request;
    request.dtype = local ? DType::f32 : s.format.gradient;
    request.input = local ? accumulator_.data() + s.accumulator_offset : gradient_slot_.data() + s.slot_offset;
    request.slices = even_slices(ranks.size(), s.layout->shard2);
    request.output = reinterpret_cast<float*>(gradient_.data() + s.gradient_offset);
    request.accumulate = gradient_valid_ || sums_onto_complete();
    request.scale = context_.gradient_factor;
    if (squares_) request.finished = square_runs(static_cast<int64_t>(i), s.layout->shard2 * ranks.rank());
    request.sparse = sparse_ && !local;
    request.output_is_zero = !has_gradient() && !gradient_spent_;
    const int64_t bytes = ranks.reduce_scratch_bytes(request.dtype, request.slices);
    DT_CHECK_LE(scratch + bytes, scratch_slot_.bytes());
    request.scratch = {scratch_slot_.data() + scratch, static_cast<size_t>(bytes)};
    scratch += bytes;
    reduce_work_.push_back(ranks.reduce_scatter(request, context_.identity(comm::Phase::reduce, index_)));
  }
  gradient_state_ = GradientState::reducing;
}

void ShardGroup::finish_reduce() {
  DT_CHECK(gradient_state_ == GradientState::reducing, "the gradient of {} is not being reduced", title());
  for (comm::WorkHandle& work : reduce_work_) work->wait();
  reduce_work_.clear();
  gradient_slot_.reset();
  scratch_slot_.reset();
  gradient_valid_ = true;
  if (context_.degrees().zero1 == context_.degrees().zero2) main_gradient_valid_ = false;
  accumulator_valid_ = false;
  gradient_state_ = GradientState::closed;
  // All ranks have come to this reduction, so none reads this rank's shard any more; the next gather encodes it.
  if (encodes_into_place() && residence_ == Residence::released && encoded_) drop_shard();
}

bool ShardGroup::sums_onto_complete() const {
  const plan::Degrees& d = context_.degrees();
  return main_gradient_valid_ && d.zero1 == d.zero2 && context_.position.replica == 0;
}

void ShardGroup::add_gradient_to(const GroupParameter& p, float* whole) const {
  const auto add = [&](const float* part, Interval elements) {
    std::transform(part, part + elements.size(), whole + elements.begin, whole + elements.begin, std::plus<>());
  };
  if (gradient_valid_) add(gradient_at(p), p.chain.held(Level::zero2));
  if (main_gradient_valid_ && context_.position.replica == 0) add(main_gradient_at(p), p.chain.held(Level::zero1));
}

void ShardGroup::reduce_main() {
  if (!gradient_valid_ || empty()) return;
  const plan::Degrees& d = context_.degrees();
  comm::Group& parts = *context_.ranks.reduce_main;
  comm::Group& replicas = *context_.ranks.replica;
  const int64_t zero2 = plan::zero2_shard(d, context_.position);
  if (parts.size() > 1 && replicas.size() == 1 && !main_gradient_valid_) begin_squares();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const GroupSegment& s = segments_[i];
    auto* shard = reinterpret_cast<float*>(gradient_.data() + s.gradient_offset);
    float* main = shard;
    if (parts.size() > 1) {
      main = reinterpret_cast<float*>(main_gradient_.data() + s.main_gradient_offset);
      comm::ReduceScatter request;
      request.input = reinterpret_cast<const std::byte*>(shard);
      request.slices =
          zero1_slices(*s.layout, zero2 * parts.size(), parts.size(), s.layout->zero2_interval(zero2).begin);
      request.output = main;
      request.accumulate = main_gradient_valid_ && (replicas.size() == 1 || context_.position.replica == 0);
      const int64_t first = s.layout->zero2_interval(zero2).begin + request.slices[parts.rank()].begin;
      if (squares_) request.finished = square_runs(static_cast<int64_t>(i), first);
      const int64_t bytes = parts.reduce_scratch_bytes(DType::f32, request.slices);
      SlotPool::Slot scratch;
      if (bytes > 0) scratch = context_.scratch_pool->acquire(bytes);
      request.scratch = {scratch.data(), static_cast<size_t>(bytes)};
      parts.reduce_scatter(request, context_.identity(comm::Phase::reduce_main, index_))->wait();
    }
    if (replicas.size() > 1) {
      const int64_t bytes = replicas.all_reduce_scratch_bytes(s.main.size());
      SlotPool::Slot scratch = context_.scratch_pool->acquire(bytes);
      replicas
          .all_reduce({main, static_cast<size_t>(s.main.size())}, {scratch.data(), static_cast<size_t>(bytes)},
                      context_.identity(comm::Phase::reduce_main, index_))
          ->wait();
    }
  }
  if (parts.size() == 1 && replicas.size() == 1) return;
  main_gradient_valid_ = true;
  gradient_valid_ = false;
  gradient_spent_ = true;
}

void ShardGroup::abandon_gradient() {
  if (gradient_state_ == GradientState::reducing) finish_reduce();
  gradient_spent_ |= gradient_state_ == GradientState::open && direct_;
  gradient_slot_.reset();
  gradient_state_ = GradientState::closed;
  squares_.reset();
  for (GroupParameter& p : parameters_) p.contributions = 0;
}

void ShardGroup::drop_gradient() {
  abandon_gradient();
  gradient_spent_ |= has_gradient() || accumulator_valid_;
  gradient_valid_ = main_gradient_valid_ = accumulator_valid_ = false;
  for (GroupParameter& p : parameters_) p.contributed = false;
}

void ShardGroup::discard_spent_gradient() {
  if (!gradient_spent_ || has_gradient() || accumulator_valid_) return;
  gradient_.zero();
  main_gradient_.zero();
  accumulator_.zero();
  gradient_spent_ = false;
}

}  // namespace dovetail::engine_detail
