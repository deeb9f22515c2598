"""fully_shard, with the signature that torch.distributed.fsdp has."""

from __future__ import annotations

import fnmatch
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import memory
from ._arguments import (check_dtypes, check_kinds, check_placements, format_of, ignored_parameters,
                          plan_and_reshard)
from ._compiler import keep_off
from ._fsdp_module import FSDPModule
from ._gathered import refuse_transforms, release_before_load
from ._layout import tensor_parallel
from ._mistakes import keep_on_assign, refuse_whole_tensors, watch_optimizers
from ._ranks import keep_track_of
from ._runtime import STATE, start
from ._unit import Unit, shard_parameters, shared_places, successor_of, take_back, unit_of
from .plan import Heads, Nodes, Plan
from .policies import MixedPrecisionPolicy, OffloadPolicy

_classes: dict[type, type] = {}


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    plan: Plan = Plan(),
    format: str | None = None,
    main_dtype: torch.dtype | None = None,
    units: Mapping[str, Heads | Nodes | list[Heads | Nodes]] | None = None,
    comm: str = "auto",
) -> Any:
    """Makes a unit of ``module``: its parameters that no unit below has are sharded, gathered and reduced together.

    Called bottom-up, as torch's fully_shard. The outermost module whose forward runs is the root of all units below it.
    A parameter becomes a DTensor of the whole shape over this rank's elements; while gathered, a plain one.

    Args:
        module: a module, or several whose parameters form one unit. What is inside of another one of them is of
            the unit as well.
        mesh: of the ranks that train together; None: all ranks of the default process group. 2-D: parameters are
            sharded over the second dimension and replicated over the first (HSDP). Parameters may be DTensors of tensor
            parallelism, on another dimension of the same mesh: what each rank has of them is sharded over `mesh`.
        reshard_after_forward: whether whole parameters are given up between forward and backward; None: True, but for
            the root. The unit that ends the forward keeps them in any case, since backward begins with it. A number of
            ranks is ``Plan(zero3=...)``, for all units of a root.
        shard_placement_fn: asked for every parameter, may answer None or Shard(0): shards are runs of elements that the
            planner chooses, see ``plan``.
        mp_policy: dtypes of passes.
        offload_policy: main weights are on the CPU of a CPU mesh in any case.
        ignored_params: whole parameters that stay as they are; their gradients are not reduced.
        plan: degrees and blocks of sharding, the same for all units of a root.
        format: of the unit's runtime parameters: "fp32" or "bf16"; None: as mp_policy.param_dtype says.
        main_dtype: of main weights: torch.float32 or None, that of the parameters. With torch.float32 parameters of
            another floating-point dtype are kept as float32; a bfloat16 module then computes in bfloat16 unless told
            otherwise.
        units: what of the unit's parameters is a unit of update operations, by pattern of names within the module:
            {"*.q_proj.weight": Heads(8), "*.c_attn.weight": Nodes("qkv", (0, 64, 128, 192), dim=1)}.
        comm: "auto", "peer" (ranks of one host read one another's memory) or "c10d" (messages over Gloo).

    Returns:
        What was passed, with the class ``FSDP<Module>`` mixed in.

    Raises:
        ValueError: for an argument or a parameter that cannot be, naming it, before anything is changed; at the first
            forward also where units of one root differ in what must be the same.
        NotImplementedError: for what torch has and this has not.
        RuntimeError: without a process group; where a parameter is shared with a unit that has run already.
    """
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    modules = [m for m in given if not _is_inside(m, given)]
    if not modules:
        raise ValueError("fully_shard: wanted at least one module, got an empty list")
    for i, m in enumerate(modules):
        if any(m is other for other in modules[:i]):
            raise ValueError(f"fully_shard: wanted different modules, got {type(m).__name__} twice")
        if not isinstance(m, nn.Module):
            raise ValueError(f"fully_shard: wanted a module, got {type(m).__name__}")
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(f"fully_shard: wanted a module before torch.jit.script, got {m.original_name} after it")
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {m}")
        if isinstance(m, FSDPModule):
            raise ValueError(f"fully_shard has been applied to this module already: {type(m).__name__}")
    if comm not in ("auto", "peer", "c10d"):
        raise ValueError(f'comm: wanted "auto", "peer" or "c10d", got {comm!r}')
    check_kinds(mesh, mp_policy, offload_policy, plan, units)
    ignored = ignored_parameters(ignored_params)
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError("fully_shard: wanted a process group; call torch.distributed.init_process_group() first")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    keep_track_of(mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh: wanted 1 dimension, or 2 of replicas and shards, got {mesh}")
    if mesh.device_type != "cpu":
        raise NotImplementedError(f"mesh: wanted device type cpu, got {mesh.device_type}")
    if main_dtype not in (None, torch.float32):
        raise NotImplementedError(f"main_dtype: wanted torch.float32 or None, got {main_dtype}")
    asked = format_of(format, mp_policy)
    check_dtypes(modules, ignored, main_dtype)
    below = [(path, m._unit().plan) for top in modules for path, m in top.named_modules() if isinstance(m, FSDPModule)]
    plan, reshard_after_forward = plan_and_reshard(plan, reshard_after_forward, mesh, below)
    stored = _stored_format(modules) if main_dtype is not None else "fp32"
    memory.use_unless_refused()
    unit = Unit(modules, mesh, plan, mp_policy, asked or stored, comm, reshard_after_forward,
                dict(units or {}), main_dtype)
    unit.ignored = ignored
    found, behind = _take_parameters(unit, ignored)
    if shard_placement_fn is not None:
        check_placements(shard_placement_fn, [(name, param) for param, _, name in found + behind], mesh)
    names = [name for _, _, name in found + behind]
    for pattern in unit.parts:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"units: {pattern!r}: wanted a pattern of some of {names}")
    shard_parameters(unit, found)
    if behind:
        shard_parameters(unit.split(), behind)
    watch_optimizers()
    for m in modules:
        setattr(m, STATE, unit)
        m.register_forward_pre_hook(keep_off(functools.partial(_before_forward, unit)), prepend=True, with_kwargs=True)
        m.register_load_state_dict_pre_hook(release_before_load)
        m.register_load_state_dict_pre_hook(refuse_whole_tensors)
        m.register_load_state_dict_pre_hook(keep_on_assign)
        m.register_forward_hook(keep_off(functools.partial(_after_forward, unit)), prepend=False, always_call=True)
        cls = type(m)
        if cls not in _classes:
            _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy,
                                                                            "__reduce_ex__": _no_pickle})
        m.__class__ = _classes[cls]
    return module


def _is_inside(module: nn.Module, others: list[nn.Module]) -> bool:
    return any(other is not module and isinstance(other, nn.Module) and any(module is m for m in other.modules())
               for other in others)


def _stored_format(modules: list[nn.Module]) -> str:
    """That of the units below, or of the modules' own parameters."""
    for m in (m for top in modules for m in top.modules()):
        if isinstance(m, FSDPModule):
            return m._unit().format
        for p in m._parameters.values():
            if p is not None and unit_of(p) is None:
                return "bf16" if p.dtype == torch.bfloat16 else "fp32"
    return "fp32"


def _take_parameters(unit: Unit, ignored: list[nn.Parameter]):
    """Whole parameters of the unit's modules with all references: those that no unit below has, and those that a unit
    below shares with modules outside of it, where this unit holds all of these.

    Apart, those that only modules behind the units below have, which then are used behind them (a head): where they are
    no less than half of the largest of these units, so that reducing them on their own pays.
    """
    search = _Search(unit, ignored)
    for i, m in enumerate(unit.modules):
        search.visit(m, f"{i}." if len(unit.modules) > 1 else "", below=False)
    found, behind = search.found, search.behind
    if 2 * sum(p.numel() for p, _, _ in found.values() if id(p) in behind) < search.largest:
        behind.clear()
    return ([entry for key, entry in found.items() if key not in behind],
            [entry for key, entry in found.items() if key in behind])


class _Search:
    """For a unit's parameters. No function inside of another that calls itself: it would be a cycle, and keep the whole
    parameters until the next collection."""

    def __init__(self, unit: Unit, ignored: list[nn.Parameter]) -> None:
        self.unit = unit
        self.inside = {id(m) for top in unit.modules for m in top.modules()}
        self.skipped = {id(p) for p in ignored}
        self.found: dict[int, tuple[nn.Parameter, list, str]] = {}
        self.behind: set[int] = set()
        self.largest = 0  # of the units below, in elements

    def visit(self, module: nn.Module, prefix: str, below: bool) -> None:
        below = below or isinstance(module, FSDPModule)
        for name, param in module._parameters.items():
            if param is None or id(param) in self.skipped:
                continue
            if below:  # a unit's own, but for what was given back
                if shared_places(param):
                    self._consider(param, module, name, prefix)
                continue
            taken = successor_of(param)
            if taken is not None:  # sharded by a unit elsewhere: from here on the lowest unit above both has it
                if taken[0].runtime is not None:
                    raise RuntimeError(f"parameter {prefix}{name} is shared with a unit that has run already: wanted "
                                       "fully_shard on all modules before the first forward")
                take_back(*taken)
            owner = unit_of(param)
            if owner is not None and all(id(m) in self.inside for m in owner.modules):
                continue  # of a unit below, reached by another path
            _refuse_what_cannot_be(self.unit, param, prefix + name)
            self._consider(param, module, name, prefix)
        for name, child in module.named_children():
            self.visit(child, f"{prefix}{name}.", below)
        if isinstance(module, FSDPModule):
            slots = [s for part in module._unit().parts_of_it() for s in part.slots]
            self.largest = max(self.largest, 1, sum(s.param.numel() for s in slots))

    def _consider(self, param: nn.Parameter, module: nn.Module, name: str, prefix: str) -> None:
        places = shared_places(param)
        if (module, name) not in places and places:
            places.append((module, name))
        if id(param) not in self.found and self.largest and not places:
            self.behind.add(id(param))
        if all(id(m) in self.inside for m, _ in places):
            entry = self.found.setdefault(id(param), (param, places or [], prefix + name))
            if (module, name) not in entry[1]:
                entry[1].append((module, name))


def _refuse_what_cannot_be(unit: Unit, param: nn.Parameter, name: str) -> None:
    if unit_of(param) is not None:
        raise ValueError(f"parameter {name} is sharded by a unit above this module: wanted fully_shard bottom-up, the "
                         "outermost module last")
    parallel = tensor_parallel(param, unit.shards, name)
    for pattern in unit.parts if parallel is not None and parallel.splits else ():
        if fnmatch.fnmatchcase(name, pattern):
            raise ValueError(f"units: {pattern!r}: wanted parameters that no tensor-parallel rank has a part of, got "
                             f"{name} in {parallel.placement!r} over {parallel.mesh.size()} ranks")


def _no_deepcopy(self, memo):
    raise RuntimeError("a sharded module cannot be copied: its units share memory with the engine and other ranks; "
                       "copy the model before fully_shard, or load a state dict into a second one")


def _no_pickle(self, protocol):
    raise RuntimeError("a sharded module cannot be pickled: its parameters are spread over ranks; save its state dict")


def _before_forward(unit: Unit, module: nn.Module, args, kwargs):
    refuse_transforms(module)
    if unit.runtime is None:
        start(unit)
    return unit.runtime.before_forward(unit, args, kwargs)


def _after_forward(unit: Unit, module: nn.Module, args, output):
    return unit.runtime.after_forward(unit, output) if unit.runtime is not None else None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module gather and release its parameters as forward does.

    Args:
        module: where fully_shard has not been applied to it, nothing is done.
        method_name: of a method that computes with the module's parameters: "generate_step".

    Raises:
        ValueError: where the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(type(module), method_name, None) if isinstance(method_name, str) else None
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method "
                         f"{method_name}")

    @functools.wraps(method)
    def around(self, *args, **kwargs):
        unit = self._unit()
        args, kwargs = _before_forward(unit, self, args, kwargs)
        try:
            output = method(self, *args, **kwargs)
        except BaseException:
            unit.runtime.forward_failed(unit)
            raise
        return unit.runtime.after_forward(unit, output)

    setattr(module, method_name, types.MethodType(keep_off(around), module))
