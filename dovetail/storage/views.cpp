#include "dovetail/storage/views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include "dovetail/base/error.h"

namespace dovetail {

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return at::kFloat;
    case DType::bf16: return at::kBFloat16;
    case DType::u8: return at::kByte;
    case DType::i64: return at::kLong;
  }
  DT_CHECK(false, "unknown dtype {}", static_cast<int>(dtype));
  __builtin_unreachable();
}

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::f32;
    case at::kBFloat16: return DType::bf16;
    case at::kByte: return DType::u8;
    case at::kLong: return DType::i64;
    default: raise<ConfigError>("dtype: wanted float32, bfloat16, uint8 or int64; got {}", c10::toString(type));
  }
}

at::Tensor tensor_at(std::byte* data, at::IntArrayRef shape, DType dtype) {
  return at::from_blob(data, shape, at::TensorOptions().dtype(scalar_type_of(dtype)));
}

at::Tensor tensor_in(const Memory& memory, int64_t offset, at::IntArrayRef shape, DType dtype) {
  return at::from_blob(
      memory.data + offset, shape, [owner = memory.owner](void*) {}, at::TensorOptions().dtype(scalar_type_of(dtype)));
}

at::Tensor tensor_of(const DataTree& tree, int64_t index, const Memory& memory) {
  const DataNode& node = tree.node(index);
  DT_CHECK_LE(tree.extent(index).end, memory.bytes, "node {}", tree.path(index));
  return at::from_blob(
      memory.data + node.offset, node.shape, node.strides, [owner = memory.owner](void*) {},
      at::TensorOptions().dtype(scalar_type_of(node.dtype)));
}

BindableStorage::BindableStorage(int64_t bytes, std::string message)
    : storage_(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                     at::DataPtr(nullptr, at::kCPU), nullptr, /*resizable=*/false)),
      bytes_(bytes),
      message_(std::move(message)) {
  unbind();
}

void BindableStorage::bind(const std::byte* data) {
  c10::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  impl->clear_data_ptr_access_error_msg_();
  impl->set_data_ptr_noswap(at::DataPtr(const_cast<std::byte*>(data), at::kCPU));
  bound_ = true;
}

void BindableStorage::unbind() {
  c10::StorageImpl* impl = storage_.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
  if (bytes_ > 0) impl->release_data_and_set_meta_custom_data_ptr_error_msg_(message_);
  bound_ = false;
}

at::Tensor BindableStorage::view(int64_t byte_offset, at::IntArrayRef shape, DType dtype) const {
  DT_CHECK_EQ(byte_offset % size_of(dtype), int64_t{0});
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(scalar_type_of(dtype)));
  t.unsafeGetTensorImpl()->set_storage_offset(byte_offset / size_of(dtype));
  t.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return t;
}

}  // namespace dovetail
