"""Where the elements of a parameter lie: runs over data-parallel ranks, of the whole or of a tensor-parallel part.

A parameter that torch's parallelize_module has made a DTensor is sharded once more: what the engine has is an ordinary
tensor, this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ._ranks import concatenated
from .ragged import sharded_tensor
from .runs import Interval, row_major_strides


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How a parameter is split, or copied, over the ranks of a mesh of tensor parallelism.

    Attributes:
        mesh: 1-D.
        placement: Shard or Replicate.
        shape: of the whole parameter.
        both: the 2-D mesh of data and tensor parallelism.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    both: DeviceMesh

    @property
    def splits(self) -> bool:
        return self.placement.is_shard() and self.mesh.size() > 1

    @property
    def even(self) -> bool:
        """Whether all ranks have parts of one shape."""
        return not self.splits or self.shape[self.placement.dim] % self.mesh.size() == 0

    def whole(self, part: torch.Tensor) -> DTensor:
        """The DTensor of `part`, as modules compute with it. Its gradient reaches `part` in the same placement: summed
        first where ranks have terms of it. Made with a graph whatever the grad mode, as a parameter needs gradients
        in every mode."""
        with torch.enable_grad():
            return DTensor.from_local(part, self.mesh, (self.placement,), run_check=False, shape=self.shape,
                                      stride=row_major_strides(self.shape))


def tensor_parallel(param: torch.Tensor, shards: DeviceMesh, name: str) -> TensorParallel | None:
    """What tensor parallelism has made of a parameter that is to be sharded over `shards`; None of a plain one.

    Raises:
        ValueError: where it cannot be sharded further, naming it.
    """
    if not isinstance(param, DTensor):
        return None
    mesh, placements = param.device_mesh, param.placements
    if mesh.ndim != 1 or type(placements[0]) not in (Shard, Replicate):
        raise ValueError(f"parameter {name} is a DTensor already: wanted Shard or Replicate on a 1-D mesh of tensor "
                         f"parallelism, got {placements} on {mesh}")
    try:
        both = concatenated(shards, mesh)
    except ValueError as error:
        raise ValueError(f"parameter {name} is a DTensor on {mesh} already, and is to be sharded over {shards}, as "
                         f"mesh= and Plan(zero1=) say: {error}") from None
    return TensorParallel(mesh, placements[0], param.shape, both)


def part_of(param: torch.Tensor) -> torch.Tensor:
    """What of a parameter this rank shards further: its tensor-parallel part, or all of it."""
    return param._local_tensor.detach() if isinstance(param, DTensor) else param.detach()


@dataclass(frozen=True, eq=False)
class Layout:
    """Of one parameter.

    Attributes:
        mesh: 1-D, of the ranks that hold one copy of the main weights.
        intervals: (begin, end) per rank of it, in elements of the row-major part.
        shape: of the part, which is the whole without tensor parallelism.
        writes: whether distributed checkpoints take this rank's elements.
    """

    mesh: DeviceMesh
    intervals: tuple[Interval, ...]
    shape: torch.Size
    parallel: TensorParallel | None = None
    writes: bool = True

    def tensor(self, local: torch.Tensor) -> DTensor:
        """The sharded tensor of the parameter's shape over this rank's elements, 1-D."""
        return self._tensor(local, self.intervals, self.shape if self.parallel is None else self.parallel.shape,
                            self.parallel and self.parallel.placement)

    def parameter(self, local: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
        """tensor(local) as a parameter. Not by nn.Parameter, which begins with a detach(): for a stock DTensor that is
        an operation to be planned, which loads torch's compiler (_compiler.py)."""
        param = self.tensor(local)
        param._is_param = True
        return param.requires_grad_(requires_grad)

    def state(self, local: torch.Tensor, intervals: Sequence[Interval], shape: Sequence[int]) -> DTensor:
        """One of optimizer state that `shape` and `intervals` describe for this rank's part of the parameter."""
        parallel = self.parallel
        if parallel is not None and tuple(shape) == tuple(self.shape):
            return self._tensor(local, intervals, parallel.shape, parallel.placement)
        if parallel is None or not parallel.splits:
            return self._tensor(local, intervals, shape, parallel and Replicate())
        # Blocks are counted in each part: a row for each, so that they never load for other parts.
        return self._tensor(local, intervals, (parallel.mesh.size(), *shape), Shard(0))

    def _tensor(self, local, intervals, shape, second: Placement | None) -> DTensor:
        mesh = self.mesh if self.parallel is None else self.parallel.both
        return sharded_tensor(local, mesh, intervals, shape, second=second, writes=self.writes)
