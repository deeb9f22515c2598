"""Mistakes that would train something wrong, or nothing, without a word: found at the first chance and named."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._unit import Unit, successor_of, unit_of
from .ragged import ShardedTensor, elements_for

_EMPTIED = "_dovetail_emptied"  # on a module: to_empty() has left its tensors without values
_seen: "weakref.WeakSet[torch.optim.Optimizer]" = weakref.WeakSet()  # optimizers, since the last fully_shard


# Optimizers made before fully_shard.

def watch_optimizers() -> None:
    """Every optimizer's parameters are looked at when it steps for the first time from now on."""
    _seen.clear()
    _register()


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_warn_of_replaced_parameters)


def _warn_of_replaced_parameters(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    replaced = [p for group in optimizer.param_groups for p in group["params"] if successor_of(p) is not None]
    if replaced:
        warnings.warn(f"{type(optimizer).__name__}: {len(replaced)} of its parameters, the first of shape "
                      f"{tuple(replaced[0].shape)}, were replaced by fully_shard and are not trained by it: make the "
                      "optimizer after fully_shard", stacklevel=3)


# Layers added after fully_shard.

def warn_of_strangers(root: nn.Module, units: list[Unit]) -> None:
    """Names the parameters below `root` that no unit has and that nobody asked to ignore."""
    known = {id(p) for u in units for p in itertools.chain((s.param for s in u.slots), u.ignored)}
    strangers = [name for name, p in root.named_parameters() if id(p) not in known]
    if strangers:
        warnings.warn(f"parameters that came into the model after fully_shard: {_listed(strangers)}. They are whole on "
                      "every rank and their gradients are not reduced: add layers before fully_shard, or shard them "
                      "with fully_shard before that of the root")


# Memory without values.

def mark_emptied(module: nn.Module) -> None:
    """Fills what to_empty() left with NaN, or the largest integer, so that it is never taken for values."""
    for _, t in _tensors(module):
        here = _elements(t)
        if not here.is_meta and here.dtype != torch.bool:
            here.fill_(_mark(here.dtype))
    setattr(module, _EMPTIED, True)


def refuse_unset(root: nn.Module, meshes: list[DeviceMesh]) -> None:
    """Raises where a buffer is on the meta device, or to_empty() left a tensor that nothing has been written to.

    Collective over 1-D meshes where to_empty() was used: a shard may be unset on one rank, and all ranks raise.
    """
    for name, b in root.named_buffers():
        if b.is_meta:
            raise RuntimeError(f"buffer {name} is on the meta device: materialise the model with to_empty() and "
                               "compute the buffer before the first forward")
    emptied = [m for m in root.modules() if m.__dict__.get(_EMPTIED)]
    if not emptied:
        return
    below = {id(t) for m in emptied for _, t in _tensors(m)}
    names = [name for name, t in _tensors(root) if id(t) in below and _is_unset(_elements(t))]
    for mesh in meshes:
        found: list[list[str]] = [[] for _ in range(mesh.size())]
        dist.all_gather_object(found, names, group=mesh.get_group())
        names = list(dict.fromkeys(name for of_rank in found for name in of_rank))
    if names:
        raise RuntimeError(f"to_empty() left these without values, and nothing was written to them since: "
                           f"{_listed(names)}. Initialise or load parameters and buffers before the first forward; a "
                           "buffer that no checkpoint holds has to be computed")
    for m in emptied:
        delattr(m, _EMPTIED)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def _elements(t: torch.Tensor) -> torch.Tensor:
    """Those that this rank has."""
    return t._local_tensor if isinstance(t, DTensor) else t.detach()


def _mark(dtype: torch.dtype) -> float | int:
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_unset(t: torch.Tensor) -> bool:
    if t.numel() == 0 or t.is_meta or t.dtype == torch.bool:
        return False
    mark = _mark(t.dtype)
    return bool((t.isnan() if mark != mark else t == mark).all())


# Whole state dicts.

def refuse_whole_tensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """A hook before load_state_dict: a plain tensor for a sharded parameter, with what takes it."""
    for name, p in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if not isinstance(p, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            continue
        if value.numel() == 1 and isinstance(p, ShardedTensor):
            continue  # one number is the same for every rank, and torch's own helpers hand it over so
        raise TypeError(f"load_state_dict: {prefix + name} is sharded, and the state dict has a whole tensor of shape "
                        f"{tuple(value.shape)}: wanted torch.distributed.checkpoint.state_dict.set_model_state_dict("
                        "model, state_dict, options=StateDictOptions(full_state_dict=True)), with "
                        "broadcast_from_rank0=True where only rank 0 has it")


def keep_on_assign(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any],
                   *args: Any) -> None:
    """A hook before load_state_dict(assign=True): values are copied, and what is assigned are the parameters
    themselves, whose memory is the engine's. The dict is load_state_dict's own. What does not fit is left for torch.
    """
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, p in module.named_parameters(remove_duplicate=False):
        value, unit = state_dict.get(prefix + name), unit_of(p)
        if unit is None or value is p or not isinstance(value, torch.Tensor):
            continue
        if value.is_meta:
            raise TypeError(f"load_state_dict: {prefix + name}: wanted values, got a tensor on the meta device; "
                            "dovetail.ragged.from_full makes one with values for a parameter on it")
        if value.shape != p.shape and value.numel() == p.numel() == 1:
            value = value.reshape(p.shape)
        if value.shape == p.shape:
            unit.write(p, elements_for(value.detach(), p))
            state_dict[prefix + name] = p


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
