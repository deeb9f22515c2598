"""Sharded tensors on two mesh dimensions: runs of parts that tensor parallelism splits, evenly or not, or copies."""

import copy
import math

import torch
from dovetail.ragged import Ragged, ShardedTensor, from_full, intervals_of, local_elements, sharded_tensor
from ragged_support import close, cut, raises, same
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tensor_parallel_support import meshes

# Even and uneven parts along each dimension; a part without elements; copies; nothing at all.
LAYOUTS = {"rows": ((6, 5), Shard(0)), "uneven": ((5, 7), Shard(0)), "columns": ((3, 5), Shard(1)),
           "empty": ((1, 4), Shard(0)), "copied": ((4, 5), Replicate()), "vector": ((9,), Shard(0)),
           "scalar": ((), Replicate()), "kernel": ((3, 4, 2), Shard(2)), "nothing": ((0, 3), Shard(0))}


def values(name, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * seed)
    return torch.randn(LAYOUTS[name][0], generator=draw).to(dtype)


def part(mesh, name, whole):
    """What this tensor-parallel rank has, as torch gives it out."""
    return distribute_tensor(whole, mesh["tp"], [LAYOUTS[name][1]], src_data_rank=None).to_local()


def sharded(mesh, name, seed=0, layout=0, dtype=torch.float32, **options):
    """Cut at random, in copies otherwise on each rank, as when other parameters of a unit are uneven."""
    whole = values(name, seed, dtype)
    mine = part(mesh, name, whole)
    runs = cut(f"{name} {mesh['tp'].get_local_rank()}", tuple(mine.shape), mesh["dp"].size(), layout)
    begin, end = runs[mesh["dp"].get_local_rank()]
    return sharded_tensor(mine.reshape(-1)[begin:end].clone(), mesh, runs, whole.shape, second=LAYOUTS[name][1],
                          **options)


def check_kinds_and_copies(world):
    for mesh in meshes(world):
        for name, (shape, placement) in LAYOUTS.items():
            t = sharded(mesh, name)
            assert type(t) is ShardedTensor and t.shape == shape and t.device_mesh is mesh
            assert isinstance(t.placements[0], Ragged) and t.placements[1] == placement
            begin, end = t.run
            assert torch.equal(t.to_local(), part(mesh, name, values(name)).reshape(-1)[begin:end])
            same(t, values(name), name)
            p = torch.nn.Parameter(t)
            assert type(p) is ShardedTensor and isinstance(p, torch.nn.Parameter) and p.is_leaf
            same(p, values(name), name)
            for targets in ([Replicate(), Replicate()], [Replicate(), placement]):
                moved = p.redistribute(placements=targets)
                assert not isinstance(moved, ShardedTensor) and moved.placements == tuple(targets)
                same(moved, values(name), name)
            if placement == Shard(0) and math.prod(shape):  # a layout of torch's own
                same(p.redistribute(placements=[Shard(0), Replicate()]), values(name), name)
            # Other runs: all elements on one rank and then on another, which is nothing new where a part is empty.
            again, n, ranks = p, part(mesh, name, values(name)).numel(), mesh["dp"].size()
            for holder in (0, ranks - 1):
                target = Ragged([(0, n) if r == holder else (0, 0) for r in range(ranks)])
                again = again.redistribute(placements=[target, placement])
                assert again.placements == (target, placement)
                same(again, values(name), name)
            same(copy.deepcopy(p), values(name), name)
            same(from_full(values(name, 1), t), values(name, 1), name)
            assert str(tuple(shape)) in repr(t)
            # A gradient of the whole arrives in the same layout, and one that ranks have terms of is summed.
            p.full_tensor(grad_placements=[Partial(), Replicate()]).sum().backward()
            assert p.grad.placements == p.placements
            same(p.grad, torch.full(shape, float(mesh["dp"].size())), name)
        t = sharded(mesh, "rows")
        other = Replicate() if mesh["tp"].size() > 1 else Shard(1)
        raises(RuntimeError, lambda: t.redistribute(placements=[t.placements[0], other]), "cannot go from")
        raises(RuntimeError, lambda: t.redistribute(placements=[Partial(), Replicate()]), "cannot go from")
        raises(ValueError, lambda: sharded_tensor(torch.zeros(1), mesh, ((0, 1),), (1,)), "1-D mesh")


def check_element_wise(world):
    for mesh in meshes(world):
        for name, (shape, _) in LAYOUTS.items():
            a, b, fa, fb = sharded(mesh, name), sharded(mesh, name, 1), values(name), values(name, 1)
            for f in (lambda x, y: x + y, lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x.exp() * 2 - y,
                      lambda x, y: torch.where(x > y, x, y), lambda x, y: x.clone().mul_(y).to(torch.float64)):
                out = f(a, b)
                assert type(out) is ShardedTensor and out.placements == a.placements
                same(out, f(fa, fb), name)
            whole = DTensor.from_local(fb.clone(), mesh, [Replicate(), Replicate()], run_check=False)
            same(a + whole, fa + fb, name)
            same(a * torch.tensor(2.0), fa * 2, name)
            torch._foreach_mul_([a, b], [2.0, 3.0])
            same(a, fa * 2, name)
            same(b, fb * 3, name)
            for make in (torch.zeros_like, torch.ones_like, torch.empty_like, lambda t: t.new_zeros(t.shape)):
                made = make(a)
                assert made.placements == a.placements and made.to_local().shape == a.to_local().shape
            with torch.no_grad():
                a.copy_(b)
                same(a, fb * 3, name)
                a.copy_(whole)
                same(a, fb, name)
                a.copy_(from_full(fa, a))
                same(a, fa, name)
                a.zero_()
                same(a, torch.zeros(shape), name)
            other = sharded(mesh, name, layout=5)
            if other.placements != a.placements:  # by chance they are the same on some ranks
                raises(RuntimeError, lambda: a + other, "different layouts")
            if math.prod(shape) > 1:
                raises(RuntimeError, lambda: a + fa, "plain tensor")


def check_layouts_that_differ_in_the_second_dimension(world):
    """The same runs of other parts are other elements."""
    mesh = meshes(world)[0]
    runs, local = ((0, 4),) + ((4, 4),) * (mesh["dp"].size() - 1), torch.zeros(4)
    local = local if mesh["dp"].get_local_rank() == 0 else local[:0]
    one = sharded_tensor(local, mesh, runs, (4, 2), second=Shard(0))
    other = sharded_tensor(local.clone(), mesh, runs, (4, 2), second=Shard(1))
    raises(RuntimeError, lambda: one + other, "different layouts")
    raises(RuntimeError, lambda: torch._foreach_add([one], [other]), "different layouts")
    assert torch.equal(one, other)  # which gathers


def check_reductions(world):
    for mesh in meshes(world):
        for name, (shape, _) in LAYOUTS.items():
            t, whole = sharded(mesh, name), values(name)
            numbers = [torch.sum(t), t.norm(), torch.linalg.vector_norm(t, 3)]
            close(numbers[0], whole.sum(), name)
            close(numbers[1], whole.norm(), name)
            close(numbers[2], torch.linalg.vector_norm(whole, 3), name)
            if math.prod(shape):
                for f in (torch.mean, torch.prod):
                    numbers.append(f(t))
                    close(numbers[-1], f(whole), name)
                for f in (torch.max, torch.min, torch.amax, torch.amin):
                    same(f(t), f(whole), name)
                    same(f(-t.abs() - 1), f(-whole.abs() - 1), name)  # an empty part is no zero
                same((t > 0).any(), (whole > 0).any(), name)
                same((t < 9).all(), (whole < 9).all(), name)
                close(torch.linalg.vector_norm(t, math.inf), whole.abs().max(), name)
            for n in numbers:  # the same bits, also where copies lie in other runs
                assert len({x.item() for x in world.everyone(n.to_local())}) == 1, name
            assert torch.equal(t, sharded(mesh, name, layout=7)) and torch.equal(t, t.clone())
            if math.prod(shape):
                changed = whole.clone()
                changed.view(-1)[-1] += 1
                assert not torch.equal(t, from_full(changed, t)), name
            if math.prod(shape) == 1:
                assert t.item() == whole.item()
        names = list(LAYOUTS)
        norms = torch._foreach_norm([sharded(mesh, n) for n in names])
        for name, norm in zip(names, norms):
            close(norm, values(name).norm(), name)
        total = torch.nn.utils.get_total_norm([sharded(mesh, n) for n in names])
        close(total, torch.nn.utils.get_total_norm([values(n) for n in names]))


def check_a_gradient_that_is_not_finite_is_known_everywhere(world):
    """As GradScaler asks: one element of one tensor-parallel rank's part."""
    for mesh in meshes(world):
        whole = values("rows")
        whole[-1, -1] = math.inf
        grads = [from_full(whole, sharded(mesh, "rows")), sharded(mesh, "copied")]
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor([0.5]))
        assert world.everyone(found.item()) == [1.0] * world.size
        same(grads[1], values("copied") * 0.5)


def check_random_fills_and_masks(world):
    for mesh in meshes(world):
        for name, (shape, _) in LAYOUTS.items():
            t, whole = sharded(mesh, name), values(name)
            for fill in (lambda x: x.normal_(), lambda x: x.uniform_(-1, 2), lambda x: x.bernoulli_(0.5),
                         torch.nn.init.trunc_normal_, torch.rand_like):
                torch.manual_seed(5)
                wanted = fill(whole.clone())
                torch.manual_seed(5)
                same(fill(t.clone()), wanted, name)
            clipped = t.clone()
            clipped[t > 0.5] = 0.25
            same(clipped, torch.where(whole > 0.5, 0.25, whole), name)


def check_views(world):
    for mesh in meshes(world):
        for name in ("rows", "uneven", "columns", "copied", "empty"):
            whole = values(name)
            for view in (lambda a: a.view_as(a), lambda a: a.t(), lambda a: a.reshape(-1), lambda a: a[0],
                         lambda a: a[:, 1:3], lambda a: a.flatten(), lambda a: a.expand(2, *a.shape)):
                same(view(sharded(mesh, name)), view(whole), name)
            t, changed = sharded(mesh, name), whole.clone()
            for a in (t, changed):
                with torch.no_grad():
                    a[:, 1] = 3.0
                    a.view(-1)[-1:].mul_(2)
                    a.t().add_(1)
            same(t, changed, name)
            x = torch.ones(2, whole.shape[1])
            grad = torch.randn(2, whole.shape[0], generator=torch.Generator().manual_seed(3))
            p, q = torch.nn.Parameter(sharded(mesh, name)), torch.nn.Parameter(whole.clone())
            inputs = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
            ours, theirs = torch.nn.functional.linear(inputs, p), torch.nn.functional.linear(x, q)
            close(ours, theirs, name)
            theirs.backward(grad)
            ours.backward(DTensor.from_local(grad, mesh, [Replicate(), Replicate()], run_check=False))
            close(p.grad, q.grad, name)


def check_boxes_cover_the_whole_once(world):
    """What distributed checkpoints are told: with copies in other runs on each rank only one writes."""
    for mesh in meshes(world):
        for name, (shape, placement) in LAYOUTS.items():
            first = placement.is_shard() or mesh["tp"].get_local_rank() == 0
            t = sharded(mesh, name, writes=first)
            mine = [(tuple(i.index.offset), tuple(i.tensor_data.chunk.sizes)) for i in t.__create_write_items__("a", t)]
            count = torch.zeros(shape)
            for offsets, sizes in (box for boxes in world.everyone(mine) for box in boxes):
                count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] += 1
            assert torch.equal(count, torch.ones(shape)), (name, count)
            for chunk in t.__create_chunk_list__():  # and to read, each its own
                box = values(name)[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))]
                index = torch.distributed.checkpoint.metadata.MetadataIndex("a", chunk.offsets)
                assert torch.equal(t.__get_tensor_shard__(index), box), name
            assert intervals_of(t) == t.intervals and local_elements(t).numel() == t.to_local().numel()
