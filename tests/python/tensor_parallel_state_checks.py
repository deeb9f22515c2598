"""Optimizers, state and checkpoints of tensor-parallel modules, and what is refused."""

import math

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_model_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dovetail
from common import expect_error, full
from dovetail import ShardedTensor, fully_shard, optim
from dovetail.ragged import intervals_of
from tensor_parallel_support import batch, llama, mesh_of, meshes, mlp, parallel_mlp, sharded, uneven


def steps(case, mesh, model, optimizer, first=0, count=3):
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss = case.loss(model, *batch(case, mesh, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    return {n: full(p.detach()) for n, p in model.named_parameters()}


def same(one, other, rtol=1e-5, atol=1e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=rtol, atol=atol, msg=lambda s: f"{name}: {s}")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def engine_adamw(model):
    return optim.AdamW(model.parameters(), lr=1e-2)


def check_state_of_optimizers(world):
    for mesh in meshes(world):
        case = uneven(mesh)
        ours, theirs = (sharded(case, mesh, shard) for shard in (fully_shard, torch_fully_shard))
        mine, others = engine_adamw(ours), adamw(theirs)
        steps(case, mesh, ours, mine)
        steps(case, mesh, theirs, others)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
            for field in ("exp_avg", "exp_avg_sq"):
                t = mine.state[p][field]
                assert t.shape == p.shape and t.placements == p.placements and t.device_mesh == p.device_mesh, name
                torch.testing.assert_close(full(t), full(others.state[q][field]), rtol=1e-5, atol=1e-8, msg=name)
        # Torch's own, on lists and fused.
        for how in ({"foreach": True}, {"fused": True}, {"foreach": False}):
            model = sharded(case, mesh, fully_shard)
            steps(case, mesh, model, torch.optim.AdamW(model.parameters(), lr=1e-2, **how))
            same(weights(model), weights(theirs))


def check_steps_are_skipped_together(world):
    """A gradient that is not finite on one tensor-parallel rank alone."""
    for mesh in meshes(world):
        case = llama(mesh)
        model = sharded(case, mesh, fully_shard)
        optimizer = engine_adamw(model)
        steps(case, mesh, model, optimizer, count=1)
        before = weights(model)
        for broken in (math.inf, math.nan):
            case.loss(model, *batch(case, mesh)).backward()
            grad = model.blocks[0].wq.weight.grad.to_local()
            with torch.no_grad():
                if mesh["tp"].get_local_rank() == mesh["tp"].size() - 1 and grad.numel():
                    grad[0] = broken
            optimizer.step()
            assert optimizer.last.skipped and world.everyone(optimizer.last.skipped) == [True] * world.size
            same(weights(model), before, 0, 0)
        steps(case, mesh, model, optimizer, count=1)
        assert not optimizer.last.skipped and int(optimizer.state[model.norm.weight]["step"]) == 2
        copies = world.everyone(full(model.norm.weight.detach()))
        assert not torch.equal(copies[0], before["norm.weight"]) and all(torch.equal(c, copies[0]) for c in copies)


class Scaled(optim.Operation):
    def __init__(self, of):
        self.of = of

    def unit(self, name, shape):
        return self.of

    def run(self, run, step):
        run.weight.sub_(step.lr * run.grad)


def check_units_of_parts_are_refused(world):
    mesh = mesh_of(2, 2) if world.size == 4 else mesh_of(1, 2)
    case = mlp(mesh)

    def step(make, case=case):
        model = sharded(case, mesh, fully_shard)
        steps(case, mesh, model, make(model.parameters()), count=1)

    name = ["layers.0.0.weight", "tensor-parallel", "Shard(dim=0)"]
    expect_error(ValueError, ["Muon", '"matrix"', *name], lambda: step(optim.Muon))
    expect_error(ValueError, ["Shampoo", '"matrix"', *name], lambda: step(optim.Shampoo))
    for unit in ("matrix", "row", "tile:2x2"):
        expect_error(ValueError, ["Operations", f'"{unit}"', *name],
                     lambda: step(lambda p: optim.Operations(p, [Scaled(unit)])))
    step(lambda p: optim.Operations(p, [Scaled("element")]))
    expect_error(ValueError, ["AdamW8bit", "several sizes", "layers.0.0.weight"],
                 lambda: step(optim.AdamW8bit, uneven(mesh)))
    torch.manual_seed(1)
    model = parallel_mlp(mesh)
    expect_error(ValueError, ["*.0.weight", "layers.0.0.weight", "Shard(dim=0)", "2 ranks"], lambda: fully_shard(
        model, mesh=mesh["dp"], units={"*.0.weight": dovetail.Heads(4)}))
    assert type(model.layers[0][0].weight) is nn.Parameter or type(model.layers[0][0].weight) is DTensor


def check_matrices_that_are_copied(world):
    """Muon and Shampoo on parameters of which every tensor-parallel rank has all, as without tensor parallelism."""
    mesh = mesh_of(2, 2) if world.size == 4 else mesh_of(1, 2)

    def trained(make, parallel):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        if parallel:
            for name, p in list(model.named_parameters()):
                module = model.get_submodule(name.rpartition(".")[0])
                copied = nn.Parameter(distribute_tensor(p.detach(), mesh["tp"], [Replicate()]))
                module.register_parameter(name.rpartition(".")[2], copied)
        fully_shard(model, mesh=mesh["dp"])
        optimizer = make(model.parameters(), lr=0.05)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
        if parallel:
            x = DTensor.from_local(x, mesh["tp"], [Replicate()])
        for _ in range(3):
            full(model(x).square().mean()).backward()
            optimizer.step()
        return model, optimizer

    for make in (optim.Muon, optim.Shampoo):
        (one, mine), (other, theirs) = (trained(make, parallel) for parallel in (True, False))
        same(weights(one), weights(other), 0, 0)
        for p, q in zip(one.parameters(), other.parameters()):
            assert p.placements[1] == Replicate() and set(mine.state[p]) == set(theirs.state[q])
            for field, value in mine.state[p].items():
                torch.testing.assert_close(full(value), full(theirs.state[q][field]), rtol=0, atol=0)
                assert field == "step" or value.device_mesh == p.device_mesh


def check_8_bit_state_of_parts(world):
    mesh = mesh_of(2, 2) if world.size == 4 else mesh_of(1, 2)
    torch.manual_seed(4)
    model = parallelize_module(nn.Sequential(nn.Linear(128, 128)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], plan=dovetail.Plan(alignment=256))
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    model(torch.ones(2, 128)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    shapes = {field: tuple(t.shape) for field, t in state.items() if field != "step"}
    assert sorted(set(shapes.values())) == [(2, 32), (128, 128)], shapes
    for field, t in state.items():
        assert field == "step" or t.device_mesh == model[0].weight.device_mesh and full(t).shape == t.shape
    before = {n: full(t).clone() for n, t in state.items()}
    optimizer.load_state_dict(optimizer.state_dict())
    for n, t in optimizer.state[model[0].weight].items():
        assert torch.equal(full(t), before[n])


def check_checkpoints_of_torch(world):
    """Written by one fully_shard, read by the other, also on other meshes, with parts of several sizes and copies."""
    def state(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    def made(shard, mesh, count, make):
        case = uneven(mesh)
        model = sharded(case, mesh, shard)
        optimizer = make(model)
        steps(case, mesh, model, optimizer, count=count)
        return case, mesh, model, optimizer

    all_of = meshes(world)
    others = [mesh_of(4, 1), mesh_of(1, 4)] if world.size == 4 else all_of
    ways = [(fully_shard, all_of[0], torch_fully_shard, all_of[0], adamw, adamw),
            (torch_fully_shard, all_of[0], fully_shard, all_of[-1], adamw, engine_adamw),
            (fully_shard, all_of[0], fully_shard, others[0], engine_adamw, engine_adamw),
            (fully_shard, others[0], fully_shard, others[-1], adamw, engine_adamw)]
    for number, (writer, on, reader, onto, by, into) in enumerate(ways):
        folder = f"{world.folder}/tensor-parallel-{number}"
        case, mesh, model, optimizer = made(writer, on, 2, by)
        dcp.save(state(model, optimizer), checkpoint_id=folder)
        _, _, other, other_optimizer = made(reader, onto, 1, into)
        loaded = state(other, other_optimizer)
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(other, other_optimizer, model_state_dict=loaded["model"],
                       optim_state_dict=loaded["optimizer"])
        same(weights(other), weights(model), 0, 0)
        # On the same data on all ranks, so that meshes of other sizes see the same.
        x, y = case.batch(torch.Generator().manual_seed(77))
        for m, o in ((model, optimizer), (other, other_optimizer)):
            o.zero_grad()
            case.loss(m, x, y).backward()
            o.step()
        same(weights(other), weights(model))


def check_copies_that_lie_elsewhere_on_each_rank(world):
    """Parts of several sizes leave copied and plain parameters of their unit in other runs on each tensor-parallel
    rank; one of the ranks writes them."""
    mesh = mesh_of(2, 2) if world.size == 4 else mesh_of(1, 2)

    def made(copied, seed):
        torch.manual_seed(seed)
        model = nn.Linear(3, 15, bias=False)
        parallelize_module(model, mesh["tp"], ColwiseParallel())
        other = nn.Parameter(torch.randn(40))
        model.other = nn.Parameter(distribute_tensor(other.detach(), mesh["tp"], [Replicate()])) if copied else other
        return fully_shard(model, mesh=mesh["dp"], plan=dovetail.Plan(alignment=1))

    for copied in (True, False):
        model, other = made(copied, 1), made(copied, 2)
        assert world.size == 2 or len(set(world.everyone(intervals_of(model.other)))) == 2
        folder = f"{world.folder}/elsewhere-{copied}"
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        loaded = get_model_state_dict(other)
        dcp.load(loaded, checkpoint_id=folder)
        set_model_state_dict(other, loaded)
        same(weights(other), weights(model), 0, 0)


def check_whole_state_dicts(world):
    for mesh in meshes(world):
        case = uneven(mesh, empty=mesh["tp"].size() > 1)
        model, other = sharded(case, mesh, fully_shard), sharded(case, mesh, fully_shard)
        steps(case, mesh, other, adamw(other))
        whole = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True))
        same(whole, weights(other), 0, 0)
        for from_first in (False, True):
            model = sharded(case, mesh, fully_shard)
            given = whole if not from_first or world.rank == 0 else {}
            set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True,
                                                                              broadcast_from_rank0=from_first))
            assert all(isinstance(p, DTensor) for p in model.parameters())
            same(weights(model), whole, 0, 0)
        model.load_state_dict(other.state_dict())
        expect_error(TypeError, ["set_model_state_dict"], lambda: model.load_state_dict(whole))
        # On the meta device, filled afterwards.
        with torch.device("meta"):
            late = case.make()
        for block in case.blocks(late):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(late, mesh=mesh["dp"])
        late.to_empty(device="cpu")
        values = {name: p for name, p in whole.items() if name != "layers.1.0.weight"}
        set_model_state_dict(late, values, options=StateDictOptions(full_state_dict=True, strict=False))
        expect_error(RuntimeError, ["to_empty", "layers.1.0.weight"], lambda: late(batch(case, mesh)[0]))
        set_model_state_dict(late, dict(whole), options=StateDictOptions(full_state_dict=True))
        x, _ = batch(case, mesh)
        torch.testing.assert_close(late(x), other(x), rtol=0, atol=0)


def check_what_cannot_be_is_refused(world):
    mesh = mesh_of(2, 2) if world.size == 4 else mesh_of(1, 2)
    dp, tp = mesh["dp"], mesh["tp"]

    def linear(on, placements):
        model = nn.Linear(4, 4, bias=False)
        shape, stride = torch.Size((4, 4)), (4, 1)
        local = torch.ones(distribute_tensor(torch.ones(4, 4), on, [p if p.is_shard() else Replicate()
                                                                   for p in placements]).to_local().shape)
        model.weight = nn.Parameter(DTensor.from_local(local, on, placements, run_check=False, shape=shape,
                                                       stride=stride))
        return model

    def refused(words, on, placements, mesh=dp, **how):
        model = linear(on, placements)
        before = model.weight
        expect_error(ValueError, ["weight", *words], lambda: fully_shard(model, mesh=mesh, **how))
        assert model.weight is before  # nothing was changed

    refused(["Partial"], tp, [Partial()])
    refused(["1-D mesh", "Shard(dim=1)"], mesh, [Shard(0), Shard(1)])
    refused(["another dimension", "dp"], dp, [Shard(0)])
    refused(["names"], tp, [Shard(0)], world.mesh)
    elsewhere = init_device_mesh("cpu", (world.size,), mesh_dim_names=("all",))
    refused(["one mesh"], tp, [Shard(0)], elsewhere)
    if dp.size() > 1:
        refused(["names"], tp, [Shard(0)], plan=dovetail.Plan(zero1=1))
    # Two meshes of tensor parallelism below one root.
    cube = init_device_mesh("cpu", (1, world.size // 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    model = nn.Sequential(linear(cube["ep"], [Replicate()]), linear(cube["tp"], [Replicate()]))
    fully_shard(model, mesh=cube["dp"])
    expect_error(ValueError, ["one mesh of tensor parallelism"], lambda: model(torch.ones(1, 4)))
    # The trainer's checkpoints.
    case = mlp(mesh)
    model = sharded(case, mesh, fully_shard)
    expect_error(NotImplementedError, ["torch.distributed.checkpoint"],
                 lambda: dovetail.checkpoint.save_checkpoint(model, None, world.folder))
    assert isinstance(model.layers[0][0].weight, ShardedTensor)
