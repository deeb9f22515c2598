#include "dovetail/engine/trace.h"

#include <algorithm>
#include <utility>

#include "dovetail/base/error.h"

namespace dovetail {

std::string_view name_of(Doing doing) {
  switch (doing) {
    case Doing::compute: return "compute";
    case Doing::wait: return "wait";
    case Doing::reduce: return "reduce";
    case Doing::update: return "update";
    case Doing::encode: return "encode";
  }
  return "?";
}

Trace::Trace(std::function<int64_t()> blocked) : blocked_(std::move(blocked)) {}

int64_t Trace::now() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count();
}

void Trace::begin(Doing doing, std::string name) {
  Open open;
  open.span = {.name = std::move(name), .doing = doing, .begin = now()};
  open.inside_ended = open.span.begin;
  open.blocked = blocked_();
  open_.push_back(std::move(open));
}

void Trace::end() {
  DT_CHECK(!open_.empty(), "a trace ends more spans than it began");
  Open open = std::move(open_.back());
  open_.pop_back();
  TraceSpan& span = open.span;
  span.end = now();
  span.own = span.end - span.begin - open.inside;
  const int64_t blocked = blocked_() - open.blocked;
  int64_t waited = std::min(blocked - open.blocked_inside, span.own);
  if (span.doing == Doing::wait) waited = 0;
  open.gaps.push_back({open.inside_ended, span.end});
  for (const auto& [begin, end] : open.gaps) {
    const int64_t here = std::min(waited, end - begin);
    if (here <= 0) continue;
    spans_.push_back({"wait in " + span.name, Doing::wait, begin, begin + here, here});
    span.own -= here;
    waited -= here;
  }
  if (!open_.empty()) {
    Open& around = open_.back();
    around.gaps.push_back({around.inside_ended, span.begin});
    around.inside_ended = span.end;
    around.inside += span.end - span.begin;
    around.blocked_inside += blocked;
  }
  spans_.push_back(std::move(span));
}

std::array<int64_t, kDoings> Trace::totals() const {
  std::array<int64_t, kDoings> totals{};
  for (const TraceSpan& span : spans_) totals[static_cast<size_t>(span.doing)] += span.own;
  return totals;
}

TraceScope::TraceScope(Trace* trace, Doing doing, std::string_view verb, std::string_view unit) : trace_(trace) {
  if (!trace_) return;
  std::string name(verb);
  if (!unit.empty()) name.append(" ").append(unit);
  trace_->begin(doing, std::move(name));
}

}  // namespace dovetail
