// Work objects of a backend under way, as a Work of ours.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "dovetail/comm/group.h"
#include "dovetail/comm/p2p_world.h"

namespace dovetail::comm {

using BackendWorks = std::vector<c10::intrusive_ptr<::c10d::Work>>;

class NativeWork final : public Work {
 public:
  // then: runs once in wait() when all works are done.
  NativeWork(std::shared_ptr<P2PMembers> members, const Header& header, BackendWorks works,
             std::function<void()> then = {});
  ~NativeWork() override;
  void wait() override;

 private:
  void wait_for_works();

  const std::shared_ptr<P2PMembers> members_;
  const Header header_;
  BackendWorks works_;
  std::function<void()> then_;
  bool finished_ = false;
};

}  // namespace dovetail::comm
