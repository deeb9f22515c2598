// The trace of a few steps, of all ranks: a file that Perfetto opens, and where the time of a step goes.
#pragma once

#include <string>

#include "dovetail/comm/group.h"
#include "dovetail/engine/trace.h"

namespace dovetail::trainer {

struct TraceReport {
  // Chrome's trace-event format: one process per rank, complete events ("X") in microseconds since the ranks' common
  // start.
  std::string json;
  // Milliseconds a step by kind of work, per rank and as their mean; the kinds of a row add up to its step.
  std::string table;
};

// Collective; rank 0 gets both texts, the others none. `steps`: how many the trace covers.
TraceReport report_trace(const Trace& trace, int64_t steps, comm::Group& world);

}  // namespace dovetail::trainer
