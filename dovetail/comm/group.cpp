#include "dovetail/comm/group.h"

#include "dovetail/base/error.h"

namespace dovetail::comm {

std::shared_ptr<std::byte> Group::allocate_together(int64_t bytes, const Identity& id) {
  DT_CHECK(false, "{}: {} bytes together in a group that shares no memory", id.describe(), bytes);
  return nullptr;
}

}  // namespace dovetail::comm
