#include "dovetail/comm/c10d/symmetric_group.h"

#include "dovetail/base/error.h"
#include "dovetail/comm/arguments.h"
#include "dovetail/comm/c10d/native_group.h"

namespace dovetail::comm {

SymmetricGroup::SymmetricGroup(std::shared_ptr<P2PMembers> members, std::shared_ptr<SymmetricArena> arena,
                               at::Device device)
    : P2PGroup(std::move(members)), arena_(std::move(arena)), device_(device) {
  const int channel = members_->number;
  // On all members of a split alike, those that are alone too.
  if (arena_ && channel >= arena_->channels())
    raise<ConfigError>("group {} of this world: wanted a signal channel of its own, got {} in pads of {} bytes; make "
                       "fewer groups, or pads larger (c10d::symmetric_memory::set_signal_pad_size)",
                       channel, arena_->channels(), ::c10d::symmetric_memory::get_signal_pad_size());
  if (members_->size() > 1)
    shared_ = std::make_shared<SymmetricMembers>(SymmetricMembers{members_, arena_, DeviceOrder(device_), channel});
}

std::unique_ptr<SymmetricOperation> SymmetricGroup::operation(Operation kind, const Identity& id) const {
  return std::make_unique<SymmetricOperation>(shared_, kind, id);
}

at::Tensor SymmetricGroup::tensor(const void* data, int64_t count, DType dtype) const {
  return tensor_at(data, count, dtype == DType::f32 ? at::kFloat : at::kBFloat16, device_);
}

std::vector<at::Tensor> SymmetricGroup::tensors(const std::vector<const std::byte*>& data, int64_t count,
                                                DType dtype) const {
  std::vector<at::Tensor> out;
  for (const std::byte* d : data) out.push_back(tensor(d, count, dtype));
  return out;
}

Gathered SymmetricGroup::all_gather(std::span<const GatherPlane> planes, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  if (size == 1) return P2PGroup::all_gather(planes, id);
  auto op = operation(Operation::all_gather, id);
  Gathered result;
  for (const GatherPlane& plane : planes) {
    check_gather(plane, size);
    const int64_t own = plane.slices[me].size();
    const std::byte* lent = op->lend(plane.shard, own);
    op->copy(plane.whole + plane.slices[me].begin, plane.shard, own);
    for (int i = 1; i < size; ++i) {
      const int to = (me + i) % size, from = (me - i + size) % size;
      op->publish(to, lent, own);
      op->fetch(from, plane.whole + plane.slices[from].begin, plane.slices[from].size());
    }
    result.whole.push_back(plane.whole);
  }
  op->start();
  result.work = std::move(op);
  return result;
}

WorkHandle SymmetricGroup::reduce_scatter(const ReduceScatter& r, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  check_reduce(r, size, reduce_scratch_bytes(r.dtype, r.slices), device_.is_cpu());
  const int64_t item = size_of(r.dtype), count = r.slices[me].size();
  std::vector<const std::byte*> inputs(size);
  inputs[me] = r.input + r.slices[me].begin * item;
  const auto sum = [this, &inputs, &r, count] {
    if (count == 0) return;
    sum_tensors(members_->tree, tensors(inputs, count, r.dtype), tensor(r.output, count, DType::f32), sum_output(r));
    if (r.finished) r.finished(0, {r.output, static_cast<size_t>(count)});
  };
  if (size == 1) {
    members_->world->check();
    sum();
    return finished_work();
  }
  auto op = operation(Operation::reduce_scatter, id);
  for (int i = 1; i < size; ++i) {
    const int to = (me + i) % size, from = (me - i + size) % size;
    const int64_t theirs = r.slices[to].size() * item;
    op->publish(to, op->lend(r.input + r.slices[to].begin * item, theirs), theirs);
    std::byte* slot = r.scratch.data() + (i - 1) * padded_bytes(count * item);
    op->fetch(from, slot, count * item);
    inputs[from] = slot;
  }
  op->start(sum);
  return op;
}

int64_t SymmetricGroup::all_reduce_scratch_bytes(int64_t elements) const {
  const int size = members_->size();
  return (size - 1) * padded_bytes(P2PReduction::slice(elements, size, 0).size() * 4);
}

// Each member sums its slice, into the operand that the others read: only it has read that part of it. The other slices
// are written once their owners have summed them, and so have read them here.
WorkHandle SymmetricGroup::all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  const int64_t elements = static_cast<int64_t>(data.size());
  DT_CHECK_GE(static_cast<int64_t>(scratch.size()), all_reduce_scratch_bytes(elements), "scratch of an all_reduce");
  if (size == 1) {
    members_->world->check();
    return finished_work();
  }
  auto op = operation(Operation::all_reduce, id);
  auto slice = [&](int m) { return P2PReduction::slice(elements, size, m); };
  auto* const own = std::as_writable_bytes(data).data();
  std::byte* const lent = op->lend(own, elements * 4);
  const Interval mine = slice(me);
  std::vector<const std::byte*> inputs(size);
  inputs[me] = lent + mine.begin * 4;
  for (int i = 1; i < size; ++i) {
    const int to = (me + i) % size, from = (me - i + size) % size;
    op->publish(to, lent + slice(to).begin * 4, slice(to).size() * 4);
    std::byte* slot = scratch.data() + (i - 1) * padded_bytes(mine.size() * 4);
    op->fetch(from, slot, mine.size() * 4);
    inputs[from] = slot;
  }
  op->next_round([&] {
    if (mine.empty()) return;
    const std::vector<at::Tensor> operands = tensors(inputs, mine.size(), DType::f32);
    sum_tensors(members_->tree, operands, operands[me], {});
    if (lent != own) tensor(own + mine.begin * 4, mine.size(), DType::f32).copy_(operands[me]);
  });
  for (int i = 1; i < size; ++i) {
    const int to = (me + i) % size, from = (me - i + size) % size;
    op->publish(to, lent + mine.begin * 4, mine.size() * 4);
    op->fetch(from, own + slice(from).begin * 4, slice(from).size() * 4);
  }
  op->start();
  return op;
}

WorkHandle SymmetricGroup::exchange(std::span<const Send> sends, std::span<const Receive> receives,
                                    const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  for (const Send& s : sends) DT_CHECK(s.to >= 0 && s.to < size, "send to member {} of {}", s.to, size);
  for (const Receive& r : receives)
    DT_CHECK(r.from >= 0 && r.from < size, "receive from member {} of {}", r.from, size);
  const std::vector<OwnMessage> own = own_messages(sends, receives, me);
  if (size == 1) {
    members_->world->check();
    for (const OwnMessage& m : own) copy_bytes(m.to.data(), m.from.data(), static_cast<int64_t>(m.to.size()), device_);
    return finished_work();
  }
  auto op = operation(Operation::exchange, id);
  for (const OwnMessage& m : own) op->copy(m.to.data(), m.from.data(), static_cast<int64_t>(m.to.size()));
  for (const Send& s : sends) {
    const int64_t bytes = static_cast<int64_t>(s.bytes.size());
    if (s.to != me) op->publish(s.to, op->lend(s.bytes.data(), bytes), bytes);
  }
  for (const Receive& r : receives)
    if (r.from != me) op->fetch(r.from, r.bytes.data(), static_cast<int64_t>(r.bytes.size()));
  op->start();
  return op;
}

std::unique_ptr<Group> SymmetricGroup::split(const std::vector<std::vector<int>>& groups) {
  return std::make_unique<SymmetricGroup>(split_members(groups), arena_, device_);
}

}  // namespace dovetail::comm
