"""Small models trained with dovetail.fully_shard and with torch's: equal losses and weights, see comparison.BOUNDS."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import dovetail
import models
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
