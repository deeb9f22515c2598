#pragma once

namespace dovetail {

// Processor cores that this process may run on, at least 1.
int usable_cores();

}  // namespace dovetail
