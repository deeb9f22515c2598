#include "dovetail/engine/initial.h"

#include <ATen/core/grad_mode.h>

#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"

namespace dovetail::engine_detail {
namespace {

struct Item {
  std::string name;
  at::Tensor tensor;
};

std::vector<Item> items_of(const UnitModel& model) {
  std::vector<Item> items;
  for (const ModelUnit& unit : model.units)
    for (const UnitParameter& p : unit.parameters)
      if (!p.shard) items.push_back({"parameter " + p.name, p.tensor.detach()});
  for (const ModelBuffer& b : model.buffers) items.push_back({"buffer " + b.name, b.tensor.detach()});
  return items;
}

std::span<std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<std::byte*>(contiguous.data_ptr()), static_cast<size_t>(contiguous.nbytes())};
}

uint64_t hash_of(const Item& item) {
  const at::Tensor t = item.tensor.contiguous();
  std::string head = item.name + c10::toString(t.scalar_type());
  for (int64_t d : t.sizes()) head += fmt::format(",{}", d);
  return hash64(t.nbytes() ? bytes_of(t) : std::span<std::byte>{}, hash64(head));
}

comm::Identity identity(std::string_view label) { return {.phase = comm::Phase::state, .label = label}; }

void compare(const std::vector<Item>& items, comm::Group& world) {
  std::vector<uint64_t> mine;
  for (const Item& item : items) mine.push_back(hash_of(item));
  const auto all = world.gather_bytes(std::as_bytes(std::span(mine)), identity("hashes of initial weights"));
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r].size() != all[0].size())
      raise<ConfigError>("initial weights: rank {} has {} parameters and buffers, rank 0 has {}",
                         world.global_ranks()[r], all[r].size() / 8, all[0].size() / 8);
    for (size_t i = 0; i < items.size(); ++i)
      if (std::memcmp(&all[r][8 * i], &all[0][8 * i], 8) != 0)
        raise<ConfigError>(
            "initial weights: {} differs between rank 0 and rank {} (value, shape, dtype or name); "
            "initialise all ranks alike or ask for broadcast_rank0", items[i].name, world.global_ranks()[r]);
  }
}

void broadcast(const std::vector<Item>& items, comm::Group& world) {
  at::NoGradGuard no_grad;
  for (const Item& item : items) {
    at::Tensor t = item.tensor.contiguous();
    if (t.nbytes() == 0) continue;
    std::vector<comm::Send> sends;
    std::vector<comm::Receive> receives;
    if (world.rank() == 0)
      for (int r = 1; r < world.size(); ++r) sends.push_back({r, bytes_of(t)});
    else
      receives.push_back({0, bytes_of(t)});
    world.exchange(sends, receives, identity(item.name))->wait();
    if (!t.is_same(item.tensor) && world.rank() != 0) item.tensor.copy_(t);
  }
}

}  // namespace

void settle_initial(const UnitModel& model, InitialWeights how, comm::Group& world) {
  if (world.size() == 1) return;
  const std::vector<Item> items = items_of(model);
  if (how == InitialWeights::broadcast_rank0) broadcast(items, world);
  compare(items, world);
}

void compare_plans(const plan::Plan& plan, const std::string& optimizer, comm::Group& world) {
  if (world.size() == 1) return;
  const std::string text = plan::to_text(plan) + "optimizer " + optimizer + "\n";
  const uint64_t mine = hash64(text);
  const auto hashes = world.gather_bytes(std::as_bytes(std::span(&mine, 1)), identity("hash of the plan"));
  if (std::all_of(hashes.begin(), hashes.end(), [&](const auto& h) { return h == hashes[0]; })) return;
  const auto texts = world.gather_bytes(std::as_bytes(std::span(text)), identity("text of the plan"));
  auto view = [&](size_t r) {
    return std::string_view(reinterpret_cast<const char*>(texts[r].data()), texts[r].size());
  };
  for (size_t r = 1; r < texts.size(); ++r)
    if (view(r) != view(0))
      raise<PlanError>("plan: rank 0 and rank {} have different plans; {}", world.global_ranks()[r],
                       plan::first_difference(view(0), view(r)));
}

}  // namespace dovetail::engine_detail
