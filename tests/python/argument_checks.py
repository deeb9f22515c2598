"""reshard_after_forward and shard_placement_fn, as torch's fully_shard takes them: what holds, and what is refused."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Replicate, Shard

import models
from common import expect_error, full, what_torch_does
from dovetail import Plan, fully_shard


def trained(world, shard, blocks, root, mesh=None):
    """Gradients and weights of a few steps, and the model."""
    torch.manual_seed(9)
    model = models.Mlp(width=16, depth=3)
    for layer in model.layers:
        shard(layer, mesh=mesh, **blocks)
    shard(model, mesh=mesh, **root)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + world.rank))
        model(x).square().mean().backward()
        seen += [full(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [full(p.detach()).clone() for p in model.parameters()], model


def check_reshard_to_a_number_of_ranks(world):
    """As torch's, for every divisor; parameters are gathered among so many ranks, state stays over all."""
    for number in (n for n in range(1, world.size + 1) if world.size % n == 0):
        blocks = {"reshard_after_forward": number}
        # 1 is False to torch as well, with a warning.
        wanted, _ = trained(world, torch_fully_shard, {"reshard_after_forward": number if number > 1 else False}, {})
        for root in ({}, blocks):
            got, model = trained(world, fully_shard, blocks, root)
            for g, w in zip(got, wanted, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)
            unit = model.layers[0]._unit()
            assert unit.plan == model._unit().plan == Plan(zero3=number if 1 < number < world.size else 0), unit.plan
            assert unit.reshard_after_forward is (number > 1)
            assert next(model.parameters()).device_mesh.size() == world.size


def check_reshard_to_a_number_of_ranks_with_replicas(world):
    """The number divides the second dimension of a 2-D mesh."""
    if world.size < 4:
        return
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicas", "shards"))
    for shard in (fully_shard, torch_fully_shard):
        expect_error(ValueError, ["reshard_after_forward", "4", "2"],
                     lambda: shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=4))
    blocks = {"reshard_after_forward": 2}
    wanted, _ = trained(world, torch_fully_shard, blocks, {}, mesh)
    got, model = trained(world, fully_shard, blocks, {}, mesh)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)
    over_all = fully_shard(nn.Linear(4, 4), mesh=mesh, plan=Plan(zero1=4), reshard_after_forward=2)
    assert over_all._unit().plan == Plan(zero1=4, zero3=2)


def check_what_reshard_after_forward_cannot_be(world):
    def layer(value, **how):
        return fully_shard(nn.Linear(4, 4), reshard_after_forward=value, **how)

    for value in (0, -1, world.size + 1, 2 * world.size):
        expect_error(ValueError, ["reshard_after_forward", f"divisor of {world.size}", f"got {value}"],
                     lambda: layer(value))
        assert what_torch_does(lambda: torch_fully_shard(nn.Linear(4, 4), reshard_after_forward=value)) != "works"
    for value in ("yes", 2.0):
        expect_error(ValueError, ["reshard_after_forward", "a number of ranks", repr(value)], lambda: layer(value))
    if world.size < 4:
        return
    expect_error(ValueError, ["reshard_after_forward=2", "zero3=4", "same"], lambda: layer(2, plan=Plan(zero3=4)))
    expect_error(ValueError, ["divisor of 1,"], lambda: layer(2, plan=Plan(zero2=1)))
    # Units that differ are named where the unit around them is made, not at the first forward.
    model = nn.Sequential(layer(2), layer(True), nn.Linear(4, 4))
    expect_error(ValueError, ["2 for 0", "none for 1"], lambda: fully_shard(model))
    model = nn.Sequential(layer(True), nn.Linear(4, 4))
    expect_error(ValueError, ["none for 0", "2 for the unit around"],
                 lambda: fully_shard(model, reshard_after_forward=2))
    fully_shard(model)(torch.ones(4))


def check_placements(world):
    """The function is asked once for each parameter of the unit; None and Shard(0) are what happens in any case."""
    plain, _ = trained(world, fully_shard, {}, {})
    asked = []

    def choose(param):
        asked.append(param)
        return (None, Shard(0), Shard(-param.dim()), ShardPlacementResult(Shard(0), info))[len(asked) % 4]

    info = FSDPMeshInfo(world.mesh, shard_mesh_dim=0)
    how = {"shard_placement_fn": choose}
    got, _ = trained(world, fully_shard, how, how)
    assert all(torch.equal(g, w) for g, w in zip(got, plain, strict=True))
    assert len({id(p) for p in asked}) == len(asked) == len(list(models.Mlp().parameters()))
    model = models.Mlp()
    asked.clear()
    fully_shard(model, ignored_params={model.scale}, **how)
    assert len(asked) == len(list(model.parameters())) - 1 and all(p is not model.scale for p in asked)


def check_placements_that_cannot_be(world):
    def refuse(kind, words, answer, model=None):
        model = model or nn.Linear(2 * world.size, 2 * world.size)
        before = list(model.parameters())
        expect_error(kind, ["shard_placement_fn", *words], lambda: fully_shard(model, shard_placement_fn=answer))
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))  # nothing was sharded
        fully_shard(model)

    shape = str((2 * world.size,) * 2)
    for said in (Shard(1), Shard(-1)):
        refuse(NotImplementedError, ["weight", shape, repr(said), "Plan(block"],
               lambda p: said if p.dim() == 2 else None)
    assert what_torch_does(lambda: torch_fully_shard(nn.Linear(8, 8, bias=False),
                                                     shard_placement_fn=lambda p: Shard(1))) == "works"
    refuse(ValueError, ["weight", "None or Shard(0)", "Replicate"], lambda p: Replicate())
    refuse(ValueError, ["weight", "0"], lambda p: 0)
    refuse(ValueError, ["function", "Shard"], Shard(0))
    other = FSDPMeshInfo(init_device_mesh("cpu", (world.size // 2, 2)), shard_mesh_dim=1)
    refuse(NotImplementedError, ["weight", "mesh of the unit"], lambda p: ShardPlacementResult(None, other))
