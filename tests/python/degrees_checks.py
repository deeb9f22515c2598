"""Degrees of sharding that differ, replicas, and meshes of two dimensions."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dovetail
import models
from common import expect_error, full
from dovetail import Plan, fully_shard, optim


def chains(world):
    """Every (zero1, zero2, zero3) in which each divides the one before, and the first the number of ranks."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return [(a, b, c) for a in divisors for b in divisors for c in divisors if a % b == 0 and b % c == 0]


def mlp(shard, **how):
    torch.manual_seed(9)
    model = models.Mlp(width=16, depth=2)
    for layer in model.layers:
        shard(layer, **how)
    return shard(model, **how)


def plain(module, **how):
    return module


def inputs(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def train(world, model, make, passes=(1, 2, 1), between=lambda model, step, last: None):
    """A step for each entry of `passes`, of so many backward passes. Ranks that have the whole model take all data."""
    alone = not isinstance(model, torch.distributed.fsdp.FSDPModule | dovetail.FSDPModule)
    opt = make(model.parameters())
    seen = []
    for step, count in enumerate(passes):
        for i in range(count):
            between(model, step, i == count - 1)
            parts = [inputs(10 * step + i, r) for r in range(world.size)]
            model(torch.cat(parts) if alone else parts[world.rank])[:, :9].square().mean().backward()
        seen.append([full(p.grad).clone() for p in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return seen, [full(p.detach()).clone() for p in model.parameters()]


def same(got, wanted, rtol, atol, what):
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def check_every_degree(world):
    """Gradients after one and two backward passes, and weights, against one process with all data."""
    gradients, weights = train(world, mlp(plain), sgd)
    own_weights = train(world, mlp(plain), optim_reference)[1]
    for zero1, zero2, zero3 in chains(world.size):
        how = {"plan": Plan(zero1=zero1, zero2=zero2, zero3=zero3)}
        got_gradients, got = train(world, mlp(fully_shard, **how), sgd)
        for g, w in zip(got_gradients, gradients):
            same(g, w, 1e-4, 1e-6, f"gradients of {how}")
        same(got, weights, 1e-4, 1e-6, f"weights of {how}")
        _, got = train(world, mlp(fully_shard, **how), lambda p: optim.AdamW(p, lr=1e-2))
        same(got, own_weights, 1e-4, 1e-5, f"AdamW of {how}")


def optim_reference(params):
    return torch.optim.AdamW(params, lr=1e-2)


def check_micro_batches_without_communication(world):
    """With each kind of gradient shard; the optimizer's state outlives the room that is made for whole gradients."""
    def between(model, step, last):
        if step == 1:
            model.set_requires_gradient_sync(last)

    for make, reference in ((sgd, sgd), (lambda p: optim.AdamW(p, lr=1e-2), optim_reference)):
        _, weights = train(world, mlp(plain), reference, passes=(1, 3, 1))
        for zero1, zero2, zero3 in chains(world.size):
            model = mlp(fully_shard, plan=Plan(zero1=zero1, zero2=zero2, zero3=zero3))
            _, got = train(world, model, make, passes=(1, 3, 1), between=between)
            same(got, weights, 1e-4, 1e-5, f"({zero1}, {zero2}, {zero3})")


def check_replicas_and_shards(world):
    """A 2-D mesh, also against torch's own."""
    if world.size < 4:
        return
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicas", "shards"))
    wanted_gradients, wanted = train(world, mlp(torch_fully_shard, mesh=mesh), sgd)
    model = mlp(fully_shard, mesh=mesh)
    gradients, got = train(world, model, sgd)
    for g, w in zip(gradients, wanted_gradients):
        same(g, w, 1e-5, 1e-6, "gradients")
    same(got, wanted, 1e-5, 1e-6, "weights")
    here = sum(p.to_local().numel() for p in model.parameters())
    assert here < 0.8 * sum(p.numel() for p in model.parameters())
    assert all(p.device_mesh.size() == world.size // 2 for p in model.parameters())
    # Without names of dimensions, and with state over all ranks.
    unnamed = init_device_mesh("cpu", (2, world.size // 2))
    same(train(world, mlp(fully_shard, mesh=unnamed), sgd)[1], wanted, 1e-5, 1e-6, "unnamed")
    over_all = mlp(fully_shard, mesh=mesh, plan=Plan(zero1=world.size, zero3=world.size // 2, zero2=world.size // 2))
    same(train(world, over_all, sgd)[1], wanted, 1e-5, 1e-6, "zero1 over all")
    assert next(over_all.parameters()).device_mesh.size() == world.size
    expect_error(ValueError, ["mesh", "2"], lambda: fully_shard(nn.Linear(2, 2), mesh=init_device_mesh(
        "cpu", (1, 2, world.size // 2))))


def check_reductions_over_replicas_that_wait(world):
    """set_requires_all_reduce, as torch's."""
    if world.size < 4:
        return
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicas", "shards"))

    def between(model, step, last):
        model.set_requires_all_reduce(last)

    wanted = train(world, mlp(torch_fully_shard, mesh=mesh), sgd, passes=(2, 3), between=between)
    got = train(world, mlp(fully_shard, mesh=mesh), sgd, passes=(2, 3), between=between)
    for g, w in zip(got[0], wanted[0]):
        same(g, w, 1e-5, 1e-6, "gradients")
    same(got[1], wanted[1], 1e-5, 1e-6, "weights")


def check_illegal_degrees_are_refused(world):
    expect_error(ValueError, ["zero"], lambda: fully_shard(nn.Linear(4, 4), plan=Plan(zero1=3 * world.size)))
    if world.size > 1:
        expect_error(ValueError, ["zero"], lambda: fully_shard(nn.Linear(4, 4), plan=Plan(zero1=1, zero2=world.size)))
    dist.barrier()
