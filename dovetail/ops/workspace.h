// fp32 scratch memory that outlives one call, so that a kernel in a training step faults in no
// fresh pages. One workspace serves all modules of a model; any number of threads may borrow from
// it at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace dovetail::ops {

class Workspace : public std::enable_shared_from_this<Workspace> {
 public:
  // Holds a piece of scratch and gives it back when it dies. Contents start undefined.
  class Lease {
   public:
    Lease(Lease&&) = default;
    ~Lease();
    // The first rows*columns elements as a contiguous matrix.
    at::Tensor matrix(int64_t rows, int64_t columns) const;

   private:
    friend class Workspace;
    Lease(std::shared_ptr<Workspace> owner, at::Tensor memory);
    std::shared_ptr<Workspace> owner_;  // null: plain memory, freed with the lease
    at::Tensor memory_;
  };

  // At least `elements` floats, 64-byte aligned. Without a workspace (null) the memory comes from
  // the allocator.
  static Lease borrow(const std::shared_ptr<Workspace>& workspace, int64_t elements);
  // Bytes held, borrowed or not.
  int64_t bytes() const;

 private:
  at::Tensor take(int64_t elements);
  void give_back(at::Tensor memory);

  mutable std::mutex mutex_;
  std::vector<at::Tensor> free_;
  int64_t bytes_ = 0;
};

}  // namespace dovetail::ops
