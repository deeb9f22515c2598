"""Checkpoints in the format of the C++ trainer: each rank writes its shards, complete or not at all, checksummed.

    save_checkpoint(model, optimizer, "runs/a/checkpoints", extra={"epoch": 3})
    loaded = load_checkpoint(model, optimizer, "runs/a/checkpoints")   # at any number of ranks and any degrees

docs/checkpoint-format.md describes the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor

from . import _C
from ._ranks import index_in
from ._runtime import STATE, Runtime, start
from .optim._base import EngineOptimizer
from .ragged import intervals_of, local_elements

__all__ = ["LoadedCheckpoint", "load_checkpoint", "save_checkpoint"]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Where weights came from.

    Attributes:
        path: of the checkpoint.
        step: optimizer steps that had been done.
        extra: what save_checkpoint was given; {} where it was written by the C++ trainer.
        passed_over: newer checkpoints that are not sound, with the reason.
    """

    path: str
    step: int
    extra: dict[str, Any]
    passed_over: list[str]


def save_checkpoint(model: nn.Module, optim: torch.optim.Optimizer | None, path: str | os.PathLike[str], *,
                    step: int | None = None, extra: dict[str, Any] | None = None, keep: int = 2) -> str:
    """Writes parameters, persistent buffers and optimizer state to a new checkpoint in the folder `path`. Collective.

    Args:
        model: the root module, sharded by fully_shard.
        optim: of dovetail.optim, or a torch optimizer whose state has the shapes of its parameters; None: weights only.
        path: a folder of checkpoints that all ranks see; made if needed.
        step: names the checkpoint, at least 0. It should grow: the largest counts as the newest. None: steps that the
            optimizer has counted.
        extra: anything that JSON can hold, the same on all ranks.
        keep: complete checkpoints to keep in the folder; 0: all.

    Returns:
        The checkpoint's own folder.

    Raises:
        ValueError: for a model, an optimizer state or an argument that cannot be stored, naming it.
        FileError: on every rank, where one could not write, or a value is not finite; the folder is as before.
    """
    path = _path_of("save_checkpoint", path)
    for name, value in (("step", step), ("keep", keep)):
        if value is None and name == "step":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"save_checkpoint: {name}: wanted a whole number of at least 0, got {value!r}")
    if not isinstance(extra, (dict, type(None))):
        raise ValueError(f"save_checkpoint: extra: wanted a dict, got {type(extra).__name__}")
    runtime = _runtime(model)
    _check_optimizer("save_checkpoint", optim, runtime)
    entries, scalars = _entries(model, optim, runtime)
    if step is None:
        counted = {int(s["step"]) for s in scalars.values() if "step" in s}
        if isinstance(optim, EngineOptimizer):
            counted = {runtime.engine.steps_done()}
        if len(counted) != 1:
            raise ValueError(f"save_checkpoint: step: wanted a number, since the optimizer counts {sorted(counted)}")
        (step,) = counted
    training = _C.TrainingState()
    training.step = step
    if isinstance(optim, EngineOptimizer):
        training.optimizer = runtime.engine.describe_optimizer()
    elif optim is not None:
        training.optimizer = type(optim).__name__
    groups = [_options(g) for g in optim.param_groups] if optim else []
    try:
        training.trainer = json.dumps({"python": {"groups": groups, "scalars": scalars, "extra": extra or {}}})
    except TypeError as error:
        raise ValueError(f"save_checkpoint: extra: wanted what JSON can hold: {error}") from None
    return _C.save_checkpoint(runtime.world, path, keep, entries, _aliases(runtime), training)


def load_checkpoint(model: nn.Module, optim: torch.optim.Optimizer | None,
                    path: str | os.PathLike[str]) -> LoadedCheckpoint:
    """Fills parameters, persistent buffers and optimizer state, bit for bit. Collective.

    Until every rank has read and verified all it needs, nothing is changed. The number of ranks and the degrees may be
    others than those that wrote.

    Args:
        model: the root module, sharded by fully_shard, of the same names and shapes.
        optim: with the same state; None: weights and buffers only. Options of its groups, such as the learning rate,
            are those that were saved, where there are as many groups.
        path: one checkpoint, or a folder of checkpoints, of which the newest that is sound is taken.

    Raises:
        FileError: on every rank, where there is no sound checkpoint, naming files and faults.
        ConfigError: for another model or optimizer, naming the first difference.
        ValueError: for a model that fully_shard has not made a root, an optimizer of another, or what is no path.
    """
    path = _path_of("load_checkpoint", path)
    runtime = _runtime(model)
    _check_optimizer("load_checkpoint", optim, runtime)
    newest = not os.path.exists(os.path.join(path, "manifest.json"))
    entries, scalars = _entries(model, optim, runtime)
    loaded = _C.load_checkpoint(runtime.world, path, newest, entries, _aliases(runtime), optim is None)
    if loaded is None:
        raise _C.FileError(f"{path}: wanted a checkpoint, found none")
    runtime.engine.state_was_loaded()
    read = {e.tensor: e.values for e in entries if e.field == "buffer"}
    for name, buffer in _buffers(model):
        if read[name].data_ptr() != buffer.data_ptr():  # of another layout or dtype than is stored
            buffer.copy_(read[name].view(buffer.shape))
    stored = json.loads(loaded.training.trainer).get("python", {})
    if optim is not None:
        _restore(optim, runtime, stored, loaded.training.step, scalars)
    return LoadedCheckpoint(loaded.path, loaded.training.step, stored.get("extra", {}), list(loaded.passed_over))


def _path_of(call: str, path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ValueError(f"{call}: path: wanted a path, got {path!r}")
    return os.fspath(path)


def _check_optimizer(call: str, optim: Any, runtime: Runtime) -> None:
    """Raises ValueError unless an optimizer has parameters of the model: the state of another would be passed over."""
    if optim is not None and not isinstance(optim, torch.optim.Optimizer):
        raise ValueError(f"{call}: optim: wanted an optimizer or None, got {type(optim).__name__}")
    held = {id(slot.param) for slot in runtime.slots}
    if optim is not None and not any(id(p) in held for g in optim.param_groups for p in g["params"]):
        raise ValueError(f"{call}: optim: wanted an optimizer of the model's sharded parameters, got "
                         f"{type(optim).__name__} of others")


def _runtime(model: nn.Module) -> Runtime:
    unit = getattr(model, STATE, None)
    if unit is None:
        raise ValueError(f"checkpoint: wanted a module that fully_shard has sharded, got {type(model).__name__}")
    if unit.runtime is None:
        start(unit)
    if unit.runtime.root is not unit:
        raise ValueError(f"checkpoint: wanted the root module, got the unit {unit.name} below it")
    if unit.runtime.parallel_ranks is not None:
        raise NotImplementedError("checkpoint: the format holds no parts of tensor-parallel parameters: wanted "
                                  "torch.distributed.checkpoint")
    return unit.runtime


def _entries(model: nn.Module, optim: torch.optim.Optimizer | None,
             runtime: Runtime) -> tuple[list[_C.StateEntry], dict[str, dict[str, float]]]:
    """State of this rank, the same list on every rank but for the elements held; numbers of torch optimizers by
    parameter."""
    if isinstance(optim, EngineOptimizer):
        optim._bind()
    state = runtime.engine.state()
    if not isinstance(optim, EngineOptimizer):
        state = [e for e in state if e.field == "weight"]
    first = index_in(runtime.root.mesh) == 0
    for name, buffer in _buffers(model):
        values = buffer.detach().to(_stored_dtype(buffer.dtype)).contiguous().view(-1)
        state.append(_C.StateEntry(name, "buffer", list(buffer.shape), 0, values, first))
    scalars: dict[str, dict[str, float]] = {}
    if optim is not None and not isinstance(optim, EngineOptimizer):
        _init_optim_state(optim)  # of one that has made no step yet
        writes = index_in(runtime.root.mesh) < runtime.root.shards.size()
        for slot, spec in zip(runtime.slots, runtime.specs):
            for field, value in optim.state.get(slot.param, {}).items():
                if isinstance(value, DTensor) and value.shape == slot.param.shape:
                    begin, _ = intervals_of(value)[runtime.root.shards.get_local_rank()]
                    mine = local_elements(value)
                    state.append(_C.StateEntry(spec.name, field, list(value.shape), begin, mine, writes))
                elif isinstance(value, (int, float)) or isinstance(value, torch.Tensor) and value.numel() == 1:
                    scalars.setdefault(spec.name, {})[field] = float(value)
                elif value is not None:
                    raise ValueError(f"checkpoint: {type(optim).__name__}: {field} of {spec.name}: wanted a tensor of "
                                     f"the parameter's shape or a number, got {type(value).__name__}")
    return state, scalars


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of persistent buffers."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            yield ".".join(filter(None, (prefix, name))), buffer


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format's own, or one that holds its values."""
    if dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        return dtype
    if dtype in (torch.float64, torch.complex64, torch.complex128):
        raise ValueError(f"checkpoint: wanted buffers whose values float32 or int64 holds, got one of {dtype}")
    return torch.float32 if dtype.is_floating_point else torch.int64


def _aliases(runtime: Runtime) -> list[tuple[str, str]]:
    """Other names of tied parameters."""
    paths = {id(m): path for path, m in runtime.root.modules[0].named_modules(remove_duplicate=True)}
    aliases = []
    for slot, spec in zip(runtime.slots, runtime.specs):
        for module, name in slot.places:
            other = ".".join(filter(None, (paths.get(id(module), ""), name)))
            if other != spec.name:
                aliases.append((other, spec.name))
    return aliases


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options, as far as JSON holds them."""
    plain = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in group.items()}
    return {k: v for k, v in plain.items() if isinstance(v, (bool, int, float, str, tuple, type(None)))}


def _restore(optim: torch.optim.Optimizer, runtime: Runtime, stored: dict[str, Any], step: int,
             scalars: dict[str, dict[str, float]]) -> None:
    groups = stored.get("groups", [])
    if groups and len(groups) == len(optim.param_groups):
        for mine, theirs in zip(optim.param_groups, groups):
            for key, value in theirs.items():
                if key not in mine or isinstance(mine[key], torch.Tensor):
                    continue
                mine[key] = type(mine[key])(value) if isinstance(mine[key], tuple) else value
    if isinstance(optim, EngineOptimizer):
        runtime.engine.set_steps_done(step)
        optim._show_step()
        return
    theirs = stored.get("scalars", {})
    with torch.no_grad():
        for slot, spec in zip(runtime.slots, runtime.specs):
            for field in scalars.get(spec.name, {}):
                # The C++ trainer counts steps once for all.
                value = theirs.get(spec.name, {}).get(field, float(step) if field == "step" else None)
                if value is None:
                    continue
                state = optim.state[slot.param]
                if isinstance(state[field], torch.Tensor):
                    state[field].fill_(value)
                else:
                    state[field] = type(state[field])(value)
