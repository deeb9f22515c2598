// Speed of the element operations on one thread, beside torch's own fused kernels where it has
// them. The candidates take turns round by round; the best round of each counts, and for adam8 its
// ratios to adamw of the same rounds.
//
// usage: update_bench [elements [rounds [name]]]     with a name: the candidates that begin with it
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "dovetail/base/math.h"
#include "dovetail/numerics/bf16.h"
#include "dovetail/numerics/blockwise8.h"
#include "dovetail/numerics/reproducible_sum.h"
#include "dovetail/update/adam8.h"
#include "dovetail/update/adamw.h"
#include "dovetail/update/sgd.h"

namespace {

using namespace dovetail;

struct Candidate {
  std::string name;
  int bytes;  // read and written per element
  std::function<void()> run;
  std::vector<double> times = {};  // seconds, one a round

  double best() const { return *std::min_element(times.begin(), times.end()); }
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

std::span<float> span_of(const at::Tensor& t) {
  return {t.data_ptr<float>(), static_cast<size_t>(t.numel())};
}

// Weight, gradient and two state fields.
struct Tensors {
  explicit Tensors(int64_t n)
      : w(at::randn({n})),
        g(at::randn({n}).mul_(1e-3)),
        m(at::zeros_like(w)),
        v(at::zeros_like(w)) {}
  at::Tensor w, g, m, v;
};

// Moments in 8 bits, zero at first.
struct Moments8 {
  explicit Moments8(int64_t n)
      : m_code(n, zero_code(CodeSign::with_sign)),
        v_code(n, zero_code(CodeSign::positive)),
        m_scale(ceil_div(n, kCodeBlock)),
        v_scale(m_scale) {}
  Adam8Moments spans() { return {m_code, m_scale, v_code, v_scale}; }
  std::vector<uint8_t> m_code, v_code;
  std::vector<float> m_scale, v_scale;
};

// Rounds of one candidate over the same rounds of another.
void print_ratios(const Candidate& a, const Candidate& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.times.size(); ++i) ratios.push_back(a.times[i] / b.times[i]);
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  fmt::print(
      "{} / {}: {:.2f} of the best rounds; round by round {:.2f} (median), {:.2f} to {:.2f}\n",
      a.name, b.name, a.best() / b.best(), median(ratios), *least, *most);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::stoll(argv[1]) : int64_t{1} << 25;
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 15;
  at::set_num_threads(1);
  const std::string only = argc > 3 ? argv[3] : "";
  Tensors a(n), b(n), c(n);
  Moments8 moments(n);
  at::Tensor step = at::full({}, 5.0);
  std::vector<uint16_t> half(static_cast<size_t>(n));
  double sink = 0;

  const AdamWOptions adamw{0.9, 0.95, 1e-8};
  const SgdOptions sgd{.momentum = 0.9};
  const StepContext context{.step = 5, .lr = 1e-4f};
  const ParameterFactors factors{.weight_decay = 0.1};
  std::vector<Candidate> all = {
      {"adamw", 28,
       [&] {
         adamw_update(adamw_coefficients(adamw, factors, context), span_of(a.w), span_of(a.g),
                      span_of(a.m), span_of(a.v));
       }},
      {"adam8", 16,
       [&] {
         adam8_update(adamw_coefficients(adamw, factors, context), span_of(c.w), span_of(c.g),
                      moments.spans());
       }},
      {"adamw, torch fused", 28,
       [&] {
         at::_fused_adamw_({b.w}, {b.g}, {b.m}, {b.v}, {}, {step}, 1e-4, 0.9, 0.95, 0.1, 1e-8,
                           false, false);
       }},
      {"sgd momentum", 20,
       [&] {
         sgd_momentum_update(sgd_coefficients(sgd, factors, context), false, span_of(a.w),
                             span_of(a.g), span_of(a.m));
       }},
      {"sgd momentum, torch fused", 20,
       [&] { at::_fused_sgd_({b.w}, {b.g}, {b.m}, 0.1, 0.9, 1e-4, 0.0, false, false, false); }},
      {"sum of squares", 4,
       [&] {
         ReproducibleSum sum;
         sum.add(span_of(a.g));
         sink += sum.result();
       }},
      {"norm, torch", 4, [&] { sink += b.g.norm().item<double>(); }},
      {"bf16 encode", 6, [&] { encode_bf16(span_of(a.g), half); }},
      {"bf16 encode, torch", 6, [&] { sink += b.g.to(at::kBFloat16).numel(); }},
      {"8-bit encode", 5,
       [&] {
         encode_blockwise8(CodeSign::with_sign, span_of(c.g), moments.m_code, moments.m_scale);
       }},
      {"8-bit decode", 5,
       [&] {
         decode_blockwise8(CodeSign::with_sign, moments.m_code, moments.m_scale, span_of(c.m));
       }},
      {"copy, torch", 8, [&] { b.m.copy_(b.g); }},
  };
  std::erase_if(all, [&](const Candidate& x) { return !x.name.starts_with(only); });
  for (int round = 0; round < rounds; ++round)
    for (Candidate& x : all) {
      const auto start = std::chrono::steady_clock::now();
      x.run();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      x.times.push_back(time.count());
    }
  fmt::print("{} elements, 1 thread, best of {} rounds\n", n, rounds);
  fmt::print("{:<28}{:>12}{:>12}{:>10}\n", "", "ns/element", "GElem/s", "GB/s");
  for (const Candidate& x : all)
    fmt::print("{:<28}{:>12.3f}{:>12.3f}{:>10.1f}\n", x.name, x.best() * 1e9 / n,
               n / x.best() * 1e-9, x.bytes * n / x.best() * 1e-9);
  const auto named = [&](std::string_view name) {
    return std::ranges::find(all, name, &Candidate::name);
  };
  if (const auto eight = named("adam8"), full = named("adamw");
      eight != all.end() && full != all.end())
    print_ratios(*eight, *full);
  return sink == 0.12345;  // keeps the results alive
}
