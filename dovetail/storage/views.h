// Tensors over memory that torch did not allocate, and storages whose bytes come and go under live tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "dovetail/base/dtype.h"
#include "dovetail/layout/data_tree.h"
#include "dovetail/storage/memory.h"

namespace dovetail {

at::ScalarType scalar_type_of(DType dtype);
DType dtype_of(at::ScalarType type);  // throws ConfigError naming a type that Dovetail does not store

// A contiguous tensor over `data`, which must outlive it.
at::Tensor tensor_at(std::byte* data, at::IntArrayRef shape, DType dtype);
// The same, keeping `memory` alive.
at::Tensor tensor_in(const Memory& memory, int64_t offset, at::IntArrayRef shape, DType dtype);
// The view that node `index` of a tree describes, over the tree's allocation.
at::Tensor tensor_of(const DataTree& tree, int64_t index, const Memory& memory);

// One storage under any number of tensors. Bound, its tensors read and write the given bytes;
// unbound, touching any of them is an error with the given message. Tensors keep their identity,
// and their versions do not move.
class BindableStorage {
 public:
  // Unbound at first. `message` is what an access says then.
  BindableStorage(int64_t bytes, std::string message);

  // `data` must stay valid until unbind() or the next bind().
  void bind(const std::byte* data);
  void unbind();
  bool bound() const { return bound_; }

  // A tensor over the storage; may be made while unbound.
  at::Tensor view(int64_t byte_offset, at::IntArrayRef shape, DType dtype) const;

 private:
  c10::Storage storage_;
  int64_t bytes_;
  std::string message_;
  bool bound_ = false;
};

}  // namespace dovetail
