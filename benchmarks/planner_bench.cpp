// planner_bench MODELS_FOLDER: plans every inventory of the folder under every block policy for 8
// to 65,536 ranks, as one buffer, as at most three segments, and oriented; checks every plan from
// the definition; then compares paddings with the rules of other systems on the same blocks.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/plan/admissible.h"
#include "dovetail/plan/lower_bound.h"
#include "dovetail/plan/model_layout.h"
#include "dovetail/plan/orientation.h"
#include "dovetail/plan/packing.h"

namespace {

using namespace dovetail;
using namespace dovetail::plan;

constexpr std::array kBlocks{BlockKind::element, BlockKind::row,  BlockKind::rows32,
                             BlockKind::rows128, BlockKind::head, BlockKind::expert,
                             BlockKind::matrix};
constexpr std::array<int64_t, 7> kRanks{8, 32, 128, 1024, 4096, 16384, 65536};
constexpr double kLimitMs = 50;
// Not in the comparison table: models whose layers are mostly convolutions or whose groups are all
// different.
const std::set<std::string> kOutsideTable{"hunyuanvideo-13b", "sd15-unet", "sdxl-unet"};

struct Model {
  std::string stem;
  Inventory inventory;
};

// How a model is stored and split.
struct Variant {
  const char* name;
  int segments;
  bool orient;
};
constexpr std::array<Variant, 3> kVariants{
    {{"one buffer", 1, false}, {"K <= 3", 3, false}, {"oriented", 3, true}}};

ModelLayoutOptions options_of(BlockKind block, int64_t ranks, const Variant& v) {
  return {{ranks, ranks, ranks}, block, 64, v.segments, v.orient};
}

// Processor time of this thread: planning uses one core, and other programs may be running.
double cpu_ms() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

struct Worst {
  double ms = 0;
  std::string where;
  void see(double value, std::string place) {
    if (value > ms) ms = value, where = std::move(place);
  }
};

struct Counts {
  int64_t groups = 0;
  int64_t exact = 0;
  int64_t table_groups = 0;  // of the models in the comparison table
  int64_t table_exact = 0;
};

// One line a model, block policy and number of ranks.
void plan_everything(const std::vector<Model>& models) {
  std::array<Worst, kVariants.size()> worst;
  std::array<Counts, kVariants.size()> counts;
  int64_t plans = 0;
  fmt::print(
      "model block ranks | padding gap ms, for each of: one buffer | K <= 3 | oriented, K <= 3\n");
  for (const Model& m : models)
    for (BlockKind block : kBlocks)
      for (int64_t ranks : kRanks) {
        std::string line = fmt::format("{} {} {}", m.stem, name_of(block), ranks);
        for (size_t v = 0; v < kVariants.size(); ++v) {
          const double start = cpu_ms();
          const ModelLayout layout =
              lay_out_model(m.inventory, options_of(block, ranks, kVariants[v]));
          const double ms = cpu_ms() - start;
          for (const GroupLayout& g : layout.groups) {
            for (const SegmentLayout& s : g.layout.segments) dovetail::verify(s);
            counts[v].groups += 1;
            counts[v].exact += g.layout.exact;
            if (kOutsideTable.contains(m.stem)) continue;
            counts[v].table_groups += 1;
            counts[v].table_exact += g.layout.exact;
          }
          const double gap = (1 + layout.padding1()) / (1 + layout.bound_padding1()) - 1;
          line += fmt::format(" | {:.5f} {:.5f} {:.2f}", layout.padding1(), gap, ms);
          worst[v].see(ms, fmt::format("{} {} {}", m.stem, name_of(block), ranks));
          ++plans;
        }
        fmt::print("{}\n", line);
      }
  fmt::print("\n{} plans, each checked from the definition\n", plans);
  for (size_t v = 0; v < kVariants.size(); ++v)
    fmt::print(
        "{}: {} of {} groups proved optimal ({} of {} without U-Nets and HunyuanVideo); slowest "
        "model {:.1f} ms ({}), "
        "limit {} ms{}\n",
        kVariants[v].name, counts[v].exact, counts[v].groups, counts[v].table_exact,
        counts[v].table_groups, worst[v].ms, worst[v].where, kLimitMs,
        worst[v].ms < kLimitMs ? "" : " EXCEEDED");
}

// What each system pads a group to, in elements over all ranks.

int64_t per_parameter(const LayoutRequest& r) {
  int64_t sum = 0;
  for (const LayoutTensor& t : r.tensors)
    sum += ceil_div(ceil_div(t.numel, t.block), r.degrees.zero1) * t.block;
  return sum * r.degrees.zero1;
}

std::vector<int> all_of(const RaggedProblem& p) {
  std::vector<int> r(p.tensors.size());
  std::iota(r.begin(), r.end(), 0);
  return r;
}

// One buffer, tensors in the given order, the shard a multiple of the least common multiple of all
// blocks.
int64_t common_multiple_rule(const LayoutRequest& r) {
  const RaggedProblem p = problem_of(r);
  int64_t common = 1;
  for (const RaggedTensor& t : p.tensors) common = std::lcm(common, t.block);
  const auto end_in_order = [&](int64_t shard) {
    int64_t end = 0;
    for (const RaggedTensor& t : p.tensors)
      end = Grid{shard, shard}.earliest_start(end, t) + t.extent;
    return end;
  };
  int64_t total = 0;
  for (const RaggedTensor& t : p.tensors) total += t.extent;
  int64_t shard = round_up(ceil_div(total, r.degrees.zero1), common);
  while (end_in_order(shard) > r.degrees.zero1 * shard) shard += common;
  return r.degrees.zero1 * shard * r.alignment;
}

// One buffer, smallest admissible shard for which one of three fixed orders fits: our
// reconstruction of a published planner.
int64_t fixed_orders(const LayoutRequest& r) {
  const RaggedProblem p = problem_of(r);
  const TensorTypes types = group_by_type(p.tensors, all_of(p));
  const Packer packer(p.tensors, types, r.degrees.zero1);
  SearchEffort effort;
  int64_t shard = next_admissible(types, block_bound(types, r.degrees.zero1));
  while (packer.pack_fixed({shard, shard}, effort).verdict != Verdict::fits)
    shard = next_admissible(types, shard + 1);
  return r.degrees.zero1 * shard * r.alignment;
}

int64_t any_assignment(const LayoutRequest& r) {
  const RaggedProblem p = problem_of(r);
  return r.degrees.zero1 * block_bound(group_by_type(p.tensors, all_of(p)), r.degrees.zero1) *
         r.alignment;
}

bool can_be_transposed(const TensorSpec& t) {
  const bool fused = t.kind == ParamKind::expert && t.shape.size() == 3;
  const bool matrix = t.kind == ParamKind::matrix && t.shape.size() == 2;
  return (fused || matrix) && t.shape[t.shape.size() - 2] != t.shape.back();
}

// The least bound over all ways in which matrices and experts of the group may lie, 2^n of them,
// and experts one by one or not.
int64_t any_storage(const std::vector<TensorSpec>& tensors, const ModelLayoutOptions& options) {
  std::vector<size_t> free;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (can_be_transposed(tensors[i])) free.push_back(i);
  int64_t least = any_assignment(request_of(tensors, options));
  for (uint64_t mask = 0; mask < uint64_t{1} << free.size(); ++mask) {
    std::vector<TensorSpec> stored = tensors;
    for (size_t b = 0; b < free.size(); ++b) {
      if (!(mask >> b & 1)) continue;
      TensorSpec& t = stored[free[b]];
      std::swap(t.shape[t.shape.size() - 2], t.shape.back());
      t.heads = t.heads_dim = 0;
    }
    least = std::min(least,
                     any_assignment(request_of(split_experts(stored, options.block), options)));
  }
  return least;
}

double bound_padding(const Model& m, const ModelLayoutOptions& options) {
  int64_t planned = 0;
  for (const InventoryGroup& g : m.inventory.groups)
    planned += g.repeat * any_storage(g.tensors, options);
  return double(planned) / double(m.inventory.numel()) - 1;
}

// Padding of the whole model under a rule for one group's tensors.
template <class Rule>
double padding(const Model& m, const ModelLayoutOptions& options, Rule rule) {
  const ModelLayout layout = lay_out_model(m.inventory, options);
  int64_t planned = 0;
  for (const GroupLayout& g : layout.groups)
    planned += g.repeat * rule(request_of(g.tensors, options));
  return double(planned) / double(m.inventory.numel()) - 1;
}

std::string median_and_worst(std::vector<double> v) {
  if (v.empty()) return "-";
  std::sort(v.begin(), v.end());
  return fmt::format("{:.3f}/{:.3f}", v[v.size() / 2], v.back());
}

void compare(const std::vector<Model>& models) {
  fmt::print(
      "\nPadding, median/worst over the models that are not U-Nets or HunyuanVideo (0.05 = 5%), "
      "unit 64 elements\n\n");
  fmt::print(
      "| block, ranks | per parameter, same blocks | common multiple rule | three fixed orders | "
      "one buffer | K <= 3 | "
      "+ orientation, experts | bound on any storage and assignment |\n"
      "|---|---|---|---|---|---|---|---|\n");
  const std::array<std::pair<BlockKind, int64_t>, 6> rows{{{BlockKind::row, 128},
                                                           {BlockKind::row, 1024},
                                                           {BlockKind::rows32, 128},
                                                           {BlockKind::rows128, 32},
                                                           {BlockKind::rows128, 128},
                                                           {BlockKind::head, 128}}};
  for (auto [block, ranks] : rows) {
    std::array<std::vector<double>, 7> columns;
    for (const Model& m : models) {
      if (kOutsideTable.contains(m.stem)) continue;
      const ModelLayoutOptions plain = options_of(block, ranks, kVariants[0]);
      columns[0].push_back(padding(m, plain, per_parameter));
      columns[1].push_back(padding(m, plain, common_multiple_rule));
      columns[2].push_back(padding(m, plain, fixed_orders));
      for (size_t v = 0; v < kVariants.size(); ++v)
        columns[3 + v].push_back(
            lay_out_model(m.inventory, options_of(block, ranks, kVariants[v])).padding1());
      columns[6].push_back(bound_padding(m, plain));
    }
    fmt::print("| {}, {} |", name_of(block), ranks);
    for (auto& c : columns) fmt::print(" {} |", median_and_worst(c));
    fmt::print("\n");
  }
}

std::string processor() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::vector<Model> read_models(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".json") paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Model> models;
  for (const auto& p : paths) models.push_back({p.stem().string(), read_inventory(p.string())});
  if (models.empty()) raise<FileError>("{}: no .json inventory in it", folder);
  return models;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    fmt::print(stderr, "usage: planner_bench MODELS_FOLDER\n");
    return 2;
  }
  try {
    const std::vector<Model> models = read_models(argv[1]);
    fmt::print("command: planner_bench {}\nprocessor: {}, one core; ms are processor time\n\n",
               argv[1], processor());
    plan_everything(models);
    compare(models);
    return 0;
  } catch (const std::exception& e) {
    fmt::print(stderr, "planner_bench: {}\n", e.what());
    return 1;
  }
}
