#include "dovetail/comm/c10d/symmetric_world.h"

#include <cstring>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "dovetail/base/error.h"
#include "dovetail/comm/c10d/symmetric_group.h"

namespace dovetail::comm {
namespace {

namespace symmetric_memory = ::c10d::symmetric_memory;

// Every rank's complaint, empty for none, known to all; the first of them. Ranks thus fail together.
std::optional<Fault> first_complaint(P2PGroup& control, const std::string& mine, std::string_view label) {
  const auto all = control.gather_bytes(std::as_bytes(std::span(mine)), Identity{.label = label});
  for (int m = 0; m < control.size(); ++m) {
    const std::string text(reinterpret_cast<const char*>(all[m].data()), all[m].size());
    const int rank = control.global_ranks()[m];
    if (!text.empty()) return Fault{rank, fmt::format("rank {}: {}", rank, text)};
  }
  return std::nullopt;
}

// What keeps the ranks from sharing memory whatever the device says; empty for nothing.
std::string difference(P2PGroup& control, const SymmetricOptions& options) {
  const std::array<int64_t, 2> mine{static_cast<int64_t>(options.host), options.capacity};
  const auto all = control.gather_bytes(std::as_bytes(std::span(mine)), Identity{.label = "symmetric memory"});
  std::array<int64_t, 2> first{}, theirs{};
  for (int r = 0; r < control.size(); ++r) {
    DT_CHECK_EQ(all[r].size(), sizeof(theirs));
    std::memcpy(theirs.data(), all[r].data(), sizeof(theirs));
    if (r == 0) first = theirs;
    if (theirs[0] != first[0])
      return fmt::format("symmetric memory: wanted all ranks on one host, got rank {} on another than rank 0", r);
    if (theirs[1] != first[1])
      return fmt::format("symmetric memory: wanted arenas of one capacity, got {} bytes on rank 0 and {} on rank {}",
                         first[1], theirs[1], r);
  }
  return {};
}

// What the call throws, in one line; empty for nothing.
template <class Call>
std::string complaint_of(Call&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return "symmetric memory: " + text.substr(0, text.find('\n'));
  }
  return {};
}

// A process group has a name only where it has a backend; nothing communicates through this one.
class NameOnly final : public ::c10d::Backend {
 public:
  NameOnly(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "none"; }
};

}  // namespace

std::unique_ptr<Group> make_symmetric_world(std::shared_ptr<P2PMembers> members, const SymmetricOptions& options) {
  if (members->size() == 1) return std::make_unique<SymmetricGroup>(std::move(members), nullptr, options.device);
  P2PWorld& world = *members->world;
  std::shared_ptr<SymmetricArena> arena;
  std::optional<Fault> fault;
  std::string different;
  {
    P2PGroup control(members);
    different = difference(control, options);
    // The allocator's rendezvous waits for all, so none comes to it unless all will.
    if (different.empty())
      fault = first_complaint(control, complaint_of([&] {
        arena = std::make_shared<SymmetricArena>(options.allocator, options.device, options.capacity);
      }), "symmetric memory");
    if (different.empty() && !fault)
      fault = first_complaint(control, complaint_of([&] { arena->map(options.group); }), "symmetric memory");
  }
  if (!different.empty() || fault) {
    members.reset();  // takes leave in peace, since all ranks know
    if (fault) throw CommError(fault->rank, fault->reason);
    throw ConfigError(different);
  }
  world.keep(arena);
  world.set_transport(fmt::format("symmetric memory of {} ({}), over {}", options.device.str(),
                                  options.allocator->name(), world.transport()));
  return std::make_unique<SymmetricGroup>(std::move(members), std::move(arena), options.device);
}

void require_symmetric_memory() {
  if (!symmetric_memory::has_allocator(at::kCUDA))
    raise<ConfigError>("backend symmetric: wanted torch's symmetric memory for CUDA, got torch without CUDA (no "
                       "allocator is registered)");
}

std::shared_ptr<void> name_ranks(const std::string& name, int rank, int size,
                                 const c10::intrusive_ptr<::c10d::Store>& store) {
  // The allocator for CUDA finds the store, and the name for its traces, in a process group.
  const auto group = c10::make_intrusive<::c10d::ProcessGroup>(store, rank, size);
  group->setBackend(at::kCPU, ::c10d::ProcessGroup::BackendType::CUSTOM, c10::make_intrusive<NameOnly>(rank, size));
  try {
    symmetric_memory::set_group_info(name, rank, size, store);
    group->setGroupName(name);
    ::c10d::register_process_group(name, group);
  } catch (const std::exception&) {
    raise<ConfigError>("backend symmetric: torch knows a group \"{}\" of this process already; wanted another name of "
                       "the world", name);
  }
  // torch's registry does not own it.
  return {nullptr, [name, group](void*) { ::c10d::unregister_process_group(name); }};
}

}  // namespace dovetail::comm
