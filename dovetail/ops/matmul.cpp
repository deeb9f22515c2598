#include "dovetail/ops/matmul.h"

#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "dovetail/base/math.h"
#include "dovetail/numerics/bf16.h"

namespace dovetail::ops {
namespace {

constexpr int64_t kPanelElements = int64_t{1} << 18;  // 1 MiB of fp32: fits a core's L2
constexpr int64_t kGrain = 1 << 15;                   // elements that are worth a thread

// Output features of one panel of the weight.
int64_t panel_of(int64_t out, int64_t in) {
  const int64_t fit = round_down(kPanelElements / std::max<int64_t>(in, 1), 64);
  return std::min(std::max<int64_t>(fit, 64), std::max<int64_t>(out, 1));
}

bool rows_contiguous(const at::Tensor& t) { return t.size(1) <= 1 || t.stride(1) == 1; }

template <class F>
void for_rows(const at::Tensor& t, F&& row) {
  const int64_t columns = std::max<int64_t>(t.size(1), 1);
  at::parallel_for(0, t.size(0), std::max<int64_t>(kGrain / columns, 1),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t r = begin; r < end; ++r) row(r);
                   });
}

// `source` as fp32 in `lease`, with the shape of `source`; transposed in memory where the source
// is.
at::Tensor widen(const at::Tensor& source, const Workspace::Lease& lease) {
  if (!rows_contiguous(source) && rows_contiguous(source.t())) return widen(source.t(), lease).t();
  const at::Tensor target = lease.matrix(source.size(0), source.size(1));
  if (!rows_contiguous(source)) return target.copy_(source);
  const auto columns = static_cast<size_t>(source.size(1));
  const auto* in = reinterpret_cast<const uint16_t*>(source.const_data_ptr());
  auto* out = target.mutable_data_ptr<float>();
  const int64_t stride = source.stride(0);
  for_rows(source, [&](int64_t r) {
    decode_bf16({in + r * stride, columns}, {out + r * columns, columns});
  });
  return target;
}

// fp32 rows, contiguous, rounded into `target`.
void narrow_into(const at::Tensor& source, const at::Tensor& target) {
  if (!rows_contiguous(target) || !rows_contiguous(source)) {
    target.copy_(source);
    return;
  }
  const auto columns = static_cast<size_t>(source.size(1));
  const auto* in = source.const_data_ptr<float>();
  auto* out = reinterpret_cast<uint16_t*>(target.mutable_data_ptr());
  const int64_t from = source.stride(0), to = target.stride(0);
  for_rows(source,
           [&](int64_t r) { encode_bf16({in + r * from, columns}, {out + r * to, columns}); });
}

bool is_vector(const at::Tensor& t) { return t.size(0) == 1 || t.size(1) == 1; }

// A product with a vector comes from kernels that begin at the next aligned element, so that their sums depend on where
// operands lie (MKL's on AMD); those of matrices pack what they read.
constexpr uintptr_t kVectorAlignment = 64;
bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kVectorAlignment == 0;
}

// `weight` where its place does not tell in a product with `other`, else a copy.
at::Tensor placed(const at::Tensor& weight, const at::Tensor& other) {
  return is_aligned(weight) || !(is_vector(weight) || is_vector(other)) ? weight : weight.clone();
}

}  // namespace

GemmPath bf16_gemm_path() {
  static const GemmPath path = bf16_products_in_hardware() ? GemmPath::aten : GemmPath::widen;
  return path;
}

bool Matmul::widens(const at::Tensor& t) const {
  return bf16_path_ == GemmPath::widen && t.scalar_type() == at::kBFloat16 && t.device().is_cpu();
}

at::Tensor Matmul::forward(const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& bias) const {
  if (!widens(x)) {
    const at::Tensor w = placed(weight, x).t();
    return bias.defined() ? at::addmm(bias, x, w) : at::mm(x, w);
  }
  const int64_t m = x.size(0), in = x.size(1), out = weight.size(0), panel = panel_of(out, in);
  at::Tensor y = at::empty({m, out}, x.options());
  const auto x_lease = Workspace::borrow(workspace_, m * in);
  const auto panel_lease = Workspace::borrow(workspace_, panel * in);
  const auto y_lease = Workspace::borrow(workspace_, m * panel);
  const at::Tensor x32 = widen(x, x_lease);
  const at::Tensor bias32 = bias.defined() ? bias.to(at::kFloat) : bias;
  for (int64_t p = 0; p < out; p += panel) {
    const int64_t n = std::min(panel, out - p);
    const at::Tensor w32 = widen(weight.narrow(0, p, n), panel_lease);
    at::Tensor y32 = y_lease.matrix(m, n);
    at::mm_out(y32, x32, w32.t());
    if (bias.defined()) y32.add_(bias32.narrow(0, p, n));
    narrow_into(y32, y.narrow(1, p, n));
  }
  return y;
}

at::Tensor Matmul::input_grad(const at::Tensor& g, const at::Tensor& weight) const {
  if (!widens(g)) return at::mm(g, placed(weight, g));
  const int64_t m = g.size(0), out = g.size(1), in = weight.size(1), panel = panel_of(out, in);
  if (out == 0) return at::zeros({m, in}, g.options());
  at::Tensor dx = at::empty({m, in}, g.options());
  const auto g_lease = Workspace::borrow(workspace_, m * panel);
  const auto panel_lease = Workspace::borrow(workspace_, panel * in);
  const auto dx_lease = Workspace::borrow(workspace_, m * in);
  at::Tensor dx32 = dx_lease.matrix(m, in);
  for (int64_t p = 0; p < out; p += panel) {
    const int64_t n = std::min(panel, out - p);
    const at::Tensor g32 = widen(g.narrow(1, p, n), g_lease);
    const at::Tensor w32 = widen(weight.narrow(0, p, n), panel_lease);
    if (p == 0)
      at::mm_out(dx32, g32, w32);
    else
      dx32.addmm_(g32, w32);
  }
  narrow_into(dx32, dx);
  return dx;
}

void Matmul::weight_grad(const at::Tensor& g, const at::Tensor& x, const at::Tensor& out) const {
  if (!widens(g)) {
    at::Tensor target = is_aligned(out) || !is_vector(out) ? out : at::empty_like(out);
    at::mm_out(target, g.t(), x);
    if (!target.is_same(out)) out.copy_(target);
    return;
  }
  const int64_t m = g.size(0), rows = g.size(1), in = x.size(1), panel = panel_of(rows, in);
  const auto x_lease = Workspace::borrow(workspace_, m * in);
  const auto g_lease = Workspace::borrow(workspace_, m * panel);
  const auto panel_lease = Workspace::borrow(workspace_, panel * in);
  const at::Tensor x32 = widen(x, x_lease);
  const bool transposed = !rows_contiguous(out) && rows_contiguous(out.t());
  for (int64_t p = 0; p < rows; p += panel) {
    const int64_t n = std::min(panel, rows - p);
    const at::Tensor g32 = widen(g.narrow(1, p, n), g_lease);
    at::Tensor panel32 = transposed ? panel_lease.matrix(in, n) : panel_lease.matrix(n, in);
    if (transposed)
      at::mm_out(panel32, x32.t(), g32);
    else
      at::mm_out(panel32, g32.t(), x32);
    narrow_into(panel32, transposed ? out.narrow(0, p, n).t() : out.narrow(0, p, n));
  }
}

}  // namespace dovetail::ops
