#include "dovetail/comm/c10d/native_group.h"

#include <numeric>

#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>

#include "dovetail/base/error.h"
#include "dovetail/comm/arguments.h"
#include "dovetail/comm/c10d/native_work.h"
#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/p2p_operation.h"

namespace dovetail::comm {
namespace {

// Slices of equal size without gaps.
bool is_even(std::span<const Interval> slices) {
  for (size_t m = 0; m < slices.size(); ++m) {
    const int64_t n = slices[0].size();
    if (slices[m].begin != static_cast<int64_t>(m) * n || slices[m].size() != n) return false;
  }
  return true;
}

class NativeGroup final : public Group {
 public:
  NativeGroup(std::shared_ptr<P2PMembers> members, NativeOptions options, const std::string& name)
      : members_(std::move(members)), control_(members_), options_(std::move(options)), name_(name) {
    if (members_->size() == 1) return;
    try {
      backend_ = options_.connect(name, members_->rank, members_->size());
      members_->world->keep(std::make_shared<c10::intrusive_ptr<::c10d::Backend>>(backend_));
      if (options_.device.is_cpu()) backend_->setTimeout(members_->world->deadline());
    } catch (const ConfigError&) {
      throw;
    } catch (const std::exception& error) {
      members_->world->blame({}, {-1, fmt::format("group {} could not connect: {}", name, error.what())});
    }
  }

  int rank() const override { return members_->rank; }
  std::span<const int> global_ranks() const override { return members_->ranks; }
  std::string transport() const override { return members_->world->transport() + "'s own collectives"; }
  bool needs_gather_buffer() const override { return members_->size() > 1; }
  Gathered all_gather(std::span<const GatherPlane> planes, const Identity& id) override;
  int64_t reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const override;
  WorkHandle reduce_scatter(const ReduceScatter& request, const Identity& id) override;
  int64_t all_reduce_scratch_bytes(int64_t elements) const override;
  WorkHandle all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) override;
  WorkHandle exchange(std::span<const Send> sends, std::span<const Receive> receives, const Identity& id) override;
  std::vector<std::vector<std::byte>> gather_bytes(std::span<const std::byte> mine, const Identity& id) override {
    return control_.gather_bytes(mine, id);
  }
  void barrier(const Identity& id) override { control_.barrier(id); }
  std::unique_ptr<Group> split(const std::vector<std::vector<int>>& groups) override;
  void fail(std::string_view reason) noexcept override { control_.fail(reason); }
  std::chrono::nanoseconds blocked() const override { return control_.blocked(); }
  const Counters& counters() const override { return control_.counters(); }
  std::chrono::milliseconds deadline() const override { return control_.deadline(); }

 private:
  at::Tensor wrap(const void* data, int64_t count, at::ScalarType type = at::kByte) const {
    return at::from_blob(const_cast<void*>(data), {count}, at::TensorOptions().dtype(type).device(options_.device));
  }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) const {
    if (bytes > 0 && to != from) wrap(to, bytes).copy_(wrap(from, bytes));
  }
  // Verifies the headers: returns once all members have come to the same operation with the same sizes.
  void agree(P2POperation& operation) const {
    operation.post();
    operation.wait();
  }
  // Calls the backend; what it throws at once becomes a CommError.
  template <class F>
  void launch(const Header& header, F&& call) const {
    try {
      call();
    } catch (const std::exception& error) {
      members_->world->blame(header, {-1, fmt::format("the backend refused: {}", error.what())});
    }
  }
  void move(std::span<const Send> sends, std::span<const Receive> receives, BackendWorks& works) const;
  void spread(const std::byte* input, int64_t item, std::span<const Interval> slices, std::byte* scratch,
              BackendWorks& works) const;
  void collect(const GatherPlane& plane, BackendWorks& works) const;
  void sum(const std::byte* parts, DType dtype, float* output, int64_t count, const SumOutput& how = {}) const;

  const std::shared_ptr<P2PMembers> members_;
  P2PGroup control_;
  const NativeOptions options_;
  const std::string name_;
  c10::intrusive_ptr<::c10d::Backend> backend_;
};

// Messages between different members, in any sizes.
void NativeGroup::move(std::span<const Send> sends, std::span<const Receive> receives, BackendWorks& works) const {
  const bool together = backend_->supportsCoalescing();
  if (together) backend_->startCoalescing();
  for (const Receive& r : receives) {
    if (r.bytes.empty()) continue;
    std::vector<at::Tensor> one{wrap(r.bytes.data(), static_cast<int64_t>(r.bytes.size()))};
    works.push_back(backend_->recv(one, r.from, 0));
  }
  for (const Send& s : sends) {
    if (s.bytes.empty()) continue;
    std::vector<at::Tensor> one{wrap(s.bytes.data(), static_cast<int64_t>(s.bytes.size()))};
    works.push_back(backend_->send(one, s.to, 0));
  }
  if (together) {
    works.clear();
    works.push_back(backend_->endCoalescing());
  }
}

// Member m's slice of every member's input arrives at scratch + m * its bytes; the own one is copied there.
void NativeGroup::spread(const std::byte* input, int64_t item, std::span<const Interval> slices, std::byte* scratch,
                         BackendWorks& works) const {
  const int size = members_->size(), me = members_->rank;
  const int64_t own = slices[me].size() * item;
  if (is_even(slices)) {
    if (own == 0) return;
    at::Tensor out = wrap(scratch, own * size), in = wrap(input, own * size);
    std::vector<int64_t> counts;
    works.push_back(backend_->alltoall_base(out, in, counts, counts));
    return;
  }
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (int m = 0; m < size; ++m) {
    if (m == me) continue;
    sends.push_back({m, {input + slices[m].begin * item, static_cast<size_t>(slices[m].size() * item)}});
    receives.push_back({m, {scratch + m * own, static_cast<size_t>(own)}});
  }
  copy(scratch + me * own, input + slices[me].begin * item, own);
  move(sends, receives, works);
}

void NativeGroup::collect(const GatherPlane& plane, BackendWorks& works) const {
  const int size = members_->size(), me = members_->rank;
  const int64_t own = plane.slices[me].size();
  if (is_even(plane.slices)) {
    if (own == 0) return;
    at::Tensor whole = wrap(plane.whole, own * size), shard = wrap(plane.shard, own);
    works.push_back(backend_->_allgather_base(whole, shard));
    return;
  }
  copy(plane.whole + plane.slices[me].begin, plane.shard, own);
  std::vector<Send> sends;
  std::vector<Receive> receives;
  for (int m = 0; m < size; ++m) {
    if (m == me) continue;
    sends.push_back({m, {plane.shard, static_cast<size_t>(own)}});
    receives.push_back({m, {plane.whole + plane.slices[m].begin, static_cast<size_t>(plane.slices[m].size())}});
  }
  move(sends, receives, works);
}

void NativeGroup::sum(const std::byte* parts, DType dtype, float* output, int64_t count, const SumOutput& how) const {
  const int size = members_->size();
  const int64_t bytes = count * size_of(dtype);
  if (options_.device.is_cpu()) {
    std::vector<const std::byte*> inputs;
    for (int m = 0; m < size; ++m) inputs.push_back(parts + m * bytes);
    members_->tree.sum(inputs, dtype, {output, static_cast<size_t>(count)}, how);
    return;
  }
  std::vector<at::Tensor> inputs;
  for (int m = 0; m < size; ++m) {
    inputs.push_back(wrap(parts + m * bytes, count, dtype == DType::f32 ? at::kFloat : at::kBFloat16));
  }
  sum_tensors(members_->tree, inputs, wrap(output, count, at::kFloat), how);
}

Gathered NativeGroup::all_gather(std::span<const GatherPlane> planes, const Identity& id) {
  if (members_->size() == 1) return control_.all_gather(planes, id);
  const int size = members_->size(), me = members_->rank;
  Gathered result;
  P2POperation operation(members_, Operation::all_gather, id);
  for (const GatherPlane& plane : planes) {
    check_gather(plane, size);
    result.whole.push_back(plane.whole);
    for (int m = 0; m < size; ++m) {
      if (m != me) operation.declare(m, plane.slices[me].size(), plane.slices[m].size());
    }
  }
  agree(operation);
  BackendWorks works;
  for (const GatherPlane& plane : planes) launch(operation.header(), [&] {
    BackendWorks some;
    collect(plane, some);
    works.insert(works.end(), some.begin(), some.end());
  });
  result.work = std::make_unique<NativeWork>(members_, operation.header(), std::move(works));
  return result;
}

int64_t NativeGroup::reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const {
  check_slices(slices, members_->size());
  return members_->size() == 1 ? 0 : members_->size() * slices[members_->rank].size() * size_of(dtype);
}

WorkHandle NativeGroup::reduce_scatter(const ReduceScatter& r, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  check_reduce(r, size, reduce_scratch_bytes(r.dtype, r.slices), options_.device.is_cpu());
  const int64_t item = size_of(r.dtype), count = r.slices[me].size();
  const SumOutput how = sum_output(r);
  if (size == 1) {
    sum(r.input + r.slices[0].begin * item, r.dtype, r.output, count, how);
    return finished_work();
  }
  P2POperation operation(members_, Operation::reduce_scatter, id);
  for (int m = 0; m < size; ++m) {
    if (m != me) operation.declare(m, r.slices[m].size() * item, count * item);
  }
  agree(operation);
  BackendWorks works;
  launch(operation.header(), [&] { spread(r.input, item, r.slices, r.scratch.data(), works); });
  return std::make_unique<NativeWork>(members_, operation.header(), std::move(works),
                                      [this, parts = r.scratch.data(), dtype = r.dtype, output = r.output, count, how] {
                                        sum(parts, dtype, output, count, how);
                                      });
}

int64_t NativeGroup::all_reduce_scratch_bytes(int64_t elements) const {
  return control_.all_reduce_scratch_bytes(elements);
}

// Both halves run here: backends match collectives by the order of their calls, so none may be left to wait().
WorkHandle NativeGroup::all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  const int64_t elements = static_cast<int64_t>(data.size());
  DT_CHECK_GE(static_cast<int64_t>(scratch.size()), all_reduce_scratch_bytes(elements), "scratch of an all_reduce");
  if (size == 1) return finished_work();
  std::vector<Interval> slices, bytes;
  for (int m = 0; m < size; ++m) {
    slices.push_back(P2PReduction::slice(elements, size, m));
    bytes.push_back({slices[m].begin * 4, slices[m].end * 4});
  }
  P2POperation operation(members_, Operation::all_reduce, id);
  for (int m = 0; m < size; ++m) {
    if (m == me) continue;
    operation.declare(m, bytes[m].size(), bytes[me].size());
    operation.declare(m, bytes[me].size(), bytes[m].size());
  }
  agree(operation);
  BackendWorks works;
  std::byte* const start = std::as_writable_bytes(data).data();
  launch(operation.header(), [&] { spread(start, 4, slices, scratch.data(), works); });
  NativeWork(members_, operation.header(), std::move(works)).wait();
  sum(scratch.data(), DType::f32, data.data() + slices[me].begin, slices[me].size());
  works.clear();
  launch(operation.header(), [&] { collect({start + bytes[me].begin, start, bytes}, works); });
  NativeWork(members_, operation.header(), std::move(works)).wait();
  return finished_work();
}

WorkHandle NativeGroup::exchange(std::span<const Send> sends, std::span<const Receive> receives, const Identity& id) {
  const int me = members_->rank;
  DT_CHECK(options_.device.is_cpu() || std::ranges::none_of(sends, [&](const Send& s) { return s.to == me; }),
           "messages of a member to itself on CUDA memory are the caller's to copy");
  if (members_->size() == 1) return control_.exchange(sends, receives, id);
  copy_own(sends, receives, me);
  P2POperation operation(members_, Operation::exchange, id);
  std::vector<Send> out;
  std::vector<Receive> in;
  for (const Send& s : sends) {
    if (s.to == me) continue;
    out.push_back(s);
    operation.declare(s.to, static_cast<int64_t>(s.bytes.size()), 0);
  }
  for (const Receive& r : receives) {
    if (r.from == me) continue;
    in.push_back(r);
    operation.declare(r.from, 0, static_cast<int64_t>(r.bytes.size()));
  }
  agree(operation);
  BackendWorks works;
  if (!out.empty() || !in.empty()) launch(operation.header(), [&] { move(out, in, works); });
  return std::make_unique<NativeWork>(members_, operation.header(), std::move(works));
}

std::unique_ptr<Group> NativeGroup::split(const std::vector<std::vector<int>>& groups) {
  const int list = check_split(groups, members_->size(), members_->rank);
  auto part = control_.split_members(groups);
  const std::string name = fmt::format("{}/{}.{}", name_, part->number, list);
  return std::make_unique<NativeGroup>(std::move(part), options_, name);
}

}  // namespace

std::unique_ptr<Group> make_native_group(std::shared_ptr<P2PMembers> members, NativeOptions options,
                                         const std::string& name) {
  return std::make_unique<NativeGroup>(std::move(members), std::move(options), name);
}

void sum_tensors(const SumTree& tree, const std::vector<at::Tensor>& inputs, at::Tensor out, const SumOutput& how) {
  at::Tensor sum = tree.fold([&](int m) { return inputs[m].to(at::kFloat); },
                                   [](at::Tensor a, const at::Tensor& b) { return at::add(a, b); });
  if (how.scale != 1) sum = at::mul(sum, how.scale);
  how.accumulate ? out.add_(sum) : out.copy_(sum);
}

}  // namespace dovetail::comm
