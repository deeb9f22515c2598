// The block (granularity) of a tensor: the run of elements that no shard boundary may cut.
#pragma once

#include <cstdint>
#include <string_view>

#include "dovetail/layout/tensor_spec.h"

namespace dovetail {

enum class BlockKind : uint8_t { element, row, rows32, rows128, head, expert, matrix };

// "element", "row", "32-row", "128-row", "head", "expert", "matrix".
std::string_view name_of(BlockKind kind);
BlockKind parse_block_kind(std::string_view name);  // throws ConfigError

// Elements of one block of the tensor; at least 1 and at most max(1, numel). A block as large as the tensor
// is rigid.
//   element        1; so are vectors under every kind
//   row            TensorSpec::row()
//   32-row/128-row that many rows, within one expert; where an expert's rows are no multiple, the expert
//   head           all rows of a head where heads are runs of rows, else a row
//   expert         one expert; other matrices a row
//   matrix         the whole matrix; embeddings a row
int64_t block_elements(const TensorSpec& tensor, BlockKind kind);

// Elements that hold whole blocks of both sizes: their least common multiple, or the whole tensor where that is larger,
// which makes it rigid. Throws ConfigError naming the tensor for a block below 1.
int64_t common_block(const TensorSpec& tensor, int64_t a, int64_t b);

}  // namespace dovetail
