"""What torch's fully_shard is told of how shards lie, as Dovetail's plans have it; else an error at the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .plan import Plan


def plan_and_reshard(plan: Plan, reshard_after_forward: bool | int | None, mesh: DeviceMesh,
                     below: Iterable[tuple[str, Plan]]) -> tuple[Plan, bool | None]:
    """The plan, and whether whole parameters are given up after forward.

    A number of ranks to reshard to is the plan's zero3: gathers are among so many neighbours, in forward as well. It
    is one for all units of a root, so a unit that has none takes over that of the units below.

    Args:
        below: path and plan of the units below the one that is made.
    """
    number = reshard_after_forward
    if not isinstance(number, (bool, int, type(None))):
        raise ValueError(f"reshard_after_forward: wanted True, False, None or a number of ranks, got {number!r}")
    if isinstance(number, int) and not isinstance(number, bool):
        most = plan.zero2 or plan.zero1 or mesh.size(mesh.ndim - 1)
        if number < 1 or most % number:
            raise ValueError(f"reshard_after_forward: wanted True, False, None or a divisor of {most}, the number of "
                             f"ranks over which gradients are sharded, got {number}")
        if plan.zero3 not in (0, number):
            raise ValueError(f"reshard_after_forward={number} and plan=Plan(zero3={plan.zero3}): wanted the same of "
                             "both")
        reshard_after_forward = number > 1
        if 1 < number < most:  # the ends are False and True, as torch has it
            plan = dataclasses.replace(plan, zero3=number)
    numbers = {other.zero3: path for path, other in below}
    if plan.zero3:
        numbers.setdefault(plan.zero3, "the unit around them")
    if len(numbers) > 1:
        said = ", ".join(f"{zero3 or 'none'} for {path}" for zero3, path in numbers.items())
        raise ValueError("reshard_after_forward as a number of ranks, or plan.zero3: wanted the same for all units of "
                         f"a root, got {said}")
    return dataclasses.replace(plan, zero3=max(numbers, default=0)), reshard_after_forward


def check_placements(choose: Callable[[nn.Parameter], Any], parameters: Iterable[tuple[str, nn.Parameter]],
                     mesh: DeviceMesh) -> None:
    """Raises where a shard_placement_fn wants a placement other than Shard(0), or another mesh, for a parameter."""
    if not callable(choose):
        raise ValueError(f"shard_placement_fn: wanted a function of a parameter, got {choose!r}")
    for name, param in parameters:
        placement = said = choose(param)
        who = f"shard_placement_fn: parameter {name} of shape {tuple(param.shape)}"
        if hasattr(said, "mesh_info"):  # torch's ShardPlacementResult
            placement, own = said.placement, said.mesh_info.mesh
            if own.mesh.tolist() != mesh.mesh.tolist():
                raise NotImplementedError(f"{who}: wanted the mesh of the unit, {mesh}, got {own}: parameters of a "
                                          "root have one mesh")
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise ValueError(f"{who}: wanted None or Shard(0), got {said!r}")
        if placement.dim not in (0, -param.dim()):
            raise NotImplementedError(f"{who}: wanted None or Shard(0), got {placement!r}: a shard is a run of "
                                      "elements of the row-major weight, which columns are not; plan=Plan(block=...) "
                                      "says what no shard may cut")
