#include "tests/update/reference.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "dovetail/base/error.h"
#include "dovetail/numerics/bf16.h"

namespace dovetail {
namespace {

constexpr std::byte kUndefined{0xff};  // NaN as fp32, whatever the number of bytes

// Memory of one field during a call.
struct CallField {
  FieldUse use;
  DType dtype;
  int64_t row_bytes, stride_bytes, rows;
  std::vector<std::byte> bytes, before;

  std::byte* row(int64_t r) { return bytes.data() + r * stride_bytes; }

  void round_to_bf16() {
    for (int64_t r = 0; r < rows; ++r)
      for (auto* x = reinterpret_cast<float*>(row(r));
           x != reinterpret_cast<float*>(row(r) + row_bytes); ++x)
        *x = f32_from_bf16(bf16_from_f32(*x));
  }

  // Whether all that is not part of the unit is as it was.
  bool gaps_are_untouched() {
    for (int64_t r = 0; r + 1 < rows; ++r)
      if (std::memcmp(row(r) + row_bytes, before.data() + r * stride_bytes + row_bytes,
                      stride_bytes - row_bytes) != 0)
        return false;
    return true;
  }
};

std::vector<int64_t> random_cuts(int64_t n, int64_t multiple, std::mt19937_64& random) {
  std::vector<int64_t> cuts(random() % 12);
  for (int64_t& c : cuts) {
    c = static_cast<int64_t>(random() % static_cast<uint64_t>(n / multiple + 2)) * multiple;
    c = std::min(c, n);
  }
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

void fill(std::span<std::byte> bytes, DType dtype, float value) {
  const auto put = [&](auto x) {
    for (size_t at = 0; at < bytes.size(); at += sizeof(x))
      std::memcpy(bytes.data() + at, &x, sizeof(x));
  };
  switch (dtype) {
    case DType::f32: return put(value);
    case DType::bf16: return put(bf16_from_f32(value));
    case DType::u8: return put(static_cast<uint8_t>(value));
    case DType::i64: return put(static_cast<int64_t>(value));
  }
}

void check_dtype(const StateField& field, DType dtype) {
  DT_CHECK_EQ(name_of(field.dtype), name_of(dtype), "{}", field.name);
}

}  // namespace

std::vector<float> random_values(int64_t n, uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random);
  return values;
}

std::span<float> StateValues::f32() {
  check_dtype(field, DType::f32);
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

std::span<const float> StateValues::f32() const { return const_cast<StateValues*>(this)->f32(); }

std::span<const uint8_t> StateValues::u8() const {
  check_dtype(field, DType::u8);
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

Parameter::Parameter(TensorSpec tensor, uint64_t seed)
    : spec(std::move(tensor)),
      weight(random_values(spec.numel(), seed, 1)),
      grad(random_values(spec.numel(), seed + 1, 1)) {}

Parameter::Whole Parameter::whole(std::string_view name) {
  if (name == kWeight) return {DType::f32, nullptr, reinterpret_cast<std::byte*>(weight.data())};
  if (name == kGrad) return {DType::f32, nullptr, reinterpret_cast<std::byte*>(grad.data())};
  const auto at = state.find(name);
  DT_CHECK(at != state.end(), "no operation keeps a field \"{}\"", name);
  return {at->second.field.dtype, &at->second.field, at->second.bytes.data()};
}

void Parameter::call(const UpdateOp& op, const StepContext& context, const UnitPlace& place,
                     int64_t unit) {
  const int64_t stride = strided && unit >= 0 ? place.stride : place.columns;
  std::vector<CallField> copies;
  const auto origin = [&](const CallField& c, const Whole& w, int64_t r) {  // of a copy's row
    if (!w.state || w.state->per == StateField::Per::element)
      return w.data + (place.first + r * place.stride) * size_of(c.dtype);
    return w.data +
           w.state->values_in({place.first, place.first + place.columns}).begin * size_of(c.dtype);
  };
  for (const FieldUse& use : op.uses(spec)) {
    const Whole w = whole(use.name);
    CallField c{.use = use,
                .dtype = w.dtype,
                .row_bytes = 0,
                .stride_bytes = 0,
                .rows = 1,
                .bytes = {},
                .before = {}};
    if (!w.state || w.state->per == StateField::Per::element) {
      c.rows = place.rows;
      c.row_bytes = place.columns * size_of(c.dtype);
      c.stride_bytes = stride * size_of(c.dtype);
    } else {
      DT_CHECK(w.state->per == StateField::Per::block && unit < 0, "field \"{}\" for a unit",
               use.name);
      c.row_bytes =
          w.state->values_in({place.first, place.first + place.columns}).size() * size_of(c.dtype);
    }
    c.bytes.assign(c.rows == 0 ? 0 : (c.rows - 1) * c.stride_bytes + c.row_bytes, kUndefined);
    if (use.reads())
      for (int64_t r = 0; r < c.rows; ++r) std::memcpy(c.row(r), origin(c, w, r), c.row_bytes);
    if (use.reads() && use.travels_as_bf16 && unit >= 0) c.round_to_bf16();
    c.before = c.bytes;
    copies.push_back(std::move(c));
  }

  std::vector<Field> fields;
  for (CallField& c : copies)
    fields.push_back({c.use.name, c.dtype, c.bytes.data(), std::ssize(c.bytes) / size_of(c.dtype)});
  const std::vector<StateField> kept = op.state(spec);
  for (const StateField& f : kept) {
    if (f.per != StateField::Per::unit) continue;
    int64_t begin = 0;
    for (int64_t u = 0; u < unit; ++u) begin += f.unit_values[u];
    fields.push_back({f.name, f.dtype, state.at(f.name).bytes.data() + begin * size_of(f.dtype),
                      f.unit_values[unit]});
  }
  const int64_t scratch = unit < 0 ? 0 : op.workspace_bytes(spec, place);
  std::vector<std::byte> workspace(scratch + 64, kUndefined);
  std::byte* aligned =
      workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  op.run({.tensor = &spec,
          .index = 0,
          .place = place,
          .unit = unit,
          .row_stride = stride,
          .fields = fields,
          .workspace = {aligned, static_cast<size_t>(scratch)}},
         context);

  for (CallField& c : copies) {
    const Whole w = whole(c.use.name);
    EXPECT_TRUE(c.gaps_are_untouched()) << c.use.name;
    if (!c.use.writes()) {
      EXPECT_EQ(c.bytes, c.before) << c.use.name;
      continue;
    }
    if (c.use.travels_as_bf16 && unit >= 0) c.round_to_bf16();
    for (int64_t r = 0; r < c.rows; ++r) std::memcpy(origin(c, w, r), c.row(r), c.row_bytes);
  }
}

void Parameter::run(const UpdateOp& op, const StepContext& context,
                    const std::vector<int64_t>& cuts) {
  for (const StateField& f : op.state(spec)) {
    if (state.contains(f.name)) continue;
    StateValues values{f, std::vector<std::byte>(f.values(spec) * size_of(f.dtype))};
    fill(values.bytes, f.dtype, f.initial);
    state.emplace(f.name, std::move(values));
  }
  const Unit unit = op.unit(spec);
  if (unit.is_assembled()) {
    const std::vector<UnitPlace> places = unit_places(spec, unit);
    for (size_t u = 0; u < places.size(); ++u)
      call(op, context, places[u], static_cast<int64_t>(u));
    return;
  }
  std::vector<int64_t> edges = cuts;
  edges.insert(edges.begin(), 0);
  edges.push_back(spec.numel());
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    const int64_t n = edges[e + 1] - edges[e];
    call(op, context, {.first = edges[e], .rows = 1, .columns = n, .stride = n}, -1);
  }
}

at::Tensor to_torch(std::span<const float> values) {
  return torch::tensor(at::ArrayRef<float>(values.data(), values.size()), torch::kFloat32);
}

double relative_difference(std::span<const float> values, const at::Tensor& reference) {
  const at::Tensor wanted = reference.detach().to(torch::kFloat64).flatten();
  const at::Tensor got = to_torch(values).to(torch::kFloat64);
  return ((got - wanted).norm() / wanted.norm()).item<double>();
}

void expect_same_bits(const Parameter& a, const Parameter& b, const std::string& what) {
  const auto bytes = [](const std::vector<float>& v) { return std::as_bytes(std::span(v)); };
  EXPECT_TRUE(std::ranges::equal(bytes(a.weight), bytes(b.weight))) << "weight, " << what;
  ASSERT_EQ(a.state.size(), b.state.size()) << what;
  for (const auto& [name, values] : a.state)
    EXPECT_EQ(values.bytes, b.state.at(name).bytes) << name << ", " << what;
}

void expect_bad_adam_options_are_refused(
    const std::function<void(double, double, double)>& make) {
  EXPECT_THROW(make(1, 0.9, 1e-8), ConfigError);
  EXPECT_THROW(make(-0.1, 0.9, 1e-8), ConfigError);
  EXPECT_THROW(make(0.9, NAN, 1e-8), ConfigError);
  EXPECT_THROW(make(0.9, 0.9, 0), ConfigError);
  EXPECT_THROW(make(0.9, 0.9, 1e-60), ConfigError);
  EXPECT_NO_THROW(make(0, 0, 1e-8));
}

void expect_same_bits_for_any_split(const UpdateOp& op) {
  std::mt19937_64 random(11);
  const std::vector<std::vector<int64_t>> shapes = {
      {0}, {1}, {7}, {16}, {33}, {1001}, {4099}, {8192}, {33, 31}, {64, 96}, {5, 1024}, {3, 5, 7}};
  for (const std::vector<int64_t>& shape : shapes) {
    Parameter whole({.name = "w", .shape = shape, .kind = ParamKind::matrix}, 5);
    Parameter cut = whole;
    cut.strided = true;
    const int64_t n = whole.spec.numel();
    const int64_t multiple = uncut_elements(whole.spec, op.unit(whole.spec));
    for (int64_t step = 1; step <= 5; ++step) {
      whole.grad = cut.grad = random_values(n, 20 + static_cast<uint64_t>(step), 0.1f);
      const StepContext context{.step = step, .lr = 0.01f, .grad_scale = 0.37f};
      whole.run(op, context);
      cut.run(op, context, random_cuts(n, multiple, random));
      expect_same_bits(whole, cut, fmt::format("{} elements, step {}", n, step));
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace dovetail
