// What a layout knows of a parameter: name, logical shape and the structure that blocks and units are cut from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dovetail {

enum class ParamKind : uint8_t {
  matrix,     // [out, in]
  embedding,  // [vocabulary, dim]
  vector,     // any 0- or 1-dimensional tensor
  conv,       // [out, in, ...]
  expert,     // fused experts [experts, rows, columns]
};

std::string_view name_of(ParamKind kind);
ParamKind parse_param_kind(std::string_view name);  // throws ConfigError

// Named parts of a tensor that an update may take as units: the q, k and v of a fused projection.
struct TensorNodes {
  std::string name;            // of the kind: "qkv"
  int dim = 0;                 // dimension that the parts lie along, 0 or 1
  std::vector<int64_t> edges;  // ascending from 0 to the dimension's size
  bool operator==(const TensorNodes&) const = default;
};

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;  // logical (row-major) shape; empty for a 0-dim tensor
  ParamKind kind = ParamKind::matrix;
  int64_t heads = 0;      // attention heads that the tensor consists of; 0 where it has none
  int heads_dim = 0;      // dimension that the heads lie along: 0 = heads are runs of rows, 1 = runs of columns
  std::vector<TensorNodes> nodes = {};  // beyond "head" and "expert", which follow from heads and kind

  // Number of elements: 1 for a 0-dim tensor, 0 when a dimension is 0.
  int64_t numel() const;
  // Elements of one row: the product of all dims after the first; of the last dim alone for fused experts
  // and embeddings;
  // 1 for vectors. At least 1.
  int64_t row() const;
  bool operator==(const TensorSpec&) const = default;
};

// The kind that a shape suggests when nothing better is known: vector up to 1-d, matrix 2-d, conv above.
ParamKind kind_of_shape(const std::vector<int64_t>& shape);

// Throws ConfigError naming the tensor unless the nodes lie along dimension 0 or 1 of it and divide it.
void validate_nodes(const TensorSpec& tensor, const TensorNodes& nodes);

}  // namespace dovetail
