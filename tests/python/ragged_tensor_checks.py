"""Checks of the tensor itself: construction, element-wise operations, views, reductions, copies, errors."""

import copy
import pickle

import torch
from dovetail.ragged import Ragged, ShardedTensor, from_full, intervals_of, local_elements, sharded_tensor
from ragged_support import (SHAPES, close, cut, layout_kept, raises, replicate, same, shard, sharded, values, whole)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def check_kinds(world):
    for name, shape in SHAPES.items():
        t = sharded(world, name)
        assert type(t) is (DTensor if name == "rows" else ShardedTensor), name
        assert t.shape == shape and t.device_mesh is world.mesh and t.stride() == values(name).stride()
        assert intervals_of(t) == cut(name, shape, world.size)
        p = torch.nn.Parameter(t)
        assert type(p) is type(t) and isinstance(p, torch.nn.Parameter) and p.requires_grad and p.is_leaf
        same(p, values(name), name)
        same(p.redistribute(placements=[Replicate()]), values(name), name)
    assert sharded(world, "rows").placements == (Shard(0),)
    placement = sharded(world, "matrix").placements[0]
    assert isinstance(placement, Ragged) and not placement.is_shard() and not placement.is_replicate()
    assert not placement.is_partial() and pickle.loads(pickle.dumps(placement)) == placement
    # Whole rows, but not as torch.chunk cuts them.
    rows = ((0, 3),) + ((3, 24),) + ((24, 24),) * (world.size - 2)
    assert type(shard(world, values("rows"), rows)) is ShardedTensor


def check_storage_is_shared(world):
    for name in ("matrix", "rows"):
        intervals = cut(name, SHAPES[name], world.size)
        begin, end = intervals[world.rank]
        arena = torch.cat([torch.zeros(3), values(name).view(-1)[begin:end], torch.zeros(2)])
        p = torch.nn.Parameter(sharded_tensor(arena[3:3 + end - begin], world.mesh, intervals, SHAPES[name]))
        elements = local_elements(p)
        assert elements.shape == (end - begin,) and not elements.requires_grad
        with torch.no_grad():
            p.mul_(2)
        assert torch.equal(arena[3:-2], values(name).view(-1)[begin:end] * 2), name
        assert torch.equal(elements, arena[3:-2])
        # The owner swaps the storage: everything that shows the parameter follows.
        detached = p.detach()
        swapped = (arena[3:-2] + 1).view(p._local_tensor.shape)
        p._local_tensor.set_(swapped)
        same(p, values(name) * 2 + 1)
        if name == "matrix":
            same(detached, values(name) * 2 + 1)
            close(p.norm(), values(name).mul(2).add(1).norm())
        p._local_tensor.data = arena[3:-2].view(p._local_tensor.shape)
        same(p, values(name) * 2)


def check_arguments_are_checked(world):
    mesh, n = world.mesh, world.size
    even = tuple((i, i + 1) for i in range(n))
    good = torch.zeros(1)
    assert sharded_tensor(good, mesh, even, (n,)).shape == (n,)
    raises(ValueError, lambda: sharded_tensor(torch.zeros(2), mesh, even, (n,)), "shape (1,)")
    raises(ValueError, lambda: sharded_tensor(good, mesh, even, (n + 1,)), "elements")
    raises(ValueError, lambda: sharded_tensor(good, mesh, even[:-1], (n,)), "ranks")
    raises(ValueError, lambda: sharded_tensor(torch.zeros(1, 1), mesh, even, (n,)), "contiguous")
    raises(ValueError, lambda: sharded_tensor(replicate(world, good), mesh, even, (n,)), "plain")
    square = init_device_mesh("cpu", (2, n // 2))
    raises(ValueError, lambda: sharded_tensor(good, square, even, (n,)), "1-D mesh")
    raises(TypeError, lambda: intervals_of(replicate(world, good)), "Replicate")
    raises(TypeError, lambda: local_elements(good), "Tensor")


def check_from_full(world):
    for name in SHAPES:
        t = sharded(world, name)
        for full in (values(name, seed=3), replicate(world, values(name, seed=3)), values(name, seed=3).double()):
            made = from_full(full, t)
            layout_kept(made, t)
            same(made, full.to_local() if isinstance(full, DTensor) else full, name)
    t = sharded(world, "matrix")
    column_major = values("matrix").t().contiguous().t()
    same(from_full(column_major, t), values("matrix"))
    source = values("matrix")
    from_full(source, t).zero_()
    assert torch.equal(source, values("matrix")), "a copy"
    raises(ValueError, lambda: from_full(torch.zeros(7, 5), t), "(7, 5)", "(5, 7)")
    raises(ValueError, lambda: from_full(t, t), "Ragged")


ELEMENT_WISE = {
    "add": lambda a, b: a + b, "sub alpha": lambda a, b: a.sub(b, alpha=2), "scalar": lambda a, b: 3 - a / 7,
    "lerp": lambda a, b: a.lerp(b, 0.3), "addcdiv": lambda a, b: a.addcdiv(b, b.abs() + 1, value=.5),
    "where": lambda a, b: torch.where(a > b, a, b * 2), "maximum": torch.maximum, "max.other": torch.max,
    "clamp": lambda a, b: a.clamp(-.5, .5), "sqrt": lambda a, b: a.abs().sqrt(), "pow": lambda a, b: a ** 2,
    "eq": lambda a, b: a == b, "isnan": lambda a, b: (a / 0).isnan(), "isfinite": lambda a, b: (a / 0).isfinite(),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 9), "neg": lambda a, b: -a, "sign": lambda a, b: a.sign(),
    "to": lambda a, b: a.to(torch.float64), "bfloat16": lambda a, b: a.bfloat16() * 3, "int": lambda a, b: a.int() + 1,
    "zeros_like": lambda a, b: torch.zeros_like(a), "full_like": lambda a, b: torch.full_like(a, 2, dtype=torch.int32),
    "clone": lambda a, b: a.clone(memory_format=torch.preserve_format), "new_zeros": lambda a, b: a.new_zeros(a.shape),
    "new_full": lambda a, b: a.new_full(a.shape, 3.), "detach": lambda a, b: a.detach(), "data": lambda a, b: a.data,
    "0-dim": lambda a, b: a * torch.tensor(2., dtype=torch.float64), "out": lambda a, b: torch.add(a, b, out=a.clone()),
    "nan_to_num": lambda a, b: (a / 0).nan_to_num(), "mask": lambda a, b: _masked(a.clone(), b),
    "foreach": lambda a, b: torch._foreach_add(torch._foreach_mul([a, b], 2.), [b, a])[0],
    "ones_like": lambda a, b: torch.ones_like(a, dtype=torch.bool), "float": lambda a, b: a.double().float(),
}


def _masked(a, b):
    a[b > 0] = 1.25
    return a


def check_element_wise(world):
    for name in SHAPES:
        for op, call in ELEMENT_WISE.items():
            if name == "rows" and op in ("mask", "out", "nan_to_num", "max.other", "sub alpha"):
                continue  # stock DTensor has no rule for some of these
            a, b = sharded(world, name), sharded(world, name, seed=1)
            got = call(a, b)
            layout_kept(got, a)
            same(got, call(values(name), values(name, seed=1)), f"{op} of {name}")


def check_types_of_0_dim_results(world):
    half = sharded(world, "scalar", dtype=torch.float16)
    for other in (torch.tensor(2., dtype=torch.float64), torch.tensor(3), 2.5, 4):
        expected = values("scalar", torch.float16) * other
        same(half * other, expected, str(other))
    for other in (torch.tensor(2., dtype=torch.float64), replicate(world, torch.tensor(2., dtype=torch.float64))):
        same(sharded(world, "matrix", dtype=torch.float16) * other, values("matrix", torch.float16) * 2)


def check_in_place(world):
    calls = (lambda t, o: t.mul_(.9).add_(o, alpha=.1), lambda t, o: t.lerp_(o, .25), lambda t, o: t.copy_(o),
             lambda t, o: t.zero_(), lambda t, o: t.fill_(3), lambda t, o: t.sub_(1).div_(3).clamp_(min=0),
             lambda t, o: t.addcmul_(o, o, value=2), lambda t, o: torch._foreach_lerp_([t], [o], .5),
             lambda t, o: t.masked_fill_(o > 0, 0), lambda t, o: t.__iadd__(o))
    for name in SHAPES:
        for at, call in enumerate(calls):
            for kind in ("sharded", "replicate"):
                if name == "rows" and kind == "replicate" and at in (7, 8):
                    continue  # stock
                t, expected = sharded(world, name), values(name)
                storage = t._local_tensor.data_ptr()
                other = values(name, seed=1)
                call(t, sharded(world, name, seed=1) if kind == "sharded" else replicate(world, other))
                call(expected, other)
                same(t, expected, f"{at} {name} {kind}")
                assert t._local_tensor.data_ptr() == storage
    t = sharded(world, "matrix")
    row, column = torch.randn(7), torch.randn(5, 1)
    same(t * replicate(world, row) + replicate(world, column), values("matrix") * row + column)
    same(t.add_(replicate(world, row)), values("matrix") + row)
    target = replicate(world, values("matrix", seed=2))
    target.add_(sharded(world, "matrix"))  # a Replicate target with a sharded operand must not lose the update
    same(target, values("matrix", seed=2) + values("matrix"))
    same(target.mul(sharded(world, "matrix")), target.full_tensor() * values("matrix"))
    small = sharded(world, "scalar")  # the result is larger than what is sharded
    same(replicate(world, row) * small, row * values("scalar"))
    same(sharded(world, "matrix") * small, values("matrix") * values("scalar"))


def check_other_layouts_raise(world):
    a, b = sharded(world, "matrix"), sharded(world, "matrix", layout=1)
    assert intervals_of(a) != intervals_of(b)
    layouts = (str(a.placements[0]), str(b.placements[0]))
    for call in (lambda: a + b, lambda: a.add_(b), lambda: a.copy_(b), lambda: torch._foreach_add_([a], [b]),
                 lambda: torch._foreach_mul([a], [b]), lambda: torch.where(a > 0, b, 0.)):
        raises(RuntimeError, call, *layouts, "aten")
    rows = (5 + world.size - 1) // world.size
    stock = DTensor.from_local(values("matrix")[world.rank * rows:(world.rank + 1) * rows], world.mesh, [Shard(0)],
                               shape=(5, 7), stride=(7, 1))
    for call in (lambda: a + stock, lambda: a.copy_(stock), lambda: stock.add_(a),
                 lambda: torch._foreach_add_([a], [stock]), lambda: torch._foreach_add_([stock], [a])):
        raises(RuntimeError, call, str(a.placements[0]), "S", "layouts")
    raises(RuntimeError, lambda: a + values("matrix"), "plain", "from_full")
    raises(RuntimeError, lambda: a.add_(values("matrix")), "plain")
    same(a, values("matrix"), "untouched")
    assert torch.equal(a, b) and not torch.equal(a, sharded(world, "matrix", seed=1, layout=1))


def check_mutations_that_need_the_whole_raise(world):
    t = sharded(world, "matrix")
    for call in (lambda: t.cumsum_(0), lambda: t.index_add_(0, torch.tensor([0]), torch.ones(1, 7)), lambda: t.t_(),
                 lambda: t.resize_(3), lambda: t.unsqueeze_(0), lambda: t.set_(torch.zeros(3)), lambda: t.tril_(),
                 lambda: torch.nn.init.eye_(t), lambda: t.index_put_((torch.tensor([0]),), torch.tensor(1.))):
        raises(NotImplementedError, call, "aten", "in place", "element-wise")
    same(t, values("matrix"))
    p = torch.nn.Parameter(t)

    def assign(value):
        p.data = value

    raises(RuntimeError, lambda: assign(sharded(world, "matrix", seed=1)), ".data", "copy_")
    same(p, values("matrix"))


def check_whole_operations(world):
    t, full = sharded(world, "matrix"), values("matrix")
    x = torch.randn(7, 4)
    for got, expected in ((t @ replicate(world, x), full @ x), (t.cumsum(1), full.cumsum(1)),
                          (t.argmax(), full.argmax()), (t.softmax(-1), full.softmax(-1)),
                          (t.sum(0), full.sum(0)), (t.std(), full.std()),
                          (t.topk(3).values, full.topk(3).values), (t.norm(dim=1), full.norm(dim=1)),
                          (torch.cat([t, t]), torch.cat([full, full])), (t[torch.tensor(2)], full[2]),
                          (torch.stack([t, replicate(world, full)]), torch.stack([full, full])),
                          (t.new_zeros(3), torch.zeros(3)), (t.triu(), full.triu())):
        assert got.placements == (Replicate(),) or isinstance(got, ShardedTensor)
        same(got, expected)
    raises(RuntimeError, lambda: t @ x, "Tensor(shape (7, 4))", "distribute")


def check_views(world):
    for name in ("matrix", "kernel", "vector"):
        full, t = values(name), sharded(world, name)
        for view in (lambda a: a.view(-1), lambda a: a[1], lambda a: a[1:3], lambda a: a[-1:], lambda a: a.unsqueeze(0),
                     lambda a: a.flatten(), lambda a: a.reshape(1, -1), lambda a: a.chunk(2)[1], lambda a: a[2:2],
                     lambda a: a.unbind()[2], lambda a: a.narrow(0, 1, 2)):
            got, expected = view(t), view(full)
            assert isinstance(got, ShardedTensor)
            same(got, expected)
            got.add_(1)  # what is written to a view is in the tensor
            expected.add_(1)
            same(t, full)
    full, t = values("matrix"), sharded(world, "matrix")
    for view in (lambda a: a.t(), lambda a: a[:, 2], lambda a: a[1:, ::2], lambda a: a.t()[3], lambda a: a.diagonal(),
                 lambda a: a.view(7, 5).T, lambda a: a.split(3, 1)[1]):
        got, expected = view(t), view(full)
        same(got, expected)
        got.mul_(3)
        expected.mul_(3)
        same(t, full)
        t.add_(1)  # and the view sees what is written to the tensor
        full.add_(1)
        same(got + 0, expected)
    assert isinstance(sharded(world, "matrix").clone().detach_(), ShardedTensor)
    t[:, 1] = 5
    full[:, 1] = 5
    t[2, 3] = 6
    full[2, 3] = 6
    same(t, full)
    embedding = torch.nn.Embedding(5, 7, padding_idx=3)
    embedding.weight = torch.nn.Parameter(sharded(world, "matrix"))
    embedding._fill_padding_idx_with_zero()
    assert not embedding.weight.full_tensor()[3].any() and embedding.weight.full_tensor()[2].all()


REDUCTIONS = {"sum": torch.sum, "mean": torch.mean, "prod": torch.prod, "max": torch.max, "min": torch.min,
              "amax": torch.amax, "amin": torch.amin, "norm": torch.norm,
              "norm1": lambda t: torch.linalg.vector_norm(t, 1), "norm3": lambda t: torch.linalg.vector_norm(t, 3),
              "inf": lambda t: torch.linalg.vector_norm(t, float("inf")), "any": lambda t: (t > 2).any(),
              "-inf": lambda t: torch.linalg.vector_norm(t, float("-inf")), "all": lambda t: (t < 2).all(),
              "0": lambda t: torch.linalg.vector_norm(t, 0), "isnan": lambda t: t.isnan().any(),
              "isfinite": lambda t: t.isfinite().all(), "double": lambda t: t.sum(dtype=torch.float64),
              "norm double": lambda t: torch.linalg.vector_norm(t, dtype=torch.float64)}


def check_reductions(world):
    answers = []
    for name in SHAPES:
        if name == "rows":
            continue  # stock
        for dtype in (torch.float32, torch.bfloat16):
            for op, call in REDUCTIONS.items():
                t, full = sharded(world, name, dtype=dtype), values(name, dtype)
                try:
                    expected = call(full)
                except (RuntimeError, IndexError) as error:  # of no elements: torch's own error, but for norms
                    if op not in ("inf", "-inf"):
                        raises(type(error), lambda: call(t))
                    continue
                got = call(t)
                close(got, expected, f"{op} of {name} in {dtype}")
                alone = got.item()  # the global value on every rank, not a rank's part
                answers.append(repr(alone))
                close(torch.tensor(alone, dtype=expected.dtype), expected, f"{op} of {name} in {dtype}")
    assert all(other == answers for other in world.everyone(answers)), "the same bits on every rank"
    ones = torch.ones(514, dtype=torch.bfloat16)  # 259 is no bf16 number: the sum is rounded once, at the end
    same(shard(world, ones, ((0, 259), (259, 514)) + ((514, 514),) * (world.size - 2)).sum(), ones.sum())
    t = sharded(world, "vector")
    assert torch.linalg.vector_norm(sharded(world, "nothing"), float("inf")).item() == 0
    with torch.no_grad():
        t.view(-1)[17].fill_(float("nan"))
    assert t.isnan().any() and not t.isfinite().all() and t.sum().isnan() and t.max().isnan()
    assert not torch.equal(t, t) and torch.allclose(t, t, equal_nan=True) and not torch.allclose(t, t)
    assert torch.equal(sharded(world, "vector"), sharded(world, "vector"))
    assert torch.equal(sharded(world, "vector"), replicate(world, values("vector")))
    assert not torch.equal(sharded(world, "vector"), sharded(world, "matrix"))
    assert sharded(world, "scalar").item() == values("scalar").item()
    assert float(sharded(world, "few")) == float(values("few"))
    close((sharded(world, "kernel").int() * 3).sum(), (values("kernel").int() * 3).sum())


def check_random_fills(world):
    fills = (lambda t: t.normal_(1, 2), lambda t: t.uniform_(-1, 1), lambda t: t.bernoulli_(.3),
             lambda t: t.exponential_(), torch.nn.init.kaiming_uniform_, torch.nn.init.trunc_normal_,
             lambda t: t.copy_(torch.randn_like(t)), lambda t: t.copy_(torch.rand_like(t)))
    for at, fill in enumerate(fills):
        t, full = sharded(world, "matrix"), values("matrix")
        torch.manual_seed(11)
        fill(t)
        after = torch.rand(1)
        torch.manual_seed(11)
        fill(full)
        same(t, full, str(at))
        assert after == torch.rand(1), "the generator goes on as in one process"


def check_copies(world):
    for name in SHAPES:
        p = torch.nn.Parameter(sharded(world, name))
        p.note = ["kept"]
        p.grad = sharded(world, name, seed=1)
        twin = copy.deepcopy(p)
        assert type(twin) is type(p) and isinstance(twin, torch.nn.Parameter) and twin.requires_grad and twin.is_leaf
        with torch.no_grad():
            p.zero_()
            p.grad.zero_()
        same(twin, values(name), name)
        same(twin.grad, values(name, seed=1), name)
        if name != "rows":
            assert twin.note == ["kept"] and twin.note is not p.note
    p = torch.nn.Parameter(sharded(world, "matrix"))
    a, b = copy.deepcopy([p, p])
    assert a is b
    raises(TypeError, lambda: pickle.dumps(p), "pickled", "checkpoint")
    raises(RuntimeError, lambda: copy.deepcopy(p * 2), "deepcopy")
    text = repr(p)
    begin, end = intervals_of(p)[world.rank]
    assert f"[{begin}, {end})" in text and "(5, 7)" in text and "Ragged" in text and str(p) == text
    linear = torch.nn.Linear(7, 5)
    linear.weight = p
    linear.to(torch.float64)
    assert type(linear.weight) is ShardedTensor and isinstance(linear.weight, torch.nn.Parameter)
    same(linear.weight, values("matrix").double())


def check_autograd(world):
    for name in ("matrix", "vector", "kernel", "scalar"):
        x = torch.randn(SHAPES[name])
        losses = (lambda p, _: (p.full_tensor() * x).sum(), lambda p, _: (p * p).sum(), lambda p, _: p.norm() * 2,
                  lambda p, _: p.redistribute(placements=[Replicate()]).mul(3).mean(),
                  lambda p, _: (p * replicate(world, x)).sum(), lambda p, _: p.pow(3).mean())
        plain = (lambda p: (p * x).sum(), lambda p: (p * p).sum(), lambda p: p.norm() * 2, lambda p: p.mul(3).mean(),
                 lambda p: (p * x).sum(), lambda p: p.pow(3).mean())
        for at, (loss, reference) in enumerate(zip(losses, plain)):
            p, q = torch.nn.Parameter(sharded(world, name)), torch.nn.Parameter(values(name))
            loss(p, None).backward()
            reference(q).backward()
            close(p.grad, q.grad, f"{name} {at}")
    # A layer in DTensors, and a gradient that is Replicate: it steps a sharded parameter all the same.
    x = torch.randn(4, 7)
    for loss in (lambda w, x: torch.nn.functional.linear(x, w).pow(2).sum(), lambda w, x: w.sum() * 2,
                 lambda w, x: w[1].pow(2).sum() + w[:, 2].pow(3).sum()):
        p, q = torch.nn.Parameter(sharded(world, "matrix")), torch.nn.Parameter(values("matrix"))
        loss(p, replicate(world, x)).backward()
        loss(q, x).backward()
        close(p.grad, q.grad)
        for parameter in (p, q):
            torch.optim.AdamW([parameter], lr=.1).step()
        close(p, q)
    p, q = torch.nn.Parameter(sharded(world, "matrix")), torch.nn.Parameter(values("matrix"))
    scale = torch.arange(1., 36.)
    begin, end = p.run
    (p.to_local() * scale[begin:end]).sum().backward()
    assert isinstance(p.to_local(), torch.nn.Parameter) and p.grad.placements == p.placements
    same(p.grad, scale.view(5, 7))
    (p.full_tensor(grad_placements=[Partial()]) * (world.rank + 1)).sum().backward()
    same(p.grad, scale.view(5, 7) + sum(range(1, world.size + 1)))
    (gradient,) = torch.autograd.grad(p.full_tensor().pow(3).sum(), p, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), p)
    close(second, 6 * values("matrix"))
    other = sharded(world, "matrix", layout=1)
    moved = p.redistribute(placements=other.placements)
    assert intervals_of(moved) == intervals_of(other)
    same(moved, values("matrix"))
    p.grad = None
    (moved * from_full(scale.view(5, 7), other)).sum().backward()
    assert intervals_of(p.grad) == intervals_of(p)
    same(p.grad, scale.view(5, 7))
    raises(RuntimeError, lambda: p.redistribute(placements=[Partial()]), "cannot go from Ragged")
    if world.size == 2:
        same(p.redistribute(placements=[Shard(1)]), values("matrix"))
    same(whole(p), values("matrix"))
