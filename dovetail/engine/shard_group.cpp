#include "dovetail/engine/shard_group.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/comm/tree_sum.h"
#include "dovetail/numerics/bf16.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::engine_detail {
namespace {

constexpr int64_t kFloat = 4;

ShardChain chain_of(const Context& context, const SegmentLayout& layout, const Placement& placement) {
  const plan::GridPosition& p = context.position;
  return ShardChain(layout, placement, plan::zero3_shard(context.degrees(), p), plan::zero2_shard(context.degrees(), p),
                    plan::zero1_shard(context.degrees(), p));
}

std::vector<Interval> even_slices(int64_t count, int64_t each) {
  std::vector<Interval> slices;
  for (int64_t k = 0; k < count; ++k) slices.push_back({k * each, (k + 1) * each});
  return slices;
}

// Zero1 intervals that make up one coarser shard, as seen from its start.
std::vector<Interval> zero1_slices(const SegmentLayout& layout, int64_t first_shard, int64_t count, int64_t origin) {
  std::vector<Interval> slices;
  for (int64_t j = 0; j < count; ++j) slices.push_back(layout.zero1_interval(first_shard + j).shifted(-origin));
  return slices;
}

}  // namespace

ShardGroup::ShardGroup(Context& context, int64_t index) : context_(context), index_(index) { lay_out(); }

std::string ShardGroup::title() const {
  return planned().name.empty() ? "the root unit" : "unit " + planned().name;
}

void ShardGroup::lay_out() {
  const plan::Degrees& d = context_.degrees();
  const int64_t q = plan::zero1_shard(d, context_.position);
  const bool in_place = plan::shares_memory(context_.plan, plan::RankGroup::gather);
  int64_t runtime = 0, whole = 0, main = 0, gradient = 0, main_gradient = 0, slot = 0, accumulator = 0;
  for (const plan::BucketPlan& bucket : planned().buckets) {
    const plan::Format format = plan::format_named(bucket.format);
    for (const SegmentLayout& layout : bucket.segments) {
      GroupSegment s;
      s.layout = &layout;
      s.format = format;
      s.main = layout.zero1_interval(q);
      for (const plan::PlaneSpec& plane : format.planes) {
        const int64_t shard = plane.bytes_of(layout.shard3);
        s.runtime_offset.push_back(in_place ? whole + context_.position.i3 * shard : runtime);
        s.whole_offset.push_back(whole);
        if (!plan::encodes_at_gather(context_.plan, format)) runtime += shard;
        whole += plane.bytes_of(layout.size());
      }
      s.main_offset = main;
      s.gradient_offset = gradient;
      s.main_gradient_offset = main_gradient;
      s.slot_offset = slot;
      s.accumulator_offset = accumulator;
      if (!format.is_plain(context_.plan.options.main)) main += s.main.size() * size_of(context_.plan.options.main);
      gradient += layout.shard2 * kFloat;
      if (d.zero1 != d.zero2) main_gradient += s.main.size() * kFloat;
      slot += layout.size() * size_of(format.gradient);
      if (plan::accumulates_locally(context_.plan)) accumulator += layout.size() * kFloat;
      s.storage = std::make_unique<BindableStorage>(
          format.planes[0].bytes_of(layout.size()),
          fmt::format("Dovetail: the parameters of {} are not gathered; they can be read only inside its forward and "
                      "backward pass",
                      title()));
      elements_ += layout.size();
      main_elements_ += s.main.size();
      segments_.push_back(std::move(s));
    }
  }
  auto allocate = [&](int64_t bytes, Role role, bool peers_read = false) {
    return Buffer(peers_read ? context_.shared_allocator() : context_.allocator, context_.ledger, bytes, role);
  };
  if (in_place) {
    comm::Group& ranks = *context_.ranks.gather;
    DT_CHECK(!ranks.needs_gather_buffer(), "the plan's hosts of {} ranks are not the transport's",
             context_.plan.options.host_ranks);
    auto shards = ranks.allocate_together(whole, context_.identity(comm::Phase::control, index_));
    std::byte* data = shards.get();
    runtime_ = Buffer(Memory{std::move(shards), data, whole}, context_.ledger, runtime, Role::runtime);
  } else {
    runtime_ = allocate(runtime, Role::runtime, true);
  }
  main_ = allocate(main, Role::main);
  // Only reductions beyond zero2 read gradient shards; private memory has larger pages.
  const bool replicas = context_.ranks.replica->size() > 1;
  gradient_ = allocate(gradient, Role::gradient, d.zero1 != d.zero2 || replicas);
  main_gradient_ = allocate(main_gradient, Role::main_gradient, replicas);
  accumulator_ = allocate(accumulator, Role::accumulator, true);
}

bool ShardGroup::trainable() const {
  for (const GroupParameter& p : parameters_)
    if (p.leaf.requires_grad()) return true;
  return false;
}

void ShardGroup::adopt(int64_t index, at::Tensor leaf) {
  for (size_t i = 0; i < segments_.size(); ++i) {
    GroupSegment& s = segments_[i];
    for (const Placement& placement : s.layout->placements) {
      if (placement.tensor != index) continue;
      GroupParameter p{.index = index, .leaf = leaf, .segment = static_cast<int64_t>(i), .placement = placement,
                       .chain = chain_of(context_, *s.layout, placement)};
      const plan::PlaneSpec& plane = s.format.planes[0];
      const DType runtime = s.format.gradient;
      const auto shape = leaf.sizes().vec();
      const Interval own = p.chain.held(Level::zero1);
      {
        at::NoGradGuard no_grad;
        if (!own.empty()) {
          at::Tensor part = leaf.detach().contiguous().view({-1}).slice(0, own.begin, own.end);
          tensor_at(main_at(p), {own.size()}, context_.plan.options.main).copy_(part);
          context_.ledger.copied(CopyReason::initial, own.size() * size_of(context_.plan.options.main));
        }
        leaf.mutable_grad().reset();
        leaf.set_data(s.storage->view(plane.bytes_of(placement.offset), shape, runtime));
      }
      parameters_.push_back(std::move(p));
      return;
    }
  }
  DT_CHECK(false, "parameter {} has no place in group {}", context_.plan.tensors[index].name, title());
}

void ShardGroup::encode_into(const GroupSegment& s, std::byte* zero3_shard) {
  if (s.main.empty()) return;
  DT_CHECK(s.format.name == "bf16" && context_.plan.options.main == DType::f32, "format {}", s.format.name);
  auto* target = reinterpret_cast<uint16_t*>(zero3_shard) + s.main.begin % s.layout->shard3;
  const auto* source = reinterpret_cast<const float*>(main_.data() + s.main_offset);
  encode_bf16({source, static_cast<size_t>(s.main.size())}, {target, static_cast<size_t>(s.main.size())});
  context_.ledger.copied(CopyReason::encode, s.main.size() * 2);
}

// Where each rank's zero3 shard is its own zero1 shard in another dtype, it exists from the first gather that wants it to
// the last that does in a step.
bool ShardGroup::encodes_into_place() const {
  const plan::Degrees& d = context_.degrees();
  return plan::shares_memory(context_.plan, plan::RankGroup::gather) && d.zero1 == d.zero3 && !empty() &&
         !segments_[0].format.is_plain(context_.plan.options.main);
}

void ShardGroup::encode() {
  if (encodes_into_place()) {
    encoded_ = false;
    return;
  }
  for (const GroupSegment& s : segments_) {
    if (s.format.is_plain(context_.plan.options.main)) continue;
    if (!plan::encodes_at_gather(context_.plan, s.format)) encode_into(s, runtime_.data() + s.runtime_offset[0]);
  }
}

comm::WorkHandle ShardGroup::start_refresh() {
  comm::Group& ranks = *context_.ranks.refresh;
  if (ranks.size() == 1 || empty()) return nullptr;
  const int64_t k = plan::zero3_shard(context_.degrees(), context_.position);
  std::vector<comm::GatherPlane> planes;
  for (const GroupSegment& s : segments_) {
    const Interval shard = s.layout->zero3_interval(k);
    const auto elements = zero1_slices(*s.layout, k * ranks.size(), ranks.size(), shard.begin);
    for (size_t i = 0; i < s.format.planes.size(); ++i) {
      comm::GatherPlane plane;
      for (Interval e : elements)
        plane.slices.push_back({s.format.planes[i].bytes_of(e.begin), s.format.planes[i].bytes_of(e.end)});
      plane.whole = runtime_.data() + s.runtime_offset[i];
      plane.shard = plane.whole + plane.slices[ranks.rank()].begin;
      planes.push_back(std::move(plane));
    }
  }
  return ranks.all_gather(planes, context_.identity(comm::Phase::refresh, index_)).work;
}

void ShardGroup::start_gather(bool backward) {
  DT_CHECK(residence_ == Residence::released, "{} is gathered already", title());
  residence_ = Residence::gathering;
  if (encodes_into_place() && !std::exchange(encoded_, true))
    for (const GroupSegment& s : segments_) encode_into(s, runtime_.data() + s.runtime_offset[0]);
  gathered_.clear();
  gathered_segment_.clear();
  comm::Group& ranks = *context_.ranks.gather;
  const plan::PlaneUse use = plan::gathered_planes(context_.plan, index_, backward);
  if (const int64_t bytes = plan::slot_bytes(context_.plan, index_).gather; bytes > 0)
    gather_slot_ = context_.pool->acquire(bytes);
  std::vector<comm::GatherPlane> planes;
  std::vector<size_t> first_planes;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const GroupSegment& s = segments_[i];
    for (size_t j = 0; j < s.format.planes.size(); ++j) {
      const plan::PlaneSpec& spec = s.format.planes[j];
      if (!((use.forward && spec.use.forward) || (use.backward && spec.use.backward))) continue;
      comm::GatherPlane plane;
      plane.shard = runtime_.data() + s.runtime_offset[j];
      plane.whole = gather_slot_ ? gather_slot_.data() + s.whole_offset[j] : nullptr;
      plane.slices = even_slices(ranks.size(), spec.bytes_of(s.layout->shard3));
      if (plan::encodes_at_gather(context_.plan, s.format) && !empty()) {
        DT_CHECK(plane.whole != nullptr && s.format.planes.size() == 1, "nowhere to encode {}", title());
        std::byte* own = plane.whole + plane.slices[ranks.rank()].begin;
        encode_into(s, own);
        plane.shard = own;
      }
      if (j == 0) {
        first_planes.push_back(planes.size());
        gathered_segment_.push_back(i);
      }
      planes.push_back(std::move(plane));
    }
  }
  if (planes.empty()) return;
  const auto phase = backward ? comm::Phase::gather_backward : comm::Phase::gather_forward;
  comm::Gathered result = ranks.all_gather(planes, context_.identity(phase, index_));
  gather_work_ = std::move(result.work);
  for (size_t at : first_planes) gathered_.push_back(result.whole[at]);
}

void ShardGroup::finish_gather() {
  if (residence_ == Residence::gathered) return;
  DT_CHECK(residence_ == Residence::gathering, "{} was not being gathered", title());
  if (gather_work_) std::exchange(gather_work_, nullptr)->wait();
  for (size_t i = 0; i < gathered_.size(); ++i) segments_[gathered_segment_[i]].storage->bind(gathered_[i]);
  residence_ = Residence::gathered;
}

void ShardGroup::release() {
  if (residence_ == Residence::released) return;
  if (gather_work_) std::exchange(gather_work_, nullptr)->wait();
  unbind_all();
  gather_slot_.reset();
  residence_ = Residence::released;
}

void ShardGroup::unbind_all() {
  for (GroupSegment& s : segments_) s.storage->unbind();
}

void ShardGroup::open_gradient() {
  DT_CHECK(gradient_state_ == GradientState::closed, "the gradient of {} is open already", title());
  // Kernels write the shard itself where it is the whole gradient in their format and holds nothing of this step yet.
  direct_ = context_.degrees().zero2 == 1 && !gradient_valid_ &&
            std::all_of(segments_.begin(), segments_.end(),
                        [](const GroupSegment& s) { return s.format.gradient == DType::f32; });
  if (!direct_) gradient_slot_ = context_.pool->acquire(plan::slot_bytes(context_.plan, index_).gradient);
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
             accumulator_valid_);
  }
  accumulator_valid_ = true;
  gradient_slot_.reset();
}

void ShardGroup::start_reduce(bool sync) {
  if (gradient_state_ == GradientState::closed) open_gradient();
  DT_CHECK(gradient_state_ == GradientState::open, "the gradient of {} is being reduced already", title());
  zero_missing();
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
  wanted = std::max(wanted, plan::slot_bytes(context_.plan, index_).scratch);
  if (wanted > 0) scratch_slot_ = context_.pool->acquire(wanted);
  for (const GroupSegment& s : segments_) {
    comm::ReduceScatter request;
    request.dtype = local ? DType::f32 : s.format.gradient;
    request.input = local ? accumulator_.data() + s.accumulator_offset : gradient_slot_.data() + s.slot_offset;
    request.slices = even_slices(ranks.size(), s.layout->shard2);
    request.output = reinterpret_cast<float*>(gradient_.data() + s.gradient_offset);
    request.accumulate = gradient_valid_;
    request.sparse = sparse_ && !local;
    request.output_is_zero = !gradient_valid_ && !gradient_spent_;
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
  accumulator_valid_ = false;
  gradient_state_ = GradientState::closed;
  // All ranks have come to this reduction, so none reads this rank's runtime shard any more; the next gather encodes it.
  if (encodes_into_place() && residence_ == Residence::released && std::exchange(encoded_, false))
    for (const GroupSegment& s : segments_)
      context_.peer_allocator->zero(runtime_.data() + s.runtime_offset[0], s.format.bytes_of(s.layout->shard3));
}

void ShardGroup::reduce_main() {
  if (!gradient_valid_ || empty()) return;
  const plan::Degrees& d = context_.degrees();
  comm::Group& parts = *context_.ranks.reduce_main;
  comm::Group& replicas = *context_.ranks.replica;
  const int64_t zero2 = plan::zero2_shard(d, context_.position);
  for (const GroupSegment& s : segments_) {
    auto* shard = reinterpret_cast<float*>(gradient_.data() + s.gradient_offset);
    float* main = shard;
    if (parts.size() > 1) {
      main = reinterpret_cast<float*>(main_gradient_.data() + s.main_gradient_offset);
      comm::ReduceScatter request;
      request.input = reinterpret_cast<const std::byte*>(shard);
      request.slices =
          zero1_slices(*s.layout, zero2 * parts.size(), parts.size(), s.layout->zero2_interval(zero2).begin);
      request.output = main;
      const int64_t bytes = parts.reduce_scratch_bytes(DType::f32, request.slices);
      SlotPool::Slot scratch;
      if (bytes > 0) scratch = context_.pool->acquire(bytes);
      request.scratch = {scratch.data(), static_cast<size_t>(bytes)};
      parts.reduce_scatter(request, context_.identity(comm::Phase::reduce_main, index_))->wait();
    }
    if (replicas.size() > 1) {
      const int64_t bytes = replicas.all_reduce_scratch_bytes(s.main.size());
      SlotPool::Slot scratch = context_.pool->acquire(bytes);
      replicas
          .all_reduce({main, static_cast<size_t>(s.main.size())}, {scratch.data(), static_cast<size_t>(bytes)},
                      context_.identity(comm::Phase::reduce_main, index_))
          ->wait();
    }
  }
}

void ShardGroup::drop_gradient() {
  if (gradient_state_ == GradientState::reducing) finish_reduce();
  gradient_slot_.reset();
  gradient_state_ = GradientState::closed;
  gradient_spent_ |= gradient_valid_ || accumulator_valid_;
  gradient_valid_ = accumulator_valid_ = false;
  for (GroupParameter& p : parameters_) {
    p.contributions = 0;
    p.contributed = false;
  }
}

void ShardGroup::discard_spent_gradient() {
  if (!gradient_spent_ || gradient_valid_ || accumulator_valid_) return;
  gradient_.zero();
  main_gradient_.zero();
  accumulator_.zero();
  gradient_spent_ = false;
}

std::byte* ShardGroup::main_at(const GroupParameter& p) const {
  const GroupSegment& s = segments_[p.segment];
  const int64_t within = p.chain.buffer_offset(Level::zero1);
  if (!s.format.is_plain(context_.plan.options.main))
    return main_.data() + s.main_offset + within * size_of(context_.plan.options.main);
  const int64_t first = s.main.begin % s.layout->shard3;
  return runtime_.data() + s.runtime_offset[0] + s.format.planes[0].bytes_of(first + within);
}

float* ShardGroup::main_gradient_at(const GroupParameter& p) const {
  const GroupSegment& s = segments_[p.segment];
  const bool shared = context_.degrees().zero1 == context_.degrees().zero2;
  std::byte* base = shared ? gradient_.data() + s.gradient_offset : main_gradient_.data() + s.main_gradient_offset;
  return reinterpret_cast<float*>(base) + p.chain.buffer_offset(Level::zero1);
}

float* ShardGroup::gradient_at(const GroupParameter& p) const {
  const GroupSegment& s = segments_[p.segment];
  return reinterpret_cast<float*>(gradient_.data() + s.gradient_offset) + p.chain.buffer_offset(Level::zero2);
}

int64_t ShardGroup::main_position(const GroupParameter& p) const {
  int64_t position = p.chain.buffer_offset(Level::zero1);
  for (int64_t i = 0; i < p.segment; ++i) position += segments_[i].main.size();
  return position;
}

}  // namespace dovetail::engine_detail
