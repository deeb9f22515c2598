// Muon: momentum, orthogonalisation of each unit's matrix, update; three operations, of which only the second needs
// units complete. The formulas are those of torch.optim.Muon:
//
//   muon_momentum       buf = momentum * buf + (1 - momentum) * g
//                       u = nesterov ? momentum * buf + (1 - momentum) * g : buf
//   muon_orthogonalize  u <- NewtonSchulz(u)                         per matrix, head or expert
//   muon_apply          w <- (1 - lr * weight_decay) * w - lr * scale * u
//
// with g = grad * grad_scale and scale by the unit's rows and columns. u takes the place of the gradient. Fragments of
// u travel as bf16.
#pragma once

#include <string>
#include <string_view>

#include "dovetail/update/newton_schulz.h"
#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"

namespace dovetail {

enum class MuonScale : uint8_t {
  original,         // sqrt(max(1, rows / columns))
  match_rms_adamw,  // 0.2 * sqrt(max(rows, columns)): learning rate and decay as tuned for AdamW
};
std::string_view name_of(MuonScale scale);       // "original", "match_rms_adamw"
MuonScale parse_muon_scale(std::string_view name);  // throws ConfigError

struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  NewtonSchulz iteration = {};
  MuonScale scale = MuonScale::match_rms_adamw;
  // What is orthogonalised: "matrix" (of fused experts each expert's), or a kind of node, where the tensor has such
  // nodes ("head", or a name of TensorSpec::nodes); tensors without take the matrix.
  std::string unit = "matrix";
};

// The three operations, for the tensors that the rules give to "muon". Throws ConfigError for options out of range.
UpdateOps make_muon(const MuonOptions& options, const ParameterRules& rules);

Unit muon_unit(const MuonOptions& options, const TensorSpec& tensor);
float muon_scale(MuonScale scale, int64_t rows, int64_t columns);

}  // namespace dovetail
