#include "dovetail/trainer/shard_map.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "dovetail/trainer/html.h"

namespace dovetail::trainer {
namespace {

constexpr double kWidth = 1080, kLeft = 4, kBar = 26, kStrip = 74, kHeading = 22;
constexpr int64_t kMostShards = 256;  // narrower ones are not drawn apart

struct Strip {
  const SegmentLayout* layout;
  std::string name;
};

// Groups [first, last] that differ in nothing but their tensors' names.
struct Alike {
  size_t first, last;
};

bool alike(const plan::Plan& plan, const plan::GroupPlan& a, const plan::GroupPlan& b) {
  if (a.buckets.size() != b.buckets.size() || a.name.empty() || b.name.empty()) return false;
  for (size_t i = 0; i < a.buckets.size(); ++i) {
    const auto &s = a.buckets[i].segments, &t = b.buckets[i].segments;
    if (a.buckets[i].format != b.buckets[i].format || s.size() != t.size()) return false;
    for (size_t j = 0; j < s.size(); ++j) {
      if (s[j].shard1 != t[j].shard1 || s[j].placements.size() != t[j].placements.size())
        return false;
      for (size_t k = 0; k < s[j].placements.size(); ++k) {
        const Placement &p = s[j].placements[k], &q = t[j].placements[k];
        if (p.offset != q.offset || plan.tensors[p.tensor].shape != plan.tensors[q.tensor].shape)
          return false;
      }
    }
  }
  return true;
}

std::vector<Alike> runs_of_groups(const plan::Plan& plan) {
  std::vector<Alike> runs;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (!runs.empty() && alike(plan, plan.groups[runs.back().first], plan.groups[g]))
      runs.back().last = g;
    else runs.push_back({g, g});
  }
  return runs;
}

// The longest form of a tensor's name that fits: within its group, without ".weight", its last
// part; or nothing.
std::string fitting_name(std::string name, const std::string& group, double width) {
  auto fits = [&] { return width > 5.4 * static_cast<double>(name.size()) + 4; };
  if (!group.empty() && name.starts_with(group + ".")) name.erase(0, group.size() + 1);
  if (fits()) return name;
  if (name.ends_with(".weight")) name.resize(name.size() - 7);
  if (!fits()) name.erase(0, name.rfind('.') + 1);
  return fits() ? name : "";
}

class MapWriter {
 public:
  explicit MapWriter(const plan::Plan& plan) : plan_(plan) {
    const auto mains =
        plan::rank_groups(plan.options.degrees, plan.options.world, plan::RankGroup::main);
    holders_.resize(static_cast<size_t>(plan.options.degrees.zero1));
    for (const auto& group : mains)
      for (size_t q = 0; q < group.size(); ++q) holders_[q].push_back(group[q]);
  }

  std::string write() {
    for (const Alike& run : runs_of_groups(plan_)) draw_groups(run);
    return fmt::format(
        "<figure><figcaption>Shard map: who holds what</figcaption><svg viewBox='0 0 {} {:.0f}' "
        "role='img'>"
        "<defs><pattern id='padding' width='6' height='6' patternUnits='userSpaceOnUse' "
        "patternTransform='rotate(45)'>"
        "<rect width='6' height='6' fill='#f1f3f5'/><rect width='1.5' height='6' "
        "fill='#adb5bd'/></pattern></defs>"
        "{}</svg></figure>",
        kWidth, y_ + 4, body_);
  }

 private:
  void text(double x, double y, const std::string& s, const char* attributes = "") {
    body_ +=
        fmt::format("<text x='{:.1f}' y='{:.1f}' {}>{}</text>", x, y, attributes, escape_html(s));
  }

  void draw_groups(const Alike& run) {
    const plan::GroupPlan& group = plan_.groups[run.first];
    std::string title = group.name.empty() ? "root" : group.name;
    if (run.last > run.first)
      title += fmt::format(" to {} ({} groups alike)", plan_.groups[run.last].name,
                           run.last - run.first + 1);
    for (const plan::BucketPlan& bucket : group.buckets)
      for (size_t s = 0; s < bucket.segments.size(); ++s) {
        const SegmentLayout& layout = bucket.segments[s];
        int64_t used = 0;
        for (const Placement& p : layout.placements) used += p.numel;
        std::string heading = fmt::format(
            "{} · {} · {} elements, padding {:.2f}%", title, bucket.format, layout.size(),
            100.0 * static_cast<double>(layout.size() - used) /
                static_cast<double>(std::max<int64_t>(1, layout.size())));
        if (bucket.segments.size() > 1)
          heading += fmt::format(" · segment {} of {}", s + 1, bucket.segments.size());
        draw_strip(layout, group.name, heading);
      }
  }

  void draw_strip(const SegmentLayout& layout, const std::string& group,
                  const std::string& heading) {
    if (layout.size() == 0) return;
    y_ += kHeading;
    text(kLeft, y_ - 6, heading, "class='tick'");
    scale_ = (kWidth - 2 * kLeft) / static_cast<double>(layout.size());
    body_ += fmt::format(
        "<rect x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{}' fill='url(#padding)' "
        "stroke='#adb5bd'/>",
        kLeft, y_ + 12, kWidth - 2 * kLeft, kBar);
    for (const Placement& p : layout.placements) draw_tensor(layout, p, group);
    draw_edges(layout);
    y_ += kStrip - kHeading;
  }

  double px(int64_t element) const { return kLeft + static_cast<double>(element) * scale_; }

  std::string holders_text(int64_t q) const {
    const auto& ranks = holders_[static_cast<size_t>(q)];
    return fmt::format(
        "rank {}",
        fmt::join(ranks.begin(), ranks.begin() + std::min<size_t>(ranks.size(), 8), ", "));
  }

  void draw_tensor(const SegmentLayout& layout, const Placement& p, const std::string& group) {
    const TensorSpec& tensor = plan_.tensors[static_cast<size_t>(p.tensor)];
    const int64_t step = std::max<int64_t>(1, layout.zero1 / kMostShards);
    for (int64_t q = 0; q < layout.zero1; q += step) {
      const Interval shard{layout.zero1_interval(q).begin,
                           layout.zero1_interval(std::min(q + step, layout.zero1) - 1).end};
      const Interval part = intersect(p.interval(), shard);
      if (part.empty()) continue;
      body_ += fmt::format(
          "<rect x='{:.2f}' y='{:.1f}' width='{:.2f}' height='{}' fill='{}'><title>{} [{}]: "
          "elements {} to {} on {}"
          "</title></rect>",
          px(part.begin), y_ + 12, std::max(0.3, px(part.end) - px(part.begin)), kBar,
          rank_color(holders_[static_cast<size_t>(q)].front()), escape_html(tensor.name),
          fmt::join(tensor.shape, ", "), part.begin - p.offset, part.end - p.offset,
          holders_text(q));
    }
    const double width = px(p.offset + p.numel) - px(p.offset);
    body_ += fmt::format(
        "<rect x='{:.2f}' y='{:.1f}' width='{:.2f}' height='{}' fill='none' stroke='#fff'/>",
        px(p.offset), y_ + 12, width, kBar);
    text(px(p.offset) + width / 2, y_ + 12 + kBar + 11, fitting_name(tensor.name, group, width),
         "class='small' text-anchor='middle'");
  }

  void draw_edges(const SegmentLayout& layout) {
    const int64_t per_zero3 = layout.zero1 / layout.zero3;
    if (layout.zero1 > kMostShards) return;
    for (int64_t q = 0; q < layout.zero1; ++q) {
      const Interval shard = layout.zero1_interval(q);
      const double width = px(shard.end) - px(shard.begin);
      const std::string name = holders_text(q);
      if (width > 5.6 * static_cast<double>(name.size()))
        text(px(shard.begin) + width / 2, y_ + 9, name, "class='small' text-anchor='middle'");
      if (q == 0) continue;
      const bool zero3_edge = q % per_zero3 == 0;
      body_ += fmt::format(
          "<line x1='{0:.2f}' x2='{0:.2f}' y1='{1:.1f}' y2='{2:.1f}' stroke='#212529' "
          "stroke-width='{3}'/>",
          px(shard.begin), y_ + (zero3_edge ? 2 : 12), y_ + 12 + kBar, zero3_edge ? 1.4 : 0.7);
    }
  }

  const plan::Plan& plan_;
  std::vector<std::vector<int>> holders_;  // per zero1 shard
  std::string body_;
  double y_ = 0, scale_ = 1;
};

}  // namespace

std::string rank_color(int64_t rank) {
  // The golden angle keeps neighbours apart for any number of ranks.
  const double hue = static_cast<double>((210 + rank * 137) % 360);
  const double saturation = rank / 8 % 2 ? 0.40 : 0.58, lightness = rank / 16 % 2 ? 0.72 : 0.64;
  auto channel = [&](double n) {
    const double k = std::fmod(n + hue / 30, 12);
    const double value = lightness - saturation * std::min(lightness, 1 - lightness) *
                                         std::max(-1.0, std::min({k - 3, 9 - k, 1.0}));
    return static_cast<int>(std::lround(255 * value));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(0), channel(8), channel(4));
}

std::string shard_map_svg(const plan::Plan& plan) { return MapWriter(plan).write(); }

}  // namespace dovetail::trainer
