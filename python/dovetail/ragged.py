"""Sharded parameters as DTensors: tensors whose shard on each rank is one run of elements of the row-major whole.

    p = torch.nn.Parameter(sharded_tensor(local, mesh, intervals, shape))

Importing this module teaches torch's state-dict helpers and foreach optimizers about such tensors (`sharded_state`).
`sharded_ops` says what each kind of operation does.
"""

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import sharded_state
from .runs import Interval, check_intervals, chunk_intervals, same_runs
from .sharded import Ragged, ShardedTensor, part_shape, ragged_spec, runs_of, slice_run, stock

__all__ = ["Ragged", "ShardedTensor", "from_full", "intervals_of", "local_elements", "sharded_tensor"]

sharded_state.install()


def sharded_tensor(local: torch.Tensor, mesh: DeviceMesh, intervals: Sequence[Interval], shape: Sequence[int], *,
                   second: Placement | None = None, writes: bool = True, requires_grad: bool = False) -> DTensor:
    """A DTensor of `shape` whose shards are runs of elements, over `local`; no communication.

    local: 1-D, contiguous, this rank's elements; its storage is shared. On the mesh's device, or on meta.
    mesh: 1-D, or 2-D where `second`, Shard or Replicate, says what each rank of its second dimension has a part of.
    intervals: (begin, end) of every rank of the (first) mesh dimension, in elements of the row-major part; any may be
    empty, together they hold every element once.
    writes: False where another rank writes these elements into distributed checkpoints.
    Returns a stock DTensor, Shard(0), when the intervals are those of torch.chunk along dimension 0 of a 1-D mesh and
    none is empty, else a ShardedTensor: the stock infinity norm raises on a rank whose shard is empty, and the others
    wait for ever.
    Raises ValueError for anything else than described.
    """
    for name, value, kind in (("local", local, torch.Tensor), ("mesh", mesh, DeviceMesh)):
        if not isinstance(value, kind):
            raise ValueError(f"sharded_tensor: {name}: wanted a {kind.__name__}, got {type(value).__name__}")
    shape = torch.Size(shape)
    if mesh.ndim != (1 if second is None else 2):
        raise ValueError(f"sharded_tensor: a 1-D mesh is needed, or a 2-D one with `second`; this one has {mesh.ndim} "
                         f"dimensions: {mesh}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"sharded_tensor: this rank is not part of {mesh}")
    if len(intervals) != mesh.size(0):
        raise ValueError(f"sharded_tensor: {len(intervals)} intervals for a mesh of {mesh.size(0)} ranks")
    part = shape
    if second is not None and second.is_shard():
        part = part_shape(shape, second.dim, mesh.size(1), mesh.get_local_rank(1))
    intervals = check_intervals(intervals, math.prod(part))
    begin, end = intervals[mesh.get_local_rank(0)]
    if isinstance(local, DTensor) or local.shape != (end - begin,) or not local.is_contiguous():
        raise ValueError(f"sharded_tensor: local is {type(local).__name__} of shape {tuple(local.shape)} and strides "
                         f"{local.stride()}; a plain contiguous one of shape ({end - begin},) is needed")
    if local.device.type not in (mesh.device_type, "meta"):
        raise ValueError(f"sharded_tensor: local is on {local.device}, the mesh on {mesh.device_type}")
    local = local.detach()
    chunks = chunk_intervals(shape, mesh.size()) if second is None and writes else None
    if chunks is None or not same_runs(chunks, intervals) or any(begin == end for begin, end in intervals):
        placements = (Ragged(intervals, writes),) + (() if second is None else (second,))
        return ShardedTensor(local, ragged_spec(mesh, placements, shape, local.dtype), requires_grad=requires_grad)
    rows = local.view(-1, *shape[1:]).detach()  # a view would keep `local` and what the storage was
    return stock(rows, ragged_spec(mesh, (Shard(0),), shape, local.dtype)).requires_grad_(requires_grad)


def intervals_of(t: DTensor) -> tuple[Interval, ...]:
    """(begin, end) of every rank of the mesh, in elements, of a ShardedTensor or a stock DTensor in Shard(0).

    Raises TypeError for any other tensor.
    """
    runs = runs_of(t) if isinstance(t, DTensor) else None
    if runs is None:
        what = t.placements if isinstance(t, DTensor) else type(t).__name__
        raise TypeError(f"intervals_of: neither a ShardedTensor nor a DTensor in Shard(0) on a 1-D mesh: {what}")
    return runs


def local_elements(t: DTensor) -> torch.Tensor:
    """This rank's elements of either kind: 1-D, over the same storage, without autograd history."""
    intervals_of(t)
    return t._local_tensor.detach().view(-1)


def elements_for(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """What of `value`, sharded in any way or whole, this rank holds in the layout of `like`: 1-D, perhaps a view.

    value: of the shape of `like`. A collective where it is sharded in another way.
    """
    if isinstance(value, DTensor):
        if value.placements == like.placements and value.device_mesh == like.device_mesh:
            return local_elements(value)
        if isinstance(value, ShardedTensor) and isinstance(like, ShardedTensor) and (
                value.device_mesh == like.device_mesh and value.placements[1:] == like.placements[1:]):
            return local_elements(value.redistribute(placements=like.placements))
        value = value.full_tensor()
    if isinstance(like, ShardedTensor):
        return like.cut(value)
    run = runs_of(like)[like.device_mesh.get_local_rank()]
    return slice_run(value, like.shape, run)


def from_full(full: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's part, a copy, of a whole tensor that every rank has, in the layout of `like`; no communication.

    full: plain, or a DTensor in Replicate; of the shape of `like`, any dtype, which the result keeps. The result lies
    on the device of `like`, of the mesh where that is meta, needs no gradient, and is right if `full` is the same on
    every rank.
    Raises ValueError for another shape, a `full` that is sharded itself, or what is no tensor.
    """
    for name, value, kind in (("full", full, torch.Tensor), ("like", like, DTensor)):
        if not isinstance(value, kind):
            raise ValueError(f"from_full: {name}: wanted a {kind.__name__}, got {type(value).__name__}")
    if isinstance(full, DTensor):
        if not all(p.is_replicate() for p in full.placements):
            raise ValueError(f"from_full: the whole tensor is sharded itself, as {full.placements}")
        full = full._local_tensor
    if full.shape != like.shape:
        raise ValueError(f"from_full: a tensor of shape {tuple(full.shape)} for one of shape {tuple(like.shape)}")
    full, mesh = full.detach(), like.device_mesh
    device = torch.device(mesh.device_type) if like.is_meta else like.device
    if isinstance(like, ShardedTensor):
        return sharded_state.distributed(full, like, device)
    whole = DTensor.from_local(full.to(device), mesh, [Replicate()] * mesh.ndim)
    return whole.redistribute(placements=like.placements).clone()
