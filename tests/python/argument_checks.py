"""What fully_shard is told: what holds as in torch's, and what is refused at the call, with nothing changed."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Replicate, Shard

import models
from common import expect_error, full, what_torch_does
from dovetail import Heads, MixedPrecisionPolicy, Nodes, Plan, fully_shard


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


def check_arguments_of_another_kind(world):
    """One error that names the argument, what was wanted and what was got."""
    wrong = [(name, 3, [name, "wanted", "got 3"]) for name in
             ("mesh", "mp_policy", "offload_policy", "plan", "units", "ignored_params", "shard_placement_fn", "comm",
              "format")]
    wrong += [("units", {"weight": 3}, ["'weight'", "Heads", "3"]), ("units", {3: Heads(2)}, ["patterns", "3"]),
              ("units", {"weight": [Heads(2), "x"]}, ["'weight'", "'x'"]),
              ("ignored_params", [3], ["ignored_params", "3"]),
              ("ignored_params", nn.Parameter(torch.ones(2)), ["ignored_params", "(2,)"]),
              ("mp_policy", MixedPrecisionPolicy(param_dtype="x"), ["param_dtype", "'x'"]),
              ("mp_policy", MixedPrecisionPolicy(reduce_dtype=[]), ["reduce_dtype", "[]"]),
              ("mp_policy", MixedPrecisionPolicy(output_dtype="x"), ["output_dtype", "'x'"]),
              ("mp_policy", MixedPrecisionPolicy(output_dtype=torch.int64), ["output_dtype", "int64"]),
              ("mp_policy", MixedPrecisionPolicy(cast_forward_inputs=3), ["cast_forward_inputs", "3"])]
    for name, value, words in wrong:
        model = nn.Linear(4, 4)
        weight = model.weight
        expect_error(ValueError, words, lambda: fully_shard(model, **{name: value}))
        assert type(model) is nn.Linear and model.weight is weight
    for words, make in ((["Plan: zero1", "'2'"], lambda: Plan(zero1="2")),
                        (["Plan: block", "3"], lambda: Plan(block=3)),
                        (["Plan: prefetch", "True"], lambda: Plan(prefetch=True)),
                        (["Plan: alignment", str(2**40)], lambda: Plan(alignment=2**40)),
                        (["Heads: count", "'x'"], lambda: Heads("x")), (["Heads: dim", "None"], lambda: Heads(2, None)),
                        (["Nodes: name", "3"], lambda: Nodes(3, (0, 4))),
                        (["Nodes: edges", "4"], lambda: Nodes("q", 4)),
                        (["Nodes: edges", "'x'"], lambda: Nodes("q", (0, "x"))),
                        (["Nodes: dim", "'0'"], lambda: Nodes("q", (0, 4), "0"))):
        expect_error(ValueError, words, make)
    # Policies of torch's are taken, and parameters from any iterable.
    model = nn.Linear(4, 4)
    fully_shard(model, mp_policy=TorchPolicy(), offload_policy=TorchOffload(), ignored_params=model.parameters())
    assert type(model.weight) is nn.Parameter and model._unit().ignored == [model.weight, model.bias]


def check_dtypes_that_cannot_be(world):
    """At the call, with nothing changed; main_dtype takes every floating-point one, ignored_params any."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for device in ("cpu", "meta"):
            model = nn.Sequential(nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device).to(dtype))
            before = list(model.parameters())
            expect_error(ValueError, ["parameter 1.weight", "float32", str(dtype), "main_dtype=torch.float32"],
                         lambda: fully_shard(model))
            assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
            fully_shard(model, main_dtype=torch.float32)
            assert all(p.dtype == torch.float32 for p in model.parameters())
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.ones_(p)
        model(torch.ones(2, 4)).float().sum().backward()
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64):
        model = nn.Linear(4, 4)
        model.extra = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=dtype.is_complex)
        for how in ({}, {"main_dtype": torch.float32}):
            expect_error(ValueError, ["parameter extra", str(dtype), "ignored_params"],
                         lambda: fully_shard(model, **how))
        fully_shard(model, ignored_params={model.extra})(torch.ones(2, 4)).sum().backward()
        assert model.extra.dtype == dtype
    # What a unit below has taken is not looked at again.
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    fully_shard(model[0], main_dtype=torch.float32)
    fully_shard(model)


def check_lists_of_modules(world):
    """What is inside of another one is of the unit anyway, as in torch's; one twice, or a script, changes nothing."""
    def trained_as_one(shard):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        shard([model, model[0]], mesh=world.mesh)
        model(torch.ones(2, 4) + world.rank).square().sum().backward()
        return [full(p.grad) for p in model.parameters()]

    for ours, theirs in zip(trained_as_one(fully_shard), trained_as_one(torch_fully_shard), strict=True):
        torch.testing.assert_close(ours, theirs)
    layer = nn.Linear(4, 4)
    expect_error(ValueError, ["different modules", "Linear"], lambda: fully_shard([layer, layer]))
    script = torch.jit.script(nn.Linear(4, 4))
    expect_error(ValueError, ["torch.jit.script", "Linear"], lambda: fully_shard(script))
    for module in (layer, script):
        assert type(module.weight) is nn.Parameter
