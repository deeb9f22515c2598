"""What fully_shard is told: what cannot be is an error at the call, with nothing changed, and what torch's is told of
how shards lie becomes a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ._runtime import STATE
from ._unit import shared_places, unit_of
from .plan import Heads, Nodes, Plan
from .policies import MixedPrecisionPolicy


def check_kinds(mesh: Any, mp_policy: Any, offload_policy: Any, plan: Any, units: Any) -> None:
    """Raises ValueError where an argument of fully_shard is of another kind than it takes; policies may be torch's."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"mesh: wanted a DeviceMesh or None, got {mesh!r}")
    for name, value, wanted in (("mp_policy", mp_policy, "MixedPrecisionPolicy"),
                                ("offload_policy", offload_policy, "OffloadPolicy")):
        if not any(cls.__name__ == wanted for cls in type(value).__mro__):
            raise ValueError(f"{name}: wanted an object of {wanted}, got {value!r}")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan: wanted a Plan, got {plan!r}")
    if units is not None and not isinstance(units, Mapping):
        raise ValueError(f"units: wanted Heads and Nodes by pattern of names, got {units!r}")
    for pattern, said in (units or {}).items():
        if not isinstance(pattern, str):
            raise ValueError(f"units: wanted patterns of names, got {pattern!r}")
        for part in said if isinstance(said, (list, tuple)) else [said]:
            if not isinstance(part, (Heads, Nodes)):
                raise ValueError(f"units: {pattern!r}: wanted Heads, Nodes or a list of them, got {part!r}")


def ignored_parameters(ignored: Any) -> list[nn.Parameter]:
    """Those of ignored_params."""
    if ignored is None:
        return []
    if isinstance(ignored, (torch.Tensor, str)) or not isinstance(ignored, Iterable):
        raise ValueError(f"ignored_params: wanted a set of parameters, got {_shown(ignored)}")
    found = list(ignored)
    for p in found:
        if not isinstance(p, torch.Tensor):
            raise ValueError(f"ignored_params: wanted a set of parameters, got one with {_shown(p)}")
    return found


def format_of(format: str | None, policy: MixedPrecisionPolicy) -> str | None:
    """Of the unit's runtime parameters; None where nothing says it."""
    named = {None: None, torch.float32: "fp32", torch.bfloat16: "bf16"}
    for field in ("param_dtype", "reduce_dtype"):
        value = getattr(policy, field)
        if not isinstance(value, (torch.dtype, type(None))) or value not in named:
            raise ValueError(f"{field}: wanted torch.float32, torch.bfloat16 or None, got {value!r}")
    out = policy.output_dtype
    if out is not None and not (isinstance(out, torch.dtype) and out.is_floating_point):
        raise ValueError(f"output_dtype: wanted a floating-point dtype or None, got {out!r}")
    if not isinstance(policy.cast_forward_inputs, bool):
        raise ValueError(f"cast_forward_inputs: wanted True or False, got {policy.cast_forward_inputs!r}")
    asked = named[policy.param_dtype]
    if format and asked and format != asked:
        raise ValueError(f"format {format!r} and param_dtype {policy.param_dtype}: wanted the same of both")
    return format or asked


def check_dtypes(modules: list[nn.Module], ignored: Collection[nn.Parameter], main_dtype: torch.dtype | None) -> None:
    """Raises ValueError for a parameter to be sharded that main weights cannot hold: they are float32."""
    skipped = {id(p) for p in ignored}

    def visit(module: nn.Module, prefix: str, below: bool) -> None:
        below = below or hasattr(module, STATE)
        for name, p in module._parameters.items():
            if p is None or id(p) in skipped or unit_of(p) is not None or below and not shared_places(p):
                continue
            if p.dtype == torch.float32 or main_dtype is not None and p.dtype.is_floating_point:
                continue
            way = ("with main_dtype=torch.float32 its main weights are kept as float32"
                   if p.dtype.is_floating_point else
                   "in ignored_params it stays as it is, whole on every rank")
            if p.requires_grad and not p.dtype.is_floating_point:
                way += ", and its gradient is not reduced"
            raise ValueError(f"parameter {prefix}{name}: wanted float32, got {p.dtype}; {way}")
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", below)

    for i, m in enumerate(modules):
        visit(m, f"{i}." if len(modules) > 1 else "", below=False)


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


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
