"""What optimizers on the engine have to mind where tensor-parallel ranks have parts of parameters.

Each tensor-parallel rank runs an engine of its own, with the ranks of its data-parallel dimension.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._runtime import Runtime
from ..ragged import local_elements


def refuse_units_of_parts(who: str, runtime: Runtime, unit_of) -> None:
    """Raises where an operation needs more of a parameter whole than a tensor-parallel rank has.

    unit_of(spec, kind): the units that operations want of a parameter, as dovetail.optim.Operation.unit names them.
    """
    for slot, spec in zip(runtime.slots, runtime.specs):
        parallel = slot.parallel
        if parallel is None or not parallel.splits or not slot.param.requires_grad:
            continue
        for unit in unit_of(spec, slot.kind):
            if unit == "element" or unit.startswith("block:") and parallel.even:
                continue
            wanted, sizes = ("elements or blocks", "") if parallel.even else ("elements", ", of several sizes")
            raise ValueError(f'{who}: parameter {spec.name}: wanted operations on {wanted}, since each of '
                             f'{parallel.mesh.size()} tensor-parallel ranks has a part of it, {parallel.placement!r}'
                             f'{sizes}; got one on units of "{unit}"')


def skip_together(runtime: Runtime) -> None:
    """Makes every tensor-parallel rank skip the coming step where one does: the engine skips where a gradient is not
    finite on any of its own ranks, and the ranks' copies of parameters would part. Collective."""
    held = [local_elements(slot.gradient) for slot in runtime.slots if slot.param.grad is not None]
    held = [g for g in held if g.numel()]
    largest = torch.stack(torch._foreach_norm(held, torch.inf)) if held else torch.zeros(1)
    broken = (~torch.isfinite(largest).all()).float().reshape(1)
    for mesh in runtime.all_ranks():
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=mesh.get_group())
    if broken and held:
        held[0][0] = torch.nan
