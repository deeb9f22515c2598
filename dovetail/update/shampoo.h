// Shampoo (Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization",
// 2018), in tiles, with roots taken every few steps and grafted norms (Anil et al., "Scalable
// Second Order Optimization for Deep Learning", 2020). Three operations, of which only the second
// needs units complete; with G the gradient times grad_scale of one tile and t the step:
//
//   shampoo_graft         v <- beta2 v + (1 - beta2) g g         per element, only with rmsprop
//   shampoo_precondition  L <- beta2 L + (1 - beta2) G G^T,  R <- beta2 R + (1 - beta2) G^T G
//                         X = root(L), Y = root(R)               at step 1 and multiples of `every`
//                         D = s X G Y                            takes the place of the gradient
//   shampoo_apply         m <- beta1 m + (1 - beta1) d
//                         w <- w - lr weight_decay w - lr / (1 - beta1^t) m
//
// With beta2 = 1, L, R and v are plain sums (1 - beta2 is replaced by 1).
//
// root(A) = (A/c + epsilon lambda I)^(-1/4), lambda the largest eigenvalue of A/c; epsilon grows by
// what the smallest one is below 0, in units of lambda, through roundings. c = 1 - beta2^k corrects
// the bias of an average over the k steps that the tile has seen; 1 for sums.
//
// Tensors of fewer than two dimensions are runs of at most `block` elements g with g g^T in R alone
// and root(R) = (..)^(-1/2), the exponent for one dimension: Adagrad with a full matrix. Biases and
// norms usually do better with AdamW.
//
// s gives a tile's direction the norm of another method's step (Agarwal et al., "Disentangling
// Adaptive Gradient Methods from Learning Rates", 2020), whose learning rate then fits:
//   none     s = 1: for a gradient of full rank the first D is the nearest orthogonal matrix. |D|
//            is held to sqrt(min(rows, columns) c / (1 - beta2)), which roots of the statistics of
//            this very step could not exceed: older ones would blow up a gradient unlike those
//            before it, as after a time of zeros
//   sgd      |G|: learning rates of SGD without momentum
//   rmsprop  |G / sqrt(v / (1 - beta2^t))|: learning rates of AdamW. There is no eps: the quotient
//            cannot exceed 1 / sqrt(1 - beta2) (1 for sums), and is held to that where squares
//            leave the range of fp32
//
// Where a root cannot be relied on (matrix_root.h), the last good one of that side stays in use;
// before there is any, the side is left out: its X is I, or I / trace^(1/4) with grafting none,
// which is no more than the root would do in any direction. A tile whose gradient has a NaN or
// infinity keeps its state, and the gradient goes on as it is, to be seen in the weights; the
// engine skips such steps before they come here when it clips.
//
// Gradients of any magnitude: statistics have an exponent of two of their own, so that neither
// squares of 1e30 nor of 1e-30 leave the range. Gradients times a power of four give the same
// directions to the bit with grafting none, and times that power with sgd.
#pragma once

#include <span>
#include <string_view>

#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"

namespace dovetail {

enum class Grafting : uint8_t { none, sgd, rmsprop };
std::string_view name_of(Grafting grafting);     // "none", "sgd", "rmsprop"
Grafting parse_grafting(std::string_view name);  // throws ConfigError

struct ShampooOptions {
  double beta1 = 0.9;    // of the momentum, after preconditioning; 0 keeps none
  double beta2 = 0.99;   // of the statistics L, R and v; 1 sums them up
  double epsilon = 1e-6; // damping, relative to the largest eigenvalue
  int64_t block = 1024;  // most elements on a side of a tile
  int64_t every = 10;    // steps from root to root
  Grafting grafting = Grafting::rmsprop;
};

// The operations, in order, for the tensors that the rules give to "shampoo". Matrices are cut into
// tiles from their corner; of fused experts each expert's, of convolutions out x rest. Throws
// ConfigError for options out of range.
//
// State per element, fp32, zero at first: "graft_sq" (v), with rmsprop; "shampoo_momentum" (m),
// with beta1 > 0. State per tile of rows x columns, fp32, zero at first, symmetric matrices as
// triangles (matrix_root.h), without the left ones below two dimensions:
//   "shampoo_left", "shampoo_right"             L and R, divided by 2^e
//   "shampoo_left_root", "shampoo_right_root"   X and Y, divided by x and y
//   "shampoo_scale"                             e, c, x and y; x or y is 0 until there is a root
UpdateOps make_shampoo(const ShampooOptions& options, const ParameterRules& rules);

// Whether roots are taken in this step: a matter of the step alone.
bool shampoo_takes_roots(const ShampooOptions& options, int64_t step);

}  // namespace dovetail
