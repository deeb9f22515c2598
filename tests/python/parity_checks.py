"""Small models trained with dovetail.fully_shard and with torch's: equal losses and weights, see comparison.BOUNDS."""

import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dovetail
import models
from common import full
from comparison import Case, adamw, compare, cross_entropy, next_token, on_every_path, sgd, tokens


def vectors(g):
    return torch.randn(4, 32, generator=g), torch.randn(4, 32, generator=g)


def images(g):
    return torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 5, (4,), generator=g)


MLP = Case(models.Mlp, vectors, lambda model, x, y: F.mse_loss(model(x).float(), y), lambda m: list(m.layers))
LLAMA = Case(models.Llama, tokens(64, 2, 9), next_token, lambda m: list(m.blocks))
DECODER = Case(models.Decoder, tokens(64, 2, 9), next_token, lambda m: list(m.blocks))
TIED = Case(models.Tied, tokens(40, 2, 9), next_token, lambda m: [m.block])


def convolutions(statistics=torch.float32) -> Case:
    def make():
        model = models.Convolutions()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                for name in ("running_mean", "running_var"):
                    setattr(norm, name, getattr(norm, name).to(statistics))
        return model

    return Case(make, images, lambda model, x, y: cross_entropy(model(x), y), lambda m: [m.body])


def check_mlp(world):
    on_every_path(MLP, world.rank)


def check_llama(world):
    on_every_path(LLAMA, world.rank)


def check_tied_and_frozen_parameters(world):
    on_every_path(TIED, world.rank)


def check_convolutions_and_batch_norm(world):
    run = compare(convolutions(), world.rank, sgd)
    compare(convolutions(), world.rank, adamw, clip=0.5)
    # Torch's CPU kernel wants weights and statistics of one dtype.
    compare(convolutions(torch.bfloat16), world.rank, adamw, bf16=True)
    # Buffers are each rank's own, as with torch's.
    mean = run.model.body[1].running_mean
    assert world.size == 1 or not all(torch.equal(mean, other) for other in world.everyone(mean))


def check_structures_messages_and_formats(world):
    """Blocks that take and return dicts; messages over Gloo instead of shared memory; dtypes by name."""
    compare(DECODER, world.rank, sgd, clip=0.5, comm="c10d")
    compare(DECODER, world.rank, sgd, clip=0.5, bf16=True, format="bf16", mp_policy=dovetail.MixedPrecisionPolicy())


@dataclasses.dataclass(frozen=True)
class State:
    x: torch.Tensor
    depth: int
    beside: dict


class Deepens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state):
        x = self.linear(state.x).tanh()
        assert x.dtype == state.beside["mean"].dtype
        return State(x, state.depth + 1, {"mean": x.mean() + state.beside["mean"]})


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Deepens() for _ in range(3))

    def forward(self, x):
        state = State(x, 0, {"mean": x.mean()})
        for layer in self.layers:
            state = layer(state)
        assert state.depth == 3
        return {"end": state}


def check_dataclasses(world):
    """As inputs and outputs, frozen ones, with structures inside and inside of others."""
    def gradients(shard, policy):
        torch.manual_seed(2)
        model = Deep()
        for layer in model.layers:
            shard(layer, mesh=world.mesh, reshard_after_forward=True, mp_policy=policy)
        shard(model, mesh=world.mesh, mp_policy=policy)
        end = model(torch.ones(2, 8) + world.rank)["end"]
        (end.x.float().square().sum() + end.beside["mean"].float()).backward()
        return [full(p.grad) for p in model.parameters()]

    for kinds in ({}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}):
        ours = gradients(dovetail.fully_shard, dovetail.MixedPrecisionPolicy(**kinds))
        theirs = gradients(torch_fully_shard, TorchPolicy(**kinds))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


class Counts(nn.Module):
    """Changes what it is given, as a cache of a decoder is changed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, *, cache):
        cache.beside["calls"] += 1
        cache.x.add_(1)
        return self.linear(x)


def check_dataclasses_that_a_module_changes(world):
    """The module has the object of its caller, unless tensors in it become others."""
    layer = dovetail.fully_shard(Counts(), mesh=world.mesh)
    cache = State(torch.zeros(2), 0, {"calls": 0})
    for calls in (1, 2):
        layer(torch.ones(2, 8), cache=cache).sum().backward()
        assert cache.beside["calls"] == calls and torch.equal(cache.x, torch.full((2,), float(calls)))
