"""What the checks of sharded tensors share: layouts, a set of parameters, and comparisons."""

import math
import random

import torch
from dovetail.ragged import ShardedTensor, intervals_of, sharded_tensor
from dovetail.runs import chunk_intervals
from torch.distributed.tensor import DTensor, Replicate

# Cut inside rows; a vector; 0-dim; nothing at all; fewer elements than ranks; as torch chunks it (stock at 2 and 4).
SHAPES = {"matrix": (5, 7), "vector": (19,), "scalar": (), "nothing": (0, 3), "few": (1,), "rows": (8, 3),
          "kernel": (3, 2, 2, 5)}


def cut(name: str, shape: tuple, ranks: int, seed: int = 0) -> tuple:
    """Intervals of the parameter `name`: whole rows for "rows", else cuts at random, some ranks with nothing."""
    numel = math.prod(shape)
    if name == "rows":
        return tuple((r * numel // ranks, (r + 1) * numel // ranks) for r in range(ranks))
    draw = random.Random(f"{name} {ranks} {seed}")
    cuts = sorted(draw.randint(0, numel) for _ in range(ranks - 1))
    if name == "kernel" and cuts:
        cuts[0] = 0  # an empty first rank
    runs = tuple(zip([0, *cuts], [*cuts, numel]))
    chunks_by_chance = numel > ranks > 1 and runs == chunk_intervals(shape, ranks)
    return cut(name, shape, ranks, seed + 10) if chunks_by_chance else runs


def values(name: str, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * seed)
    return torch.randn(SHAPES[name], generator=draw).to(dtype)


def shard(world, full: torch.Tensor, intervals: tuple, **options) -> DTensor:
    begin, end = intervals[world.rank]
    return sharded_tensor(full.reshape(-1)[begin:end].clone(), world.mesh, intervals, full.shape, **options)


def sharded(world, name: str, seed: int = 0, dtype=torch.float32, layout: int = 0, **options) -> DTensor:
    full = values(name, dtype, seed)
    return shard(world, full, cut(name, SHAPES[name], world.size, layout), **options)


def replicate(world, full: torch.Tensor) -> DTensor:
    return DTensor.from_local(full.clone(), world.mesh, [Replicate()])


def whole(t) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def same(t, expected: torch.Tensor, note: str = "") -> None:
    """Equal bit for bit, with dtype and shape; of any kind of tensor. A collective."""
    got = whole(t).detach()
    assert got.dtype == expected.dtype and got.shape == expected.shape, (note, got, expected)
    assert torch.equal(got, expected.detach()), (note, got, expected)


def close(t, expected: torch.Tensor, note: str = "") -> None:
    torch.testing.assert_close(whole(t).detach(), expected.detach(), msg=lambda m: f"{note}: {m}", equal_nan=True)


def raises(kind, call, *words: str) -> None:
    """call() raises `kind`, and its message has every word."""
    try:
        call()
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def layout_kept(t, like) -> None:
    assert isinstance(t, ShardedTensor) == isinstance(like, ShardedTensor), (type(t), type(like))
    assert intervals_of(t) == intervals_of(like)
