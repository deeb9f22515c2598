#include "dovetail/plan/shard_drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "dovetail/base/interval.h"

namespace dovetail::plan {
namespace {

constexpr int64_t kColumns = 64;
constexpr int64_t kShards = 16;  // drawn at most, half of them from either end
constexpr std::string_view kLetters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

char letter_of(size_t tensor) { return tensor < kLetters.size() ? kLetters[tensor] : '#'; }

class Drawing {
 public:
  Drawing(const Degrees& degrees, ShardSizes sizes, const std::vector<DrawnTensor>& tensors)
      : degrees_(degrees), sizes_(sizes), tensors_(tensors) {
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i].length > 0) order_.push_back(i);
    std::sort(order_.begin(), order_.end(),
              [&](size_t a, size_t b) { return tensors[a].offset < tensors[b].offset; });
  }

  std::string text() {
    std::string out;
    for (int64_t q = 0; q < degrees_.zero1; ++q) {
      if (degrees_.zero1 > kShards && q == kShards / 2) {
        out += fmt::format("  ... {} more\n", degrees_.zero1 - kShards);
        q = degrees_.zero1 - kShards / 2;
      }
      out += line(q);
    }
    for (size_t i : seen_) out += fmt::format("  {} {}\n", letter_of(i), tensors_[i].name);
    return out;
  }

 private:
  std::string line(int64_t q) {
    const int64_t ratio = degrees_.zero1 / degrees_.zero2;
    const int64_t s2 = q / ratio;
    const int64_t begin = std::min((q % ratio) * sizes_.zero1, sizes_.zero2) + s2 * sizes_.zero2;
    const int64_t end = std::min(begin + sizes_.zero1, (s2 + 1) * sizes_.zero2);
    const std::string label =
        degrees_.zero3 == degrees_.zero1
            ? fmt::format("{}", q)
            : fmt::format("{} of zero3 shard {}", q, q / (degrees_.zero1 / degrees_.zero3));
    std::string columns;
    int64_t held = 0;
    for (int64_t c = 0; c < kColumns; ++c) {
      const int64_t from = begin + c * sizes_.zero1 / kColumns;
      const Interval column{from, std::max(from + 1, begin + (c + 1) * sizes_.zero1 / kColumns)};
      columns += column_of(intersect(column, {begin, end}));
    }
    for (size_t i : overlapping({begin, end})) held += intersect(interval(i), {begin, end}).size();
    return fmt::format("  {:>6} |{}| {} held, {} padding\n", label, columns, held,
                       std::max<int64_t>(0, end - begin) - held);
  }

  char column_of(Interval column) {
    if (column.empty()) return ' ';
    char best = '.';
    int64_t covered = 0, most = 0, winner = -1;
    for (size_t i : overlapping(column)) {
      const int64_t n = intersect(interval(i), column).size();
      covered += n;
      if (n > most) most = n, best = letter_of(i), winner = static_cast<int64_t>(i);
    }
    if (column.size() - covered > most) return '.';
    if (winner >= 0) seen_.insert(winner);
    return best;
  }

  Interval interval(size_t i) const {
    return {tensors_[i].offset, tensors_[i].offset + tensors_[i].length};
  }

  // Tensors that have elements in the range, by offset.
  std::vector<size_t> overlapping(Interval range) const {
    auto first = std::partition_point(order_.begin(), order_.end(),
                                      [&](size_t i) { return interval(i).end <= range.begin; });
    std::vector<size_t> r;
    for (; first != order_.end() && tensors_[*first].offset < range.end; ++first)
      r.push_back(*first);
    return r;
  }

  const Degrees& degrees_;
  const ShardSizes sizes_;
  const std::vector<DrawnTensor>& tensors_;
  std::vector<size_t> order_;  // of the tensors that have elements, by offset
  std::set<size_t> seen_;
};

}  // namespace

std::string draw_shards(const Degrees& degrees, ShardSizes sizes,
                        const std::vector<DrawnTensor>& tensors) {
  if (sizes.zero2 == 0) return "  (nothing to hold)\n";
  return Drawing(degrees, sizes, tensors).text();
}

}  // namespace dovetail::plan
