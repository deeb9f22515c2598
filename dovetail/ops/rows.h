// Rows of fp32 or bf16 tensors as fp32 spans: what the fused operations compute on. bf16 rows pass
// through a buffer of the calling task that stays in the first-level cache; fp32 rows are used
// where they lie.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/numerics/bf16.h"

namespace dovetail::ops {

// Elements that are worth handing to another thread.
inline constexpr int64_t kRowGrain = 1 << 14;

// Calls body(begin, end) over ranges of [0, rows), in parallel where rows of `width` elements are
// many.
template <class F>
void parallel_rows(int64_t rows, int64_t width, F&& body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kRowGrain / std::max<int64_t>(1, width)), body);
}

// Throws ConfigError unless `t` is fp32 or bf16 on the CPU.
inline void check_float_rows(const at::Tensor& t, std::string_view operation) {
  if ((t.scalar_type() != at::kFloat && t.scalar_type() != at::kBFloat16) || !t.device().is_cpu())
    raise<ConfigError>("{}: wants fp32 or bf16 on the CPU, got {} on {}", operation,
                       c10::toString(t.scalar_type()), t.device().str());
}

// Reads rows of up to `width` elements at offsets in elements. One reader per task.
class RowReader {
 public:
  RowReader(const at::Tensor& t, int64_t width)
      : data_(t.const_data_ptr()),
        bf16_(t.scalar_type() == at::kBFloat16),
        width_(width),
        buffer_(bf16_ ? width : 0) {}
  // Valid until the next read.
  const float* read(int64_t offset) { return read(offset, width_); }
  const float* read(int64_t offset, int64_t count) {
    if (!bf16_) return static_cast<const float*>(data_) + offset;
    const auto n = static_cast<size_t>(count);
    decode_bf16({static_cast<const uint16_t*>(data_) + offset, n}, std::span(buffer_).first(n));
    return buffer_.data();
  }

 private:
  const void* data_;
  bool bf16_;
  int64_t width_;
  std::vector<float> buffer_;
};

// Writes rows of up to `width` elements: fill what place() returns, then call commit(). One writer
// per task.
class RowWriter {
 public:
  RowWriter(const at::Tensor& t, int64_t width)
      : data_(t.mutable_data_ptr()),
        bf16_(t.scalar_type() == at::kBFloat16),
        width_(width),
        buffer_(bf16_ ? width : 0) {}
  float* place(int64_t offset) { return place(offset, width_); }
  float* place(int64_t offset, int64_t count) {
    offset_ = offset;
    count_ = static_cast<size_t>(count);
    return bf16_ ? buffer_.data() : static_cast<float*>(data_) + offset;
  }
  void commit() {
    if (bf16_)
      encode_bf16(std::span(buffer_).first(count_),
                  {static_cast<uint16_t*>(data_) + offset_, count_});
  }

 private:
  void* data_;
  bool bf16_;
  int64_t width_;
  int64_t offset_ = 0;
  size_t count_ = 0;
  std::vector<float> buffer_;
};

}  // namespace dovetail::ops
