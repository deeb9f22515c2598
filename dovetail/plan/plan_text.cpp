#include <algorithm>
#include <limits>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/layout/text.h"
#include "dovetail/plan/plan.h"

namespace dovetail::plan {
namespace {

constexpr int64_t kTextVersion = 1;
constexpr int64_t kMostInt = std::numeric_limits<int>::max();

std::string options_text(const PlanOptions& o) {
  return fmt::format(
      "world {}\ndegrees {} {} {}\nmain {}\nformat {}\nblock {}\nboundary {}\nalignment {}\nsegments {}\n"
      "reshard_after_forward {}\nprefetch {}\npending_reductions {}\nlocal_accumulation {}\n"
      "host_ranks {}\n",
      o.world, o.degrees.zero1, o.degrees.zero2, o.degrees.zero3, name_of(o.main), o.format, name_of(o.block),
      name_of(o.boundary), o.alignment, o.segments, o.reshard_after_forward, o.prefetch, o.pending_reductions,
      o.local_accumulation, o.host_ranks);
}

std::string tensor_text(size_t index, const TensorSpec& t) {
  std::string text = fmt::format("tensor {} {} {} {} heads {} along {}", index, quoted_name(t.name), name_of(t.kind),
                                 list_text(t.shape), t.heads, t.heads_dim);
  for (const TensorNodes& n : t.nodes)
    text += fmt::format(" nodes {} along {} {}", quoted_name(n.name), n.dim, list_text(n.edges));
  return text + "\n";
}

std::string segment_text(const SegmentLayout& s) {
  std::string text =
      fmt::format("segment shards {} {} {} bound {} tensors {}\n", s.shard1, s.shard2, s.shard3, s.bound,
                  s.placements.size());
  for (const Placement& p : s.placements)
    text += fmt::format("place {} at {} elements {} block {}\n", p.tensor, p.offset, p.numel, p.block);
  return text;
}

std::string group_text(size_t index, const GroupPlan& g) {
  std::string text =
      fmt::format("group {} {} backward_needs_parameters {} keep_after_forward {} buckets {}\n", index,
                  quoted_name(g.name), g.backward_needs_parameters, g.keep_after_forward, g.buckets.size());
  for (const BucketPlan& bucket : g.buckets) {
    text += fmt::format("bucket {} segments {}\n", bucket.format, bucket.segments.size());
    for (const SegmentLayout& s : bucket.segments) text += segment_text(s);
  }
  return text;
}

class PlanReader {
 public:
  explicit PlanReader(std::string_view text) : reader_(text, "plan") {}

  Plan read() {
    fact("dovetail-plan");
    reader_.number(kTextVersion, kTextVersion);
    read_options();
    const int64_t tensors = counted("tensors"), groups = counted("groups");
    for (int64_t t = 0; t < tensors; ++t) read_tensor(t);
    placed_.assign(tensors, false);
    for (int64_t g = 0; g < groups; ++g) read_group(g);
    fact("end");
    const auto missing = std::find(placed_.begin(), placed_.end(), false);
    if (missing != placed_.end())
      reader_.fail(fmt::format("tensor {} lies in no segment", missing - placed_.begin()));
    if (reader_.next_line()) reader_.fail("wanted nothing after \"end\"");
    return std::move(plan_);
  }

 private:
  // Goes to the next line, which must begin with this word.
  void fact(std::string_view name) {
    reader_.need_line(fmt::format("\"{}\"", name));
    reader_.expect(name);
  }

  int64_t counted(std::string_view name) {
    fact(name);
    return reader_.number();
  }

  // Runs `call`, whose errors know no lines.
  template <class Call>
  auto at_line(Call call) {
    try {
      return call();
    } catch (const Error& e) {
      reader_.fail(e.what());
    }
  }

  void read_options() {
    PlanOptions& o = plan_.options;
    o.world = (fact("world"), reader_.number(1));
    fact("degrees");
    o.degrees.zero1 = reader_.number(1);
    o.degrees.zero2 = reader_.number(1);
    o.degrees.zero3 = reader_.number(1);
    at_line([&] { validate(o.degrees, o.world); });
    fact("main");
    o.main = at_line([&] { return parse_dtype(reader_.word("a dtype")); });
    fact("format");
    o.format = at_line([&] { return format_named(reader_.word("a format")).name; });
    fact("block");
    o.block = at_line([&] { return parse_block_kind(reader_.word("a block")); });
    fact("boundary");
    o.boundary = at_line([&] { return parse_boundary(reader_.word("any, block or unit")); });
    o.alignment = (fact("alignment"), reader_.number(1));
    o.segments = (fact("segments"), static_cast<int>(reader_.number(1, 3)));
    o.reshard_after_forward = (fact("reshard_after_forward"), reader_.boolean());
    o.prefetch = (fact("prefetch"), static_cast<int>(reader_.number(0, kMostInt)));
    o.pending_reductions = (fact("pending_reductions"), static_cast<int>(reader_.number(0, kMostInt)));
    o.local_accumulation = (fact("local_accumulation"), reader_.boolean());
    o.host_ranks = (fact("host_ranks"), reader_.number(1));
    at_line([&] { validate(o); });
  }

  void read_tensor(int64_t index) {
    TensorSpec t;
    fact("tensor");
    reader_.number(index, index);
    t.name = reader_.name();
    t.kind = at_line([&] { return parse_param_kind(reader_.word("a parameter kind")); });
    t.shape = reader_.list();
    reader_.expect("heads");
    t.heads = reader_.number();
    reader_.expect("along");
    t.heads_dim = static_cast<int>(reader_.number(0, kMostInt));
    while (reader_.peek() == "nodes") {
      reader_.expect("nodes");
      TensorNodes n{.name = reader_.name(), .dim = 0, .edges = {}};
      reader_.expect("along");
      n.dim = static_cast<int>(reader_.number(0, kMostInt));
      n.edges = reader_.list();
      t.nodes.push_back(std::move(n));
    }
    at_line([&] { validate(t); });
    plan_.tensors.push_back(std::move(t));
  }

  void read_group(int64_t index) {
    GroupPlan g;
    fact("group");
    reader_.number(index, index);
    g.name = reader_.name();
    reader_.expect("backward_needs_parameters");
    g.backward_needs_parameters = reader_.boolean();
    reader_.expect("keep_after_forward");
    g.keep_after_forward = reader_.boolean();
    reader_.expect("buckets");
    for (int64_t left = reader_.number(); left > 0; --left) g.buckets.push_back(read_bucket());
    plan_.groups.push_back(std::move(g));
  }

  BucketPlan read_bucket() {
    BucketPlan bucket;
    fact("bucket");
    bucket.format = at_line([&] { return format_named(reader_.word("a format")).name; });
    reader_.expect("segments");
    for (int64_t left = reader_.number(); left > 0; --left) bucket.segments.push_back(read_segment());
    return bucket;
  }

  SegmentLayout read_segment() {
    const Degrees& d = plan_.options.degrees;
    SegmentLayout s;
    fact("segment");
    s.zero1 = d.zero1, s.zero2 = d.zero2, s.zero3 = d.zero3;
    reader_.expect("shards");
    s.shard1 = reader_.number();
    s.shard2 = reader_.number();
    s.shard3 = reader_.number();
    reader_.expect("bound");
    s.bound = reader_.number();
    reader_.expect("tensors");
    for (int64_t left = reader_.number(); left > 0; --left) s.placements.push_back(read_placement());
    at_line([&] { verify(s); });
    return s;
  }

  Placement read_placement() {
    Placement p;
    fact("place");
    p.tensor = reader_.number(0, std::ssize(plan_.tensors) - 1);
    if (placed_[p.tensor]) reader_.fail(fmt::format("tensor {} is placed twice", p.tensor));
    placed_[p.tensor] = true;
    reader_.expect("at");
    p.offset = reader_.number();
    reader_.expect("elements");
    p.numel = reader_.number(plan_.tensors[p.tensor].numel(), plan_.tensors[p.tensor].numel());
    reader_.expect("block");
    p.block = reader_.number(1);
    return p;
  }

  TextReader reader_;
  Plan plan_;
  std::vector<bool> placed_;
};

}  // namespace

std::string to_text(const Plan& plan) {
  std::string text = fmt::format("dovetail-plan {}\n", kTextVersion) + options_text(plan.options);
  text += fmt::format("tensors {}\ngroups {}\n", plan.tensors.size(), plan.groups.size());
  for (size_t t = 0; t < plan.tensors.size(); ++t) text += tensor_text(t, plan.tensors[t]);
  for (size_t g = 0; g < plan.groups.size(); ++g) text += group_text(g, plan.groups[g]);
  return text + "end\n";
}

Plan parse_plan(std::string_view text) { return PlanReader(text).read(); }

uint64_t hash_of(const Plan& plan) { return hash64(to_text(plan)); }

std::string first_difference(std::string_view a, std::string_view b) {
  const auto take_line = [](std::string_view& text) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    return line;
  };
  const auto show = [](bool over, std::string_view line) {
    return over ? std::string("the end of the text") : fmt::format("\"{}\"", line);
  };
  if (a == b) return {};
  int64_t number = 1;
  for (; !a.empty() || !b.empty(); ++number) {
    const bool a_over = a.empty(), b_over = b.empty();
    const std::string_view line_a = take_line(a), line_b = take_line(b);
    if (a_over != b_over || line_a != line_b)
      return fmt::format("line {}: {} against {}", number, show(a_over, line_a), show(b_over, line_b));
  }
  return fmt::format("line {}: one text lacks its last line end", number - 1);
}

}  // namespace dovetail::plan
