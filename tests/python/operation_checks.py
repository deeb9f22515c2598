"""Update operations in Python, layers that write their gradients, what fully_shard is told of weights."""

import torch
import torch.nn as nn

import dovetail
import models
from common import expect_error, full
from dovetail import Heads, MixedPrecisionPolicy, Nodes, Plan, fully_shard, optim

TOKENS = torch.arange(16).view(2, 8)


def decoder(shard=True, swap=False, **how):
    torch.manual_seed(6)
    model = models.Decoder(width=64)
    if swap:
        dovetail.nn.swap_linears(model)
    if shard:
        for block in model.blocks:
            fully_shard(block, **how)
        fully_shard(model, **{k: v for k, v in how.items() if k != "units"})
    return model


def train(model, opt, steps=3):
    for i in range(steps):
        model((TOKENS + 7 * i) % 64).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return [full(p.detach()) for p in model.parameters()]


class HeavyBall(optim.Operation):
    """SGD with momentum and decoupled decay, also over units."""

    def __init__(self, momentum=0.9, unit="element"):
        self.momentum, self._unit_kind = momentum, unit

    def unit(self, name, shape):
        return self._unit_kind if len(shape) == 2 else "element"

    def state(self, name, shape):
        return {"velocity": 0.0}

    def run(self, run, step):
        run.state["velocity"].mul_(self.momentum).add_(run.grad)
        run.weight.mul_(1 - step.lr * step.weight_decay).sub_(step.lr * run.state["velocity"])


class Normalised(optim.Operation):
    """Each unit's gradient at unit length: wrong unless the unit is whole."""

    def __init__(self, unit):
        self._unit_kind = unit

    def unit(self, name, shape):
        return self._unit_kind if len(shape) == 2 else "element"

    def cost(self, shape):
        return 3.0 * shape[0] * shape[1]

    def run(self, run, step):
        if len(run.shape) == 2:
            run.weight.sub_(step.lr * run.grad / run.grad.square().sum().sqrt().clamp_min(1e-12))
        else:
            run.weight.sub_(step.lr * run.grad)


def check_operations_of_ones_own(world):
    def reference():
        model = decoder(shard=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return train(model, opt)

    wanted = reference()
    for unit in ("element", "matrix", "tile:24x40"):
        model = decoder()
        got = train(model, optim.Operations(model.parameters(), [HeavyBall(unit=unit)], lr=0.1))
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6, msg=lambda m: f"{unit}: {m}")
    # Whole units, however they lie.
    model = decoder(shard=False)
    for i in range(3):
        model((TOKENS + 7 * i) % 64).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * (p.grad / p.grad.norm() if p.dim() == 2 else p.grad))
                p.grad = None
    wanted = [p.detach() for p in model.parameters()]
    for plan in (Plan(), Plan(block="matrix"), Plan(zero2=1), Plan(zero1=max(1, world.size // 2))):
        model = decoder(plan=plan)
        got = train(model, optim.Operations(model.parameters(), [Normalised("matrix")], lr=0.1))
        for g, w in zip(got, wanted):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def check_operations_in_groups_and_in_order(world):
    model = decoder()
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    before = [full(p.detach()).clone() for p in vectors]

    class Matrices(HeavyBall):
        def applies_to(self, name, shape):
            return len(shape) == 2

    class Vectors(HeavyBall):
        def applies_to(self, name, shape):
            return len(shape) < 2

    opt = optim.Operations([{"params": matrices}, {"params": vectors, "lr": 0.0}], [Matrices(unit="matrix"), Vectors()],
                           lr=0.1, weight_decay=0.1)
    assert len(opt.operations) == 2
    train(model, opt)
    for p, b in zip(vectors, before):
        torch.testing.assert_close(full(p.detach()), b, rtol=0, atol=0)
    assert all("velocity" in opt.state[p] and opt.state[p]["velocity"].shape == p.shape for p in matrices)
    # Other hyperparameters from the next step on, with the state so far.
    model, plain = decoder(), decoder(shard=False)
    opt = optim.Operations(model.parameters(), [HeavyBall(unit="matrix")], lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        got, wanted = train(model, opt, steps=2), train(plain, reference, steps=2)
        opt.operations[0].momentum = reference.param_groups[0]["momentum"] = 0.5
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def check_operations_that_cannot_be(world):
    class Broken(optim.Operation):
        def run(self, run, step):
            raise KeyError("broken on purpose")

    class Nowhere(optim.Operation):
        def applies_to(self, name, shape):
            return "head" not in name

    def attempt(op):
        model = decoder()
        train(model, optim.Operations(model.parameters(), [op], lr=0.1), steps=1)

    expect_error(KeyError, ["broken on purpose"], lambda: attempt(Broken()))
    expect_error(ValueError, ["head.weight"], lambda: attempt(Nowhere()))
    expect_error(ValueError, ["tile:RxC", "tile:8"], lambda: attempt(HeavyBall(unit="tile:8")))
    expect_error(ValueError, ["at least one"], lambda: optim.Operations(decoder().parameters(), []))
    expect_error(ValueError, ["Operation", "int"], lambda: optim.Operations(decoder().parameters(), [3]))


def check_units_of_weights(world):
    """Heads and named parts are units of Muon and of one's own operations; wrong ones are refused."""
    units = {"qkv.weight": [Nodes("qkv", (0, 64, 128, 192)), Heads(12)], "out.weight": Heads(4, dim=1)}
    plain = decoder(shard=False)
    for i in range(2):
        plain((TOKENS + 7 * i) % 64).square().mean().backward()
        with torch.no_grad():
            for n, p in plain.named_parameters():
                parts = p.grad.unflatten(0, (3, 64)) if n.endswith("qkv.weight") else [p.grad]
                if p.dim() == 2:
                    p.sub_(0.1 * torch.cat([g / g.norm() for g in parts]))
                else:
                    p.sub_(0.1 * p.grad)
                p.grad = None

    class Parts(Normalised):
        def unit(self, name, shape):
            return "qkv" if name.endswith("qkv.weight") else super().unit(name, shape)

    model = decoder(units=units)
    got = train(model, optim.Operations(model.parameters(), [Parts("matrix")], lr=0.1), steps=2)
    for g, w in zip(got, [p.detach() for p in plain.parameters()]):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    by_head, by_matrix = decoder(units=units), decoder()
    a = train(by_head, optim.Muon(by_head.parameters(), lr=0.1, unit="head"))
    b = train(by_matrix, optim.Muon(by_matrix.parameters(), lr=0.1))
    assert (a[2] - b[2]).abs().max() > 1e-3
    expect_error(ValueError, ["nothing.weight", "qkv.weight"], lambda: decoder(units={"nothing.weight": Heads(4)}))
    expect_error(ValueError, ["qkv.weight"], lambda: decoder(units={"qkv.weight": Nodes("qkv", (0, 7))}))
    for heads in (Heads(5), Heads(0), Heads(4, dim=2), Heads(4, dim=-1)):
        expect_error(ValueError, ["qkv.weight", str(heads)], lambda: decoder(units={"qkv.weight": heads}))


def check_main_weights_of_a_bf16_module(world):
    torch.manual_seed(6)
    model = models.Decoder(width=64).to(torch.bfloat16)
    expect_error(ValueError, ["float32", "bfloat16"], lambda: fully_shard(nn.Linear(2, 2).bfloat16())(torch.ones(2, 2)))
    for block in model.blocks:
        fully_shard(block, main_dtype=torch.float32)
    fully_shard(model, main_dtype=torch.float32)
    weight = model.head.weight
    assert weight.dtype == torch.float32
    seen = []
    model.blocks[0].qkv.register_forward_hook(lambda m, x, y: seen.append((m.weight.dtype, y.dtype)))
    opt = torch.optim.SGD(model.parameters(), lr=1e-5)
    before = full(weight.detach()).clone()
    train(model, opt, steps=1)
    assert seen[0] == (torch.bfloat16, torch.bfloat16)
    change = (full(weight.detach()) - before).abs()
    assert 0 < change.max() < 1e-4  # smaller than bf16 weights could take
    # A root without parameters of its own computes as the units below it.
    torch.manual_seed(6)
    stack = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16)
    for layer in stack:
        fully_shard(layer, main_dtype=torch.float32)
    fully_shard(stack, main_dtype=torch.float32)
    assert stack(torch.ones(2, 4)).dtype == torch.bfloat16
    expect_error(NotImplementedError, ["main_dtype"], lambda: fully_shard(nn.Linear(2, 2), main_dtype=torch.float16))


def check_linears_that_write_their_gradients(world):
    """Those of torch.nn.Linear within rounding, and autograd makes no gradient of a weight."""
    for how, rtol, atol in (({}, 1e-5, 1e-6), ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, 5e-2, 2e-3)):
        def run(swap):
            model = decoder(swap=swap, **how)
            assert isinstance(model.blocks[0].up, dovetail.nn.Linear) == swap
            with torch.no_grad():
                model(TOKENS)
            made = []
            for slot in model._unit().runtime.slots:
                slot.runtime.register_hook(lambda g, name=slot.name: made.append(name) if g is not None else None)
            model(TOKENS).sum().backward()
            assert ("up.weight" in made) != swap and "up.bias" in made and "norm.weight" in made, made
            model.zero_grad()
            return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

        for g, w in zip(run(True), run(False)):
            torch.testing.assert_close(g, w, rtol=rtol, atol=atol)
    # Without an engine it is an ordinary layer.
    plain = decoder(shard=False, swap=True)
    reference = decoder(shard=False)
    torch.testing.assert_close(plain(TOKENS), reference(TOKENS), rtol=0, atol=0)
    assert plain.state_dict().keys() == reference.state_dict().keys()
    # Frozen, used twice, without a bias, under autocast.
    twice = fully_shard(dovetail.nn.Linear(8, 8, bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        assert twice(torch.ones(2, 8)).dtype == torch.bfloat16
    twice.weight.requires_grad_(False)
    x = torch.ones(2, 8, requires_grad=True)
    twice(x).sum().backward()
    assert twice.weight.grad is None and x.grad is not None


def check_prefetch_that_users_name(world):
    model = decoder()
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    assert model.blocks[0]._unit().prefetch == 2
    expect_error(ValueError, ["Linear"], lambda: model.set_modules_to_forward_prefetch([nn.Linear(2, 2)]))
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, opt, steps=2)
    assert model._unit().runtime.prefetch == 2
    model(TOKENS).sum().backward()
    model.set_modules_to_forward_prefetch(list(model.blocks))
    model.zero_grad()
    got = train(model, opt, steps=2)  # on an engine made anew, with the state
    assert model._unit().runtime.prefetch == 3
    other = decoder()
    opt = optim.AdamW(other.parameters(), lr=1e-2)
    train(other, opt, steps=2)
    for g, w in zip(got, train(other, opt, steps=2)):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


def check_what_stays_gathered(world):
    """set_reshard_after_forward and _backward change memory and messages, never results."""
    wanted_model = decoder()
    wanted = train(wanted_model, torch.optim.SGD(wanted_model.parameters(), lr=0.1))
    model = decoder()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_reshard_after_backward(False)
    first = model.blocks[0]._unit()
    for i in range(3):
        loss = model((TOKENS + 7 * i) % 64).square().mean()
        assert first.gathered  # until its backward, since the second change too
        loss.backward()
        assert first.gathered == (i < 2)
        if i == 0:  # a new engine keeps what was set
            model.zero_grad()
            model.set_modules_to_forward_prefetch(list(model.blocks))
            assert first.gathered
            model(TOKENS).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if i == 1:
            model.set_reshard_after_backward(True)
            model.set_reshard_after_forward(False)
    for p, w in zip(model.parameters(), wanted):
        torch.testing.assert_close(full(p.detach()), w, rtol=0, atol=0)
    expect_error(ValueError, ["bool", "int"], lambda: model.set_reshard_after_forward(2))


def check_methods_beside_forward(world):
    class Scorer(nn.Linear):
        def score(self, x):
            return (x @ self.weight.t()).sum()

        def fails(self, x):
            raise KeyError("on purpose")

    torch.manual_seed(3)
    plain = Scorer(8, 8)
    torch.manual_seed(3)
    model = fully_shard(Scorer(8, 8))
    dovetail.register_fsdp_forward_method(model, "score")
    dovetail.register_fsdp_forward_method(model, "fails")
    dovetail.register_fsdp_forward_method(nn.Linear(2, 2), "anything")
    expect_error(ValueError, ["absent"], lambda: dovetail.register_fsdp_forward_method(model, "absent"))
    for m in (plain, model):
        m.score(torch.arange(8.0)).backward()
    torch.testing.assert_close(full(model.weight.grad), plain.weight.grad)
    expect_error(KeyError, ["on purpose"], lambda: model.fails(1))
    torch.testing.assert_close(model.score(torch.ones(8)), plain.score(torch.ones(8)))


def check_optimizers_of_groups(world):
    """Composed: what each of its optimizers alone does with the same parameters."""
    def split(model):
        hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n]
        taken = {id(p) for p in hidden}
        return hidden, [p for p in model.parameters() if id(p) not in taken]

    def run(make):
        model = decoder()
        return train(model, make(*split(model)))

    def composed(hidden, rest, **more):
        return optim.Composed([{"params": hidden, "optimizer": "muon", "momentum": 0.9, **more},
                               {"params": rest, "betas": (0.8, 0.9)}], lr=1e-2)

    wanted = run(lambda hidden, rest: optim.Muon(hidden + rest, lr=1e-2, momentum=0.9, betas=(0.8, 0.9)))
    for g, w in zip(run(composed), wanted):
        torch.testing.assert_close(g, w, rtol=0, atol=0)
    # A head that goes with the rest, at another rate: each part as if it were alone, since passes are the same.
    model, other = decoder(), decoder()
    hidden, rest = split(model)
    head = model.head.weight
    hidden = [p for p in hidden if p is not head]
    opt = optim.Composed([{"params": hidden, "optimizer": "muon"},
                          {"params": [head], "optimizer": "sgd", "momentum": 0.5, "lr": 0.1},
                          {"params": rest, "optimizer": "adamw"}], lr=1e-2)
    reference = optim.SGD(other.parameters(), lr=0.1, momentum=0.5, weight_decay=1e-2)
    got, all_sgd = train(model, opt, steps=1), train(other, reference, steps=1)
    names = [n for n, _ in model.named_parameters()]
    # Its rate is held as a multiple of the others'.
    place = names.index("head.weight")
    torch.testing.assert_close(got[place], all_sgd[place], rtol=1e-6, atol=1e-8)
    assert {tuple(sorted(opt.state[p])) for p in hidden} == {("momentum", "step")}
    assert sorted(opt.state[head]) == ["momentum_buffer", "step"]
    assert {tuple(sorted(opt.state[p])) for p in rest} == {("exp_avg", "exp_avg_sq", "step")}
    opt.param_groups[1]["lr"] = 0.0
    before = full(head.detach()).clone()
    train(model, opt, steps=1)
    torch.testing.assert_close(full(head.detach()), before, rtol=0, atol=0)
    # State goes into another one.
    state = opt.state_dict()
    third = decoder()
    hidden, rest = split(third)
    hidden = [p for p in hidden if p is not third.head.weight]
    fresh = optim.Composed([{"params": hidden, "optimizer": "muon"},
                            {"params": [third.head.weight], "optimizer": "sgd", "momentum": 0.5},
                            {"params": rest}], lr=1e-2)
    fresh.load_state_dict(state)
    for p, q in zip(model.parameters(), third.parameters()):
        for field, value in opt.state[p].items():
            torch.testing.assert_close(full(fresh.state[q][field]), full(value), rtol=0, atol=0)
    # What cannot be.
    params = list(third.parameters())
    expect_error(ValueError, ["group 0", "lion", "muon"], lambda: optim.Composed(params, optimizer="lion"))
    expect_error(ValueError, ["group 0", "adamw", "momentum"],
                 lambda: optim.Composed([{"params": params, "momentum": 0.1}]))
    expect_error(ValueError, ["group 1", "group 0", "eps"],
                 lambda: optim.Composed([{"params": params[:1], "eps": 1e-3}, {"params": params[1:]}]))
    twice = optim.Composed([{"params": params[:1]}, {"params": params[1:]}])
    twice.param_groups[0]["eps"] = 1e-3
    expect_error(ValueError, ["group 1", "group 0", "eps"], lambda: twice.step())
