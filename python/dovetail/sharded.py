"""A sharded tensor whose shard on each rank is one run of elements of the row-major whole tensor.

It is a DTensor with a placement of its own, `Ragged`, and its own dispatch (`sharded_ops`): stock DTensor has no rule
for shards that end inside a row.

On a 2-D mesh the second dimension is that of tensor parallelism: each of its ranks has a part of the tensor, a chunk
of one dimension (Shard) or all of it (Replicate), and runs count in that part.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .runs import Interval, boxes, canonical, chunk, chunk_intervals, row_major_strides, same_runs


class Ragged(Placement):
    """Each rank of the mesh dimension holds one run of elements of the row-major whole tensor.

    intervals: (begin, end) per rank, in elements; empty where begin == end. Two placements are equal when every rank
    holds the same elements. Neither a shard of a dimension, nor a replica, nor partial, as torch asks.
    writes: whether this rank writes its run into distributed checkpoints; not where others, who hold the same elements
    in other runs, do.
    """

    def __init__(self, intervals: Sequence[Interval], writes: bool = True):
        super().__init__()
        self.intervals = tuple((int(begin), int(end)) for begin, end in intervals)
        self.writes = writes
        self._runs = canonical(self.intervals)

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Ragged) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash((Ragged, self._runs))

    def __repr__(self) -> str:
        return f"Ragged({self.intervals})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[type, tuple[tuple[Interval, ...], bool]]:
        return Ragged, (self.intervals, self.writes)

    def __copy__(self) -> "Ragged":
        return self

    def __deepcopy__(self, memo: object) -> "Ragged":
        return self


def ragged_spec(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int],
                dtype: torch.dtype) -> DTensorSpec:
    """The spec of a row-major tensor of `shape`."""
    shape = torch.Size(shape)
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, row_major_strides(shape), dtype))


def stock(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A stock DTensor that needs no gradient. Without its __init__, which does nothing but load torch's compiler
    (_compiler.py)."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A stock DTensor, Replicate, over a plain tensor that is the same on every rank."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return stock(whole, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))


def all_gather(part: torch.Tensor, lengths: Sequence[int], mesh: DeviceMesh, dim: int = 0) -> list[torch.Tensor]:
    """Every rank's 1-D `part` of lengths[rank] elements, along a mesh dimension in its order; empty ones take part too.

    One all-gather of ranks * max(lengths) elements, as bytes, so that every dtype travels; on the mesh's device, and
    the result where `part` lies.
    """
    longest = max(lengths)
    if len(lengths) == 1 or longest == 0:
        return [part] * len(lengths)
    sent = part.to(mesh.device_type)
    if sent.numel() < longest:
        sent = torch.cat([sent, sent.new_zeros(longest - sent.numel())])
    everyone = torch.empty(len(lengths) * longest, dtype=sent.dtype, device=sent.device)
    dist.all_gather_single(everyone.view(torch.uint8), sent.contiguous().view(torch.uint8), group=mesh.get_group(dim))
    everyone = everyone.to(part.device)
    return [everyone[rank * longest:rank * longest + length] for rank, length in enumerate(lengths)]


def gather(t: "ShardedTensor") -> torch.Tensor:
    """The whole tensor, a fresh plain one, on every rank of the mesh. A collective."""
    part, split = gather_part(t), t.split_dim
    if split is None:
        return part
    if part.is_meta:
        return part.new_empty(t.shape)
    shapes = t.part_shapes
    parts = all_gather(part.view(-1), [math.prod(shape) for shape in shapes], t.device_mesh, 1)
    return torch.cat([p.view(shape) for p, shape in zip(parts, shapes)], dim=split)


def gather_part(t: "ShardedTensor") -> torch.Tensor:
    """The part that this rank's runs count in: on a 1-D mesh the whole. A collective of the first mesh dimension."""
    local = t._local_tensor
    whole = torch.empty(t.part_shape, dtype=local.dtype, device=local.device)
    if local.is_meta:
        return whole
    flat, intervals = whole.view(-1), t.intervals
    for (begin, end), part in zip(intervals, all_gather(local, [e - b for b, e in intervals], t.device_mesh)):
        flat[begin:end].copy_(part)
    return whole


def slice_run(whole: torch.Tensor, shape: Sequence[int], run: Interval) -> torch.Tensor:
    """Elements [begin, end) of `whole` expanded to `shape`: 1-D, a view where `whole` is contiguous.

    Never materializes more than the rows that the run touches.
    """
    begin, end = run
    whole = whole.expand(tuple(shape))
    if whole.is_contiguous() or begin >= end:
        return whole.view(-1)[begin:end] if whole.is_contiguous() else whole.new_empty(0)
    row = math.prod(shape[1:])
    first, last = begin // row, -(-end // row)
    return whole[first:last].reshape(-1)[begin - first * row:end - first * row]


class ShardedTensor(DTensor):
    """A DTensor of shape `shape` of which this rank holds the elements [begin, end), row-major, of its part.

    The part is the whole tensor but where the second dimension of a 2-D mesh splits it.

    `_local_tensor`, 1-D of end - begin elements, is the storage: every method reads it when called, so its owner may
    swap what lies below it. Deliberately without `__slots__`: copies made by the asynchronous checkpoint stager follow
    the slots of DTensor.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """In place of DTensor's, which does nothing but load torch's compiler (_compiler.py)."""

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """(begin, end) of every rank of the mesh's first dimension, in elements of the part."""
        return self._spec.placements[0].intervals

    @property
    def run(self) -> Interval:
        """(begin, end) of this rank."""
        return self.intervals[self._spec.mesh.get_local_rank(0)]

    @property
    def split_dim(self) -> int | None:
        """The tensor dimension that the second mesh dimension splits; None where parts are the whole."""
        placements = self._spec.placements
        return placements[1].dim if len(placements) > 1 and placements[1].is_shard() else None

    @property
    def part_shapes(self) -> list[torch.Size]:
        """Of every rank of the second mesh dimension; [shape] on a 1-D mesh."""
        mesh, dim = self._spec.mesh, self.split_dim
        parts = mesh.size(1) if mesh.ndim > 1 else 1
        if dim is None:
            return [self.shape] * parts
        return [part_shape(self.shape, dim, parts, r) for r in range(parts)]

    @property
    def part_shape(self) -> torch.Size:
        """Of the part that this rank's runs count in."""
        mesh, dim = self._spec.mesh, self.split_dim
        return self.shape if dim is None else part_shape(self.shape, dim, mesh.size(1), mesh.get_local_rank(1))

    @property
    def part_begin(self) -> int:
        """Where this rank's part begins along `split_dim`."""
        mesh, dim = self._spec.mesh, self.split_dim
        return 0 if dim is None else chunk(self.shape[dim], mesh.size(1), mesh.get_local_rank(1))[0]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements, 1-D, of a plain tensor that expands to this one's shape: a view where it can be."""
        dim = self.split_dim
        if dim is not None:
            whole = whole.expand(self.shape).narrow(dim, self.part_begin, self.part_shape[dim])
        return slice_run(whole, self.part_shape, self.run)

    def with_local(self, local: torch.Tensor, shape: Sequence[int] | None = None,
                   intervals: Sequence[Interval] | None = None) -> "ShardedTensor":
        """A sharded tensor over `local`: on the same mesh, of this layout unless another is given.

        Another shape only where `split_dim` is None.
        """
        if local.dtype == self._spec.tensor_meta.dtype and intervals is None and shape in (None, self.shape):
            return ShardedTensor(local, self._spec, requires_grad=False)
        first, *second = self._spec.placements
        placement = first if intervals is None else Ragged(intervals, first.writes)
        shape = self.shape if shape is None else shape
        spec = ragged_spec(self._spec.mesh, (placement, *second), shape, local.dtype)
        return ShardedTensor(local, spec, requires_grad=False)

    def __repr__(self, *, tensor_contents=None) -> str:
        begin, end = self.run
        part = f"part {tuple(self.part_shape)} of " if self.split_dim is not None else ""
        return (f"ShardedTensor(elements [{begin}, {end}) of {part}shape {tuple(self.shape)}: {self._local_tensor}, "
                f"device_mesh={self.device_mesh}, placements={self.placements}"
                f"{', requires_grad=True' if self.requires_grad else ''})")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return sharded_ops.dispatch(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's elements, 1-D. Differentiable: its gradient is a sharded tensor of the same layout.

        Raises RuntimeError when grad_placements is anything but this tensor's placements.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise RuntimeError(f"to_local: the gradient of {self.placements} has the same placements, "
                               f"not {tuple(grad_placements)}")
        local = _ToLocal.apply(self) if torch.is_grad_enabled() else self._local_tensor
        if getattr(self, "_is_param", False):  # what torch does for every DTensor: a parameter's shard is a parameter
            local = local.view_as(local)
            local._is_param = True
        return local

    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, *,
                     async_op: bool = False, forward_dtype: torch.dtype | None = None,
                     backward_dtype: torch.dtype | None = None) -> DTensor:
        """This tensor with other placements on the same mesh. Differentiable, synchronous, a collective.

        Other runs are cut from the whole part, everything else from the whole tensor. Raises RuntimeError for another
        mesh, for Partial, and for runs of other parts.
        """
        if placements is None:
            raise RuntimeError("redistribute: placements are needed")
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise RuntimeError(f"redistribute: from {self.device_mesh} to another mesh, {device_mesh}")
        target = tuple(placements)
        source = self if forward_dtype is None else self.to(forward_dtype)
        if target == self.placements:
            return source.view_as(source)
        ragged = isinstance(target[0], Ragged)
        if any(p.is_partial() for p in target) or len(target) != len(self.placements) or (
                ragged and target[1:] != self.placements[1:]):
            raise RuntimeError("redistribute: cannot go from "
                               f"{' to '.join(', '.join(map(str, p)) for p in (self.placements, target))}")
        if ragged:
            return _Recut.apply(source, target[0].intervals)
        return _Gather.apply(source).redistribute(placements=target, backward_dtype=backward_dtype)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, plain, on every rank. Differentiable, a collective.

        grad_placements: Replicate() for each mesh dimension, the default, when every rank's gradient is the same;
        Partial() when the gradient is the sum of what the ranks have.
        """
        return _Gather.apply(self).to_local(grad_placements=grad_placements)

    @property
    def data(self) -> "ShardedTensor":
        """The tensor without its autograd history, over the same elements. Cannot be assigned."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError("`.data = x` of a sharded tensor has no effect on its shard, so it is refused: "
                           "use `t.copy_(x)` under torch.no_grad()")

    def __deepcopy__(self, memo: dict) -> "ShardedTensor":
        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a sharded tensor cannot be pickled: its bytes mean nothing on another rank or mesh. Save with "
                        "torch.distributed.checkpoint, or pickle full_tensor()")

    def __tensor_flatten__(self):
        # The order and content that torch's compiler expects of every DTensor.
        return ["_local_tensor", "device_mesh"], (
            self._spec.placements, self._spec.tensor_meta, self._spec.shard_order, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride):
        placements, meta, _, requires_grad = flatten_spec
        spec = DTensorSpec(inner_tensors["device_mesh"], placements,
                           tensor_meta=TensorMeta(outer_size, outer_stride, meta.dtype))
        return ShardedTensor(inner_tensors["_local_tensor"], spec, requires_grad=requires_grad)

    def _boxes(self) -> list:
        # A tensor without elements is nobody's, yet a checkpoint must know it: the first rank writes it.
        if self.numel() == 0 and self.device_mesh.get_local_rank(0) == 0:
            return [((0,) * self.ndim, tuple(self.shape), 0)]
        found, dim = boxes(*self.run, self.part_shape), self.split_dim
        if dim is None:
            return found
        shift = tuple(self.part_begin if d == dim else 0 for d in range(self.ndim))
        return [(tuple(map(sum, zip(offsets, shift))), sizes, first) for offsets, sizes, first in found]

    def __create_write_items__(self, fqn: str, object) -> list:
        """What this rank writes of it into a distributed checkpoint: a run is several boxes."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        items = []
        for offsets, sizes, _ in self._boxes() if self.placements[0].writes else ():
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            items.append(WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes, _ in self._boxes()]

    def __get_tensor_shard__(self, index) -> torch.Tensor:
        for offsets, sizes, start in self._boxes():
            if index.offset is None or torch.Size(offsets) == index.offset:
                first = start - self.run[0] if self.numel() else 0
                return self._local_tensor[first:first + math.prod(sizes)].view(sizes)
        raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset} of {self.placements[0]}")


def deepcopy(t: DTensor, memo: dict) -> DTensor:
    """As copy.deepcopy, of a ShardedTensor or a stock DTensor: this rank's elements in memory of their own, the
    gradient and what users have put on it. A copy of a parameter is a parameter, and belongs to no unit."""
    if id(t) in memo:
        return memo[id(t)]
    if not t.is_leaf:
        raise RuntimeError("deepcopy: a tensor with autograd history has none; use detach() or clone() first")
    result = type(t)(t._local_tensor.detach().clone(), t._spec, requires_grad=t.requires_grad)
    memo[id(t)] = result
    if t.grad is not None:
        result.grad = deepcopy(t.grad, memo) if isinstance(t.grad, DTensor) else copy.deepcopy(t.grad, memo)
    for name, value in vars(t).items():
        if name not in ("_local_tensor", "_spec", "__deepcopy__") and not name.startswith("_dovetail_"):
            setattr(result, name, copy.deepcopy(value, memo))
    return result


def runs_of(t: DTensor) -> tuple[Interval, ...] | None:
    """(begin, end) of every rank, of a ShardedTensor or a stock DTensor in Shard(0) on a 1-D mesh; else None."""
    if isinstance(t, ShardedTensor):
        return t.intervals
    return chunk_intervals(t.shape, t.device_mesh.size()) if t.placements == (Shard(0),) else None


def part_shape(shape: Sequence[int], dim: int, parts: int, number: int) -> torch.Size:
    """Of a part of a tensor whose dimension `dim` is split as Shard does."""
    return torch.Size([*shape[:dim], chunk(shape[dim], parts, number)[1], *shape[dim + 1:]])


def same_elements(one: DTensor, other: ShardedTensor) -> bool:
    """Whether every rank holds the same elements of two tensors of one shape on one mesh."""
    runs = runs_of(one)
    return runs is not None and same_runs(runs, other.intervals) and one.placements[1:] == other.placements[1:]


# Each pair's backward is the other, which makes both differentiable any number of times.
class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.like = t.detach()
        return t._local_tensor.view_as(t._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        return _FromLocal.apply(grad, ctx.like)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, like):
        ctx.like = like
        return like.with_local(local.view_as(local))

    @staticmethod
    def backward(ctx, grad):
        return _Slice.apply(grad, ctx.like).to_local(), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        ctx.like = t.detach()
        return replicated(gather(t), t.device_mesh)

    @staticmethod
    def backward(ctx, grad):
        return _Slice.apply(grad, ctx.like)


class _Recut(torch.autograd.Function):
    """Other runs. Ranks of other parts take no part: their layouts may happen to be the same already."""

    @staticmethod
    def forward(ctx, t, intervals):
        ctx.like = t.detach()
        run = intervals[t.device_mesh.get_local_rank(0)]
        return t.with_local(slice_run(gather_part(t), t.part_shape, run).clone(), intervals=intervals)

    @staticmethod
    def backward(ctx, grad):
        return _Slice.apply(grad, ctx.like), None


class _Slice(torch.autograd.Function):
    """A DTensor in the layout of `like`; summed over ranks first where it is Partial."""

    @staticmethod
    def forward(ctx, whole, like):
        if isinstance(whole, ShardedTensor):
            return whole.view_as(whole) if whole.placements == like.placements else whole.redistribute(
                placements=like.placements)
        if not all(p.is_replicate() for p in whole.placements):
            whole = whole.redistribute(placements=[Replicate()] * whole.device_mesh.ndim)
        return like.with_local(like.cut(whole._local_tensor).clone())

    @staticmethod
    def backward(ctx, grad):
        return (_Gather.apply(grad) if isinstance(grad, ShardedTensor) else grad), None


from . import sharded_ops  # noqa: E402  the two modules need each other; the classes come first
