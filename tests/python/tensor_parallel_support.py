"""Small models made tensor parallel by torch, and what the checks of them share."""

import functools
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.distributed.tensor import Replicate, Shard

import models
from comparison import Case, next_token, tokens

# Torch says of its own full_tensor() on two mesh dimensions that it takes two gathers.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@functools.cache
def mesh_of(data: int, tensor: int):
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


def meshes(world):
    """Every kind that the ranks allow."""
    return [mesh_of(2, 2)] if world.size == 4 else [mesh_of(1, 2), mesh_of(2, 1)]


def parallel_mlp(mesh, width=32, depth=3):
    """Norm and scale stay plain."""
    model = models.Mlp(width, depth)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def uneven_mlp(mesh, empty):
    """Parts of 8 and 7 rows, or also of one row and none; biases that tensor parallelism copies, a norm that it does
    not."""
    model = models.Mlp(width=5, depth=2)
    if empty:
        model.layers[1] = nn.Sequential(nn.Linear(5, 1), nn.GELU(), nn.Linear(1, 5))
    if mesh is None:
        return model
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    return model


def parallel_llama(mesh):
    """Attention split by heads, activations between blocks by positions: every parameter is a DTensor."""
    model, tp = models.Llama(), mesh["tp"]
    parallelize_module(model, tp, {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    for block in model.blocks:
        into, out = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, tp, {
            "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
            "wq": into, "wk": into, "wv": into, "wo": out, "w1": into, "w3": into, "w2": out})
        block.heads //= tp.size()
    return model


def vectors(width):
    return lambda g: (torch.randn(4, width, generator=g), torch.randn(4, width, generator=g))


def squares(model, x, y):
    return F.mse_loss(model(x).float(), y)


def mlp(mesh):
    return Case(lambda: parallel_mlp(mesh), vectors(32), squares, lambda m: list(m.layers))


def uneven(mesh, empty=False):
    return Case(lambda: uneven_mlp(mesh, empty), vectors(5), squares, lambda m: list(m.layers))


def llama(mesh):
    return Case(lambda: parallel_llama(mesh), tokens(64, 2, 9), next_token, lambda m: list(m.blocks))


def sharded(case, mesh, shard, **how):
    torch.manual_seed(7)
    model = case.make()
    for block in case.blocks(model):
        shard(block, mesh=mesh["dp"], **how)
    return shard(model, mesh=mesh["dp"], **how)


def alone(mesh, step=0):
    """Gradients of the uneven MLP with an empty part, which torch's fully_shard cannot reduce: of one process without
    any sharding, over the data of all ranks."""
    torch.manual_seed(7)
    case = uneven(None, empty=True)
    model, ranks = case.make(), mesh["dp"].size()
    for rank in range(ranks):
        (case.loss(model, *case.batch(torch.Generator().manual_seed(1000 * step + rank))) / ranks).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def batch(case, mesh, step=0):
    """Other data on every data-parallel rank, the same on those of one tensor-parallel group."""
    return case.batch(torch.Generator().manual_seed(1000 * step + mesh["dp"].get_local_rank()))
