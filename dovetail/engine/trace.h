// What one rank does when: spans that nest, each of one kind of work. Recorded only while somebody asked for it
// (Engine::start_trace).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dovetail {

enum class Doing : uint8_t {
  compute,  // forward and backward, and whatever else is none of the others
  wait,     // for other ranks
  reduce,   // sums of gradients over ranks, and zeroing and adding them before
  update,   // norm and update operations
  encode,   // runtime parameters from main weights
};
inline constexpr int kDoings = 5;
std::string_view name_of(Doing doing);

struct TraceSpan {
  std::string name;
  Doing doing = Doing::compute;
  int64_t begin = 0, end = 0;  // nanoseconds since the trace began
  int64_t own = 0;             // of these, spent in no span inside it
};

// One thread records. Spans end in the reverse order of their beginnings.
class Trace {
 public:
  // `blocked`: nanoseconds that this rank has waited for others so far (comm::Group::blocked). What passes of them in a
  // span, and in none inside it, becomes spans of waiting between those inside it, as early as they fit: when it was is
  // not known.
  explicit Trace(std::function<int64_t()> blocked);

  void begin(Doing doing, std::string name);
  void end();

  const std::vector<TraceSpan>& spans() const { return spans_; }  // ended ones
  // Own time of all spans by kind; their sum is the time of the outermost spans.
  std::array<int64_t, kDoings> totals() const;

 private:
  struct Open {
    TraceSpan span;
    int64_t inside = 0;          // time of spans inside
    int64_t blocked = 0;         // at the beginning
    int64_t blocked_inside = 0;  // in spans inside
    int64_t inside_ended = 0;    // the last span inside; at first the own beginning
    std::vector<std::pair<int64_t, int64_t>> gaps;  // between spans inside: begin, end
  };
  int64_t now() const;

  const std::function<int64_t()> blocked_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<Open> open_;
  std::vector<TraceSpan> spans_;
};

// A span of the block it stands in; nothing where there is no trace.
class TraceScope {
 public:
  TraceScope(Trace* trace, Doing doing, std::string_view verb, std::string_view unit = {});
  ~TraceScope() {
    if (trace_) trace_->end();
  }
  TraceScope(const TraceScope&) = delete;

 private:
  Trace* const trace_;
};

}  // namespace dovetail
