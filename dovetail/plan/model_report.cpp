#include "dovetail/plan/model_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "dovetail/plan/shard_drawing.h"

namespace dovetail::plan {
namespace {

using nlohmann::json;

double gap(int64_t reached, int64_t bound) {
  return bound == 0 ? 0 : double(reached) / double(bound) - 1;
}

int64_t numel_of(const ModelLayout& m) {
  int64_t n = 0;
  for (const GroupLayout& g : m.groups) n += g.repeat * g.numel;
  return n;
}

// Shards against bounds over the whole model.
double gap_of(const ModelLayout& m) {
  int64_t reached = 0, bound = 0;
  for (const GroupLayout& g : m.groups)
    reached += g.repeat * g.layout.shard1(), bound += g.repeat * g.layout.bound1;
  return gap(reached, bound);
}

constexpr const char* kRow =
    "{:<28} {:>4} {:>14} {:>4} {:>3} {:>13} {:>13} {:>9} {:>9} {:>8} {:>5} {:>8}\n";

std::string percent(double x) { return fmt::format("{:.3f}%", 100 * x); }

std::string table_row(const GroupLayout& g) {
  const ElementLayout& l = g.layout;
  return fmt::format(fmt::runtime(kRow), g.name.substr(0, 28), g.repeat, g.numel, g.tensors.size(),
                     l.segments.size(), l.shard1(), l.bound1, percent(g.padding1()),
                     percent(g.padding3()), percent(gap(l.shard1(), l.bound1)),
                     l.exact ? "yes" : "no", fmt::format("{:.2f}", g.milliseconds));
}

std::string table_of(const ModelLayout& m) {
  std::string out =
      fmt::format(fmt::runtime(kRow), "group", "x", "elements", "tens", "seg", "zero1 shard",
                  "proven bound", "padding", "zero3", "gap", "exact", "ms");
  for (const GroupLayout& g : m.groups) out += table_row(g);
  return out + fmt::format(fmt::runtime(kRow), "total", "", numel_of(m), "", "", "", "",
                           percent(m.padding1()), percent(m.padding3()), percent(gap_of(m)),
                           m.exact() ? "yes" : "no", fmt::format("{:.2f}", m.milliseconds));
}

std::string draw_group(const GroupLayout& g) {
  std::string out;
  for (size_t k = 0; k < g.layout.segments.size(); ++k) {
    const SegmentLayout& s = g.layout.segments[k];
    std::vector<DrawnTensor> drawn(g.tensors.size());
    for (const Placement& p : s.placements) {
      const TensorSpec& t = g.tensors[p.tensor];
      drawn[p.tensor] = {
          fmt::format("{} [{}], blocks of {}", t.name, fmt::join(t.shape, ", "), p.block), p.offset,
          p.numel};
    }
    out +=
        fmt::format("\n{}, segment {}: zero3 shard {}, zero2 shard {}, zero1 shard {} elements\n",
                    g.name, k, s.shard3, s.shard2, s.shard1);
    out += draw_shards({s.zero1, s.zero2, s.zero3}, {s.shard3, s.shard2, s.shard1}, drawn);
  }
  return out;
}

json group_json(const GroupLayout& g) {
  json shard1 = json::array(), shard2 = json::array(), shard3 = json::array(),
       tensors = json::array();
  for (size_t k = 0; k < g.layout.segments.size(); ++k) {
    const SegmentLayout& s = g.layout.segments[k];
    shard1.push_back(s.shard1);
    shard2.push_back(s.shard2);
    shard3.push_back(s.shard3);
    for (const Placement& p : s.placements) {
      const TensorSpec& t = g.tensors[p.tensor];
      json held = json::array();
      if (p.numel > 0) held = {s.zero1_shard_at(p.offset), s.zero1_shard_at(p.offset + p.numel - 1)};
      tensors.push_back({{"name", t.name},
                         {"shape", t.shape},
                         {"numel", p.numel},
                         {"block", p.block},
                         {"segment", k},
                         {"offset", p.offset},
                         {"shards", held}});
    }
  }
  return {{"name", g.name},
          {"repeat", g.repeat},
          {"numel", g.numel},
          {"padding", g.padding1()},
          {"padding_zero3", g.padding3()},
          {"bound", g.layout.bound1},
          {"bound_zero3", g.layout.bound3},
          {"gap", gap(g.layout.shard1(), g.layout.bound1)},
          {"exact", g.layout.exact},
          {"steps", g.layout.steps},
          {"ms", g.milliseconds},
          {"shard", shard1},
          {"shard_zero2", shard2},
          {"shard_zero3", shard3},
          {"tensors", tensors}};
}

}  // namespace

std::string model_text(const ModelLayout& m, const ModelLayoutOptions& o) {
  std::string out = fmt::format(
      "{}: {} elements, zero1 {}, zero2 {}, zero3 {}, {} blocks, at most {} segment{}{}\n\n",
      m.name, numel_of(m), o.degrees.zero1, o.degrees.zero2, o.degrees.zero3, name_of(o.block),
      o.max_segments, o.max_segments == 1 ? "" : "s", o.orient ? ", oriented" : "");
  out += table_of(m);
  out += fmt::format("proven bound on the padding of the zero1 shards: {:.3f}%\n",
                     100 * m.bound_padding1());
  for (const GroupLayout& g : m.groups) out += draw_group(g);
  return out;
}

std::string model_json(const ModelLayout& m, const ModelLayoutOptions& o) {
  json groups = json::array();
  for (const GroupLayout& g : m.groups) groups.push_back(group_json(g));
  return json{{"model", m.name},
              {"block", name_of(o.block)},
              {"zero1", o.degrees.zero1},
              {"zero2", o.degrees.zero2},
              {"zero3", o.degrees.zero3},
              {"alignment", o.alignment},
              {"segments", o.max_segments},
              {"orient", o.orient},
              {"numel", numel_of(m)},
              {"padding", m.padding1()},
              {"padding_zero3", m.padding3()},
              {"bound_padding", m.bound_padding1()},
              {"gap", gap_of(m)},
              {"exact", m.exact()},
              {"ms", m.milliseconds},
              {"groups", groups}}
             .dump() +
         "\n";
}

}  // namespace dovetail::plan
