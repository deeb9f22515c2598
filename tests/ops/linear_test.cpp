#include "dovetail/ops/linear.h"

#include "testing.h"

namespace dovetail::ops {
namespace {

using namespace testing;

struct Case {
  at::ScalarType type;
  GemmPath path;
};

const std::vector<Case> kCases = {{at::kFloat, GemmPath::aten},
                                  {at::kBFloat16, GemmPath::aten},
                                  {at::kBFloat16, GemmPath::widen}};

at::Tensor leaf(const at::Tensor& t) { return t.detach().clone().set_requires_grad(true); }

struct Result {
  at::Tensor y, dx, dw, db;
};

template <class F>
Result run(F&& f, const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
           const at::Tensor& g) {
  Result r;
  at::Tensor lx = leaf(x), lw = w.detach().set_requires_grad(true), lb = b.defined() ? leaf(b) : b;
  r.y = f(lx, lw, lb);
  r.y.backward(g);
  r.dx = lx.grad(), r.dw = lw.grad();
  if (b.defined()) r.db = lb.grad();
  return r;
}

// Against fp64: sizes around the panel (64 rows at least), odd sizes, zero rows, any leading
// dimensions.
TEST(Linear, ValuesAndGradients) {
  torch::manual_seed(1);
  struct Shape {
    std::vector<int64_t> lead;
    int64_t in, out;
  };
  for (const Case& c : kCases)
    for (const Shape& s : std::vector<Shape>{{{7}, 5, 3},
                                             {{2, 3}, 33, 65},
                                             {{0}, 4, 6},
                                             {{1}, 1, 1},
                                             {{2, 0}, 3, 2},
                                             {{3, 2, 5}, 17, 129},
                                             {{9}, 5000, 200},
                                             {{4}, 0, 3},
                                             {{4}, 3, 0},
                                             {{}, 6, 4}})
      for (bool with_bias : {false, true}) {
        std::vector<int64_t> xs = s.lead, ys = s.lead;
        xs.push_back(s.in), ys.push_back(s.out);
        const auto x = torch::randn(xs).to(c.type), w = torch::randn({s.out, s.in}).to(c.type),
                   g = torch::randn(ys).to(c.type);
        const auto b = with_bias ? torch::randn({s.out}).to(c.type) : at::Tensor();
        const Matmul matmul(std::make_shared<Workspace>(), c.path);
        const Result got = run(
            [&](auto& x, auto& w, auto& b) { return linear_layer(x, w, b, matmul); }, x, w, b, g);
        const Result want =
            run([&](auto& x, auto& w, auto& b) { return at::linear(x, w, b); }, x.to(at::kDouble),
                w.to(at::kDouble), b.defined() ? b.to(at::kDouble) : b, g.to(at::kDouble));
        const double bound = bound_of(c.type);
        EXPECT_EQ(got.y.scalar_type(), c.type);
        expect_close(got.y, want.y, bound, "y");
        expect_close(got.dx, want.dx, bound, "dx");
        expect_close(got.dw, want.dw, bound, "dw");
        if (with_bias) expect_close(got.db, want.db, bound, "db");
      }
}

// Strided operands give what contiguous ones give.
TEST(Linear, AnyStrides) {
  torch::manual_seed(2);
  for (const Case& c : kCases) {
    const auto x = torch::randn({40, 24}).to(c.type), w = torch::randn({72, 24}).to(c.type),
               g = torch::randn({40, 72}).to(c.type);
    const Matmul matmul(nullptr, c.path);
    const auto f = [&](auto& x, auto& w, auto& b) { return linear_layer(x, w, b, matmul); };
    const Result want = run(f, x, w, {}, g);
    const auto wt = w.t().contiguous().t();
    const auto wide = torch::zeros({72, 48}, w.options());
    wide.slice(1, 0, 48, 2).copy_(w);
    for (const at::Tensor& strided : {wt, wide.slice(1, 0, 48, 2)}) {
      const Result got = run(f, x.t().contiguous().t(), strided, {}, g.t().contiguous().t());
      expect_close(got.y, want.y, bound_of(c.type));
      expect_close(got.dx, want.dx, bound_of(c.type));
      expect_close(got.dw, want.dw, bound_of(c.type));
    }
  }
}

TEST(Linear, WritesWeightGradientIntoTheSink) {
  torch::manual_seed(3);
  for (const Case& c : kCases)
    for (bool transposed : {false, true}) {
      const auto w = leaf(torch::randn({70, 30}).to(c.type));
      const auto x1 = leaf(torch::randn({11, 30}).to(c.type)),
                 x2 = leaf(torch::randn({4, 30}).to(c.type));
      const Matmul matmul(nullptr, c.path);
      const auto flat = torch::zeros({70 * 30 + 8}, w.options());
      const auto run_view = flat.narrow(0, 3, 70 * 30);
      const auto sink = std::make_shared<FlatSink>(transposed ? run_view.view({30, 70}).t()
                                                              : run_view.view({70, 30}));

      linear_layer(x1, w, {}, matmul, sink).sum().backward();
      EXPECT_EQ(sink->requests, 1);
      EXPECT_FALSE(w.grad().defined());
      const auto g1 = torch::ones({11, 70}, w.options()), g2 = torch::ones({4, 70}, w.options());
      at::Tensor first = torch::empty({70, 30}, w.options()), second = torch::empty_like(first);
      matmul.weight_grad(g1, x1.detach(), first);
      matmul.weight_grad(g2, x2.detach(), second);
      EXPECT_TRUE(transposed || same_bits(sink->view, first));
      expect_close(sink->view, first, bound_of(c.type));

      linear_layer(x2, w, {}, matmul, sink).sum().backward();
      EXPECT_EQ(sink->requests, 2);
      expect_close(sink->view, first + second, bound_of(c.type));
      EXPECT_EQ(flat.narrow(0, 0, 3).abs().sum().item<float>(), 0);
      EXPECT_EQ(flat.narrow(0, 2103, 5).abs().sum().item<float>(), 0);

      sink->closed = true;
      linear_layer(x1, w, {}, matmul, sink).sum().backward();
      EXPECT_TRUE(same_bits(w.grad(), first));
    }
}

// autograd::grad wants gradients returned: of x alone (the sink is not asked), of the weight
// (returned, not written).
TEST(Linear, RequestsForParticularGradients) {
  const auto w = leaf(torch::randn({3, 4})), x = leaf(torch::randn({5, 4}));
  const auto sink = std::make_shared<FlatSink>(torch::empty({3, 4}));
  const auto run = [&] { return linear_layer(x, w, {}, Matmul(), sink).sum(); };
  const auto dx = torch::autograd::grad({run()}, {x});
  expect_close(dx[0], w.sum(0).expand({5, 4}), 1e-5);
  const auto dw = torch::autograd::grad({run()}, {w});
  expect_close(dw[0], x.sum(0).expand({3, 4}), 1e-5);
  EXPECT_EQ(sink->requests, 0);
  EXPECT_FALSE(w.grad().defined());
  // backward(inputs = {w}) accumulates into w alone, for which the sink is right.
  run().backward({}, false, false, std::vector<at::Tensor>{w});
  EXPECT_EQ(sink->requests, 1);
  EXPECT_FALSE(x.grad().defined());
}

TEST(Linear, SecondOrderLeavesTheSinkAlone) {
  torch::manual_seed(4);
  const auto x = torch::randn({5, 4}), w = torch::randn({3, 4}), b = torch::randn({3});
  const auto penalty = [&](auto&& f) {
    auto lx = leaf(x), lw = leaf(w), lb = leaf(b);
    const auto y = f(lx, lw, lb).pow(3).sum();
    const auto grads = torch::autograd::grad({y}, {lx, lw, lb}, {}, true, true);
    (grads[0].pow(2).sum() + grads[1].pow(2).sum() + grads[2].pow(2).sum()).backward();
    return std::vector<at::Tensor>{lx.grad(), lw.grad(), lb.grad()};
  };
  const auto sink = std::make_shared<FlatSink>(torch::empty({3, 4}));
  sink->closed = true;  // the last backward above would write there
  const auto got =
      penalty([&](auto& x, auto& w, auto& b) { return linear_layer(x, w, b, Matmul(), sink); });
  const auto want = penalty([&](auto& x, auto& w, auto& b) { return at::linear(x, w, b); });
  for (int i = 0; i < 3; ++i) expect_close(got[i], want[i], 1e-5);

  sink->closed = false;
  auto lx = leaf(x), lw = leaf(w);
  linear_layer(lx, lw, {}, Matmul(), sink).pow(2).sum().backward({}, true, true);
  EXPECT_EQ(sink->requests, 0);
  EXPECT_TRUE(lw.grad().requires_grad());
}

TEST(Linear, FrozenWeight) {
  Linear layer(4, 3, false);
  torch::NoGradGuard no_grad;
  layer.weight.normal_().set_requires_grad(false);
  torch::AutoGradMode with_grad(true);
  const auto sink = std::make_shared<FlatSink>(torch::empty({3, 4}));
  layer.set_sink(layer.weight, sink);
  const auto x = leaf(torch::randn({5, 4}));
  layer.forward(x).sum().backward();
  EXPECT_EQ(sink->requests, 0);
  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(layer.forward(x.detach()).requires_grad());
}

// The engine takes a parameter's bytes away after forward and gives others at backward.
TEST(Linear, SeesBytesThatAreReboundBeforeBackward) {
  for (const Case& c : kCases) {
    const auto slot_a = torch::randn({6, 4}).to(c.type), slot_b = slot_a.clone();
    const auto w = torch::empty({6, 4}, slot_a.options()).set_requires_grad(true);
    auto* storage = w.storage().unsafeGetStorageImpl();
    const auto bind = [&](const at::Tensor& slot) {
      storage->set_data_ptr_noswap(c10::DataPtr(slot.data_ptr(), slot.device()));
    };
    bind(slot_a);
    const auto x = leaf(torch::randn({3, 4}).to(c.type));
    const auto y = linear_layer(x, w, {}, Matmul(nullptr, c.path));
    const auto want = at::mm(torch::ones_like(y), slot_b.clone());
    slot_a.fill_(NAN);
    bind(slot_b);
    y.sum().backward();
    expect_close(x.grad(), want, bound_of(c.type));
    bind(at::empty({0}));
  }
}

TEST(Linear, SecondBackwardThroughReleasedGraphFails) {
  const auto x = leaf(torch::randn({5, 4})), w = leaf(torch::randn({3, 4}));
  const auto y = linear_layer(x, w).sum();
  y.backward({}, true);
  y.backward();
  expect_close(w.grad(), 2 * x.sum(0).expand({3, 4}), 1e-5);
  EXPECT_ANY_THROW(y.backward());
}

TEST(Linear, NamesWhatDoesNotFit) {
  const auto x = torch::zeros({2, 5}), w = torch::zeros({3, 4});
  EXPECT_NE(message_of<ConfigError>([&] {
              linear_layer(x, w);
            }).find("x [2, 5] does not fit weight [3, 4]"),
            std::string::npos);
  EXPECT_NE(message_of<ConfigError>([&] {
              linear_layer(torch::zeros({2, 4}).to(at::kBFloat16), w);
            }).find("BFloat16"),
            std::string::npos);
  EXPECT_THROW(linear_layer(torch::zeros({2, 4}), w, torch::zeros({4})), ConfigError);
  Linear layer(4, 3);
  EXPECT_THROW(layer.set_sink(layer.bias, nullptr), StateError);
}

// Where a parameter lies in a gather buffer depends on the degrees; the bits of a product must not.
TEST(Matmul, BitsDoNotDependOnPlacement) {
  torch::manual_seed(5);
  for (const Case& c : kCases) {
    const Matmul matmul(nullptr, c.path);
    for (const auto& [m, in, out] : std::vector<std::array<int64_t, 3>>{
             {64, 96, 80}, {5, 33, 7}, {256, 512, 264}, {1, 64, 48}, {1, 300, 33}, {48, 64, 1}, {33, 300, 1},
             {48, 1, 64}, {1, 64, 1}}) {
      const auto x = torch::randn({m, in}).to(c.type), w = torch::randn({out, in}).to(c.type),
                 g = torch::randn({m, out}).to(c.type);
      at::Tensor y, dx, dw = torch::empty_like(w);
      for (int64_t shift : {0, 1, 2, 4, 8, 13}) {
        const auto memory = torch::zeros({out * in + 64}, w.options());
        const auto moved = memory.narrow(0, shift, out * in).view({out, in});
        moved.copy_(w);
        const auto grad =
            torch::zeros({out * in + 64}, w.options()).narrow(0, shift, out * in).view({out, in});
        const auto y2 = matmul.forward(x, moved, {}), dx2 = matmul.input_grad(g, moved);
        matmul.weight_grad(g, x, grad);
        if (shift == 0) {
          y = y2, dx = dx2, dw = grad;
          continue;
        }
        std::ostringstream where;
        where << ", shift " << shift << ", m " << m << ", in " << in << ", out " << out << ", path " << int(c.path);
        EXPECT_TRUE(same_bits(y2, y)) << "y" << where.str();
        EXPECT_TRUE(same_bits(dx2, dx)) << "dx" << where.str();
        EXPECT_TRUE(same_bits(grad, dw)) << "dw" << where.str();
      }
    }
  }
}

TEST(Workspace, ReusesAndNeverOutgrowsWhatIsBorrowedAtOnce) {
  const auto workspace = std::make_shared<Workspace>();
  const void* first;
  {
    const auto a = Workspace::borrow(workspace, 100), b = Workspace::borrow(workspace, 50);
    first = a.matrix(10, 10).data_ptr();
    EXPECT_EQ(workspace->bytes(), 600);
  }
  EXPECT_EQ(Workspace::borrow(workspace, 80).matrix(8, 10).data_ptr(), first);
  {
    const auto c = Workspace::borrow(workspace, 200);
  }
  EXPECT_EQ(workspace->bytes(), 1000);
  EXPECT_THROW(Workspace::borrow(workspace, 10).matrix(1000, 1), InvariantError);
}

}  // namespace
}  // namespace dovetail::ops
