#include "dovetail/engine/shard_group.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/engine/slices.h"
#include "dovetail/numerics/bf16.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::engine_detail {
namespace {

constexpr int64_t kFloat = 4;
constexpr int64_t kCacheLine = 64;

ShardChain chain_of(const Context& context, const SegmentLayout& layout, const Placement& placement) {
  const plan::GridPosition& p = context.position;
  return ShardChain(layout, placement, plan::zero3_shard(context.degrees(), p), plan::zero2_shard(context.degrees(), p),
                    plan::zero1_shard(context.degrees(), p));
}

}  // namespace

ShardGroup::ShardGroup(Context& context, int64_t index)
    : context_(context), index_(index), slot_bytes_(plan::slot_bytes(context.plan, index)) {
  lay_out();
}

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
  HostAllocator& own = planned().backward_needs_parameters ? context_.allocator : context_.sparse_allocator;
  auto allocate = [&](int64_t bytes, Role role, bool peers_read = false) {
    const bool shared = peers_read && context_.peer_allocator;
    return Buffer(shared ? context_.shared_allocator() : own, context_.ledger, bytes, role);
  };
  if (in_place) {
    comm::Group& ranks = *context_.ranks.gather;
    DT_CHECK(!ranks.needs_gather_buffer(), "the plan's hosts of {} ranks are not the transport's",
             context_.plan.options.host_ranks);
    // Behind the shards, a count for each rank.
    const int64_t counts = round_up(whole, kCacheLine), count_bytes = whole > 0 ? kCacheLine * ranks.size() : 0;
    auto shards = ranks.allocate_together(counts + count_bytes, context_.identity(comm::Phase::control, index_));
    std::byte* data = shards.get();
    released_ = data ? data + counts : nullptr;
    runtime_ = Buffer(Memory{std::move(shards), data, whole}, context_.shared_allocator(), context_.ledger, runtime,
                      Role::runtime);
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

int64_t ShardGroup::trainable_elements() const {
  int64_t n = 0;
  for (const GroupParameter& p : parameters_)
    if (p.leaf.requires_grad()) n += p.placement.numel;
  return n;
}

void ShardGroup::adopt(int64_t index, const UnitParameter& parameter) {
  at::Tensor leaf = parameter.tensor;
  for (size_t i = 0; i < segments_.size(); ++i) {
    GroupSegment& s = segments_[i];
    for (const Placement& placement : s.layout->placements) {
      if (placement.tensor != index) continue;
      GroupParameter p{.index = index, .leaf = leaf, .segment = static_cast<int64_t>(i), .placement = placement,
                       .chain = chain_of(context_, *s.layout, placement)};
      const plan::PlaneSpec& plane = s.format.planes[0];
      const DType runtime = s.format.gradient;
      const auto shape = parameter.shape();
      const Interval own = p.chain.held(Level::zero1);
      if (parameter.shard && parameter.shard->values.numel() != own.size())
        raise<ConfigError>("shard of {}: wanted {} elements on this rank, got {}", parameter.name, own.size(),
                           parameter.shard->values.numel());
      {
        at::NoGradGuard no_grad;
        if (!own.empty()) {
          at::Tensor part = parameter.shard
                                ? parameter.shard->values
                                : leaf.detach().contiguous().view({-1}).slice(0, own.begin, own.end);
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
  const TraceScope traced(context_.trace.get(), Doing::encode, "encode", context_.label_of(index_));
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
  if (slots_ && slots_->last() && slots_->last()->residence_ == Residence::gathering) slots_->last()->finish_gather();
  residence_ = Residence::gathering;
  ++gathers_;
  std::byte* shards = runtime_.data();
  if (slots_) {
    slot_ = slots_->take(this);
    if (slot_ != GatherSlots::kNone) shards = slots_->data(slot_);
  }
  if (encodes_into_place() && (slot_ != GatherSlots::kNone || !std::exchange(encoded_, true))) {
    const TraceScope traced(context_.trace.get(), Doing::encode, "encode", context_.label_of(index_));
    for (const GroupSegment& s : segments_) encode_into(s, shards + s.runtime_offset[0]);
  }
  gathered_.clear();
  gathered_segment_.clear();
  comm::Group& ranks = *context_.ranks.gather;
  const plan::PlaneUse use = plan::gathered_planes(context_.plan, index_, backward);
  if (const int64_t bytes = slot_bytes_.gather; bytes > 0)
    gather_slot_ = context_.pool->acquire(bytes);
  std::vector<comm::GatherPlane> planes;
  std::vector<size_t> first_planes;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const GroupSegment& s = segments_[i];
    for (size_t j = 0; j < s.format.planes.size(); ++j) {
      const plan::PlaneSpec& spec = s.format.planes[j];
      if (!((use.forward && spec.use.forward) || (use.backward && spec.use.backward))) continue;
      comm::GatherPlane plane;
      plane.shard = shards + s.runtime_offset[j];
      plane.whole = gather_slot_ ? gather_slot_.data() + s.whole_offset[j] : nullptr;
      plane.slices = even_slices(ranks.size(), spec.bytes_of(s.layout->shard3));
      if (plan::encodes_at_gather(context_.plan, s.format) && !empty()) {
        DT_CHECK(plane.whole != nullptr && s.format.planes.size() == 1, "nowhere to encode {}", title());
        std::byte* own = plane.whole + plane.slices[ranks.rank()].begin;
        const TraceScope traced(context_.trace.get(), Doing::encode, "encode", context_.label_of(index_));
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
  if (planes.empty()) {
    DT_CHECK(slots_ == nullptr, "{} takes part in slots without gathers", title());
    return;
  }
  const auto phase = backward ? comm::Phase::gather_backward : comm::Phase::gather_forward;
  comm::Gathered result = ranks.all_gather(planes, context_.identity(phase, index_));
  gather_work_ = std::move(result.work);
  for (size_t at : first_planes) gathered_.push_back(result.whole[at]);
}

void ShardGroup::finish_gather() {
  if (residence_ == Residence::gathered) return;
  DT_CHECK(residence_ == Residence::gathering, "{} was not being gathered", title());
  if (gather_work_) {
    const TraceScope traced(context_.trace.get(), Doing::wait, "gather", context_.label_of(index_));
    std::exchange(gather_work_, nullptr)->wait();
  }
  for (size_t i = 0; i < gathered_.size(); ++i) segments_[gathered_segment_[i]].storage->bind(gathered_[i]);
  residence_ = Residence::gathered;
  if (residence_changed_) residence_changed_(true);
}

void ShardGroup::release() {
  if (residence_ == Residence::released) return;
  if (gather_work_) std::exchange(gather_work_, nullptr)->wait();
  const bool was_gathered = residence_ == Residence::gathered;
  unbind_all();
  gather_slot_.reset();
  if (slot_ != GatherSlots::kNone) slots_->give(std::exchange(slot_, GatherSlots::kNone));
  residence_ = Residence::released;
  if (was_gathered && residence_changed_) residence_changed_(false);
  if (released_) released_by(context_.ranks.gather->rank()).store(gathers_, std::memory_order_release);
}

std::atomic<uint64_t>& ShardGroup::released_by(int member) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(released_ + member * kCacheLine);
}

// A rank reads this one's shard only between a gather that both have come to and its release of it.
bool ShardGroup::drop_unread_shard() {
  if (!encodes_into_place() || !encoded_ || residence_ != Residence::released) return true;
  for (int m = 0; m < context_.ranks.gather->size(); ++m)
    if (released_by(m).load(std::memory_order_acquire) < gathers_) return false;
  drop_shard();
  return true;
}

void ShardGroup::drop_shard() {
  encoded_ = false;
  for (const Interval& own : own_bytes()) runtime_.zero(runtime_.data() + own.begin, own.size());
}

std::vector<Interval> ShardGroup::own_bytes() const {
  std::vector<Interval> bytes;
  for (const GroupSegment& s : segments_) {
    const int64_t begin = s.runtime_offset[0];
    bytes.push_back({begin, begin + s.format.planes[0].bytes_of(s.layout->shard3)});
  }
  return bytes;
}

int64_t ShardGroup::whole_bytes() const { return runtime_.bytes(); }

void ShardGroup::unbind_all() {
  for (GroupSegment& s : segments_) s.storage->unbind();
}

std::byte* ShardGroup::main_at(const GroupParameter& p) const {
  const GroupSegment& s = segments_[p.segment];
  const int64_t within = p.chain.buffer_offset(Level::zero1);
  if (!s.format.is_plain(context_.plan.options.main))
    return main_.data() + s.main_offset + within * size_of(context_.plan.options.main);
  const int64_t first = s.main.begin % s.layout->shard3;
  return runtime_.data() + s.runtime_offset[0] + s.format.planes[0].bytes_of(first + within);
}

const Memory& ShardGroup::main_memory(const GroupParameter& p) const {
  return segments_[p.segment].format.is_plain(context_.plan.options.main) ? runtime_.memory() : main_.memory();
}

const Memory& ShardGroup::main_gradient_memory() const {
  return context_.degrees().zero1 == context_.degrees().zero2 ? gradient_.memory() : main_gradient_.memory();
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
