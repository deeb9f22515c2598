"""fully_shard and FSDPModule, with the signatures that torch.distributed.fsdp has."""

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
from ._arguments import check_placements, plan_and_reshard
from ._layout import tensor_parallel
from ._mistakes import mark_emptied, refuse_whole_tensors, watch_optimizers
from ._ranks import keep_track_of
from ._runtime import STATE, Runtime, start
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
        module: a module, or several whose parameters form one unit.
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
            another dtype are kept as float32; a bfloat16 module then computes in bfloat16 unless told otherwise.
        units: what of the unit's parameters is a unit of update operations, by pattern of names within the module:
            {"*.q_proj.weight": Heads(8), "*.c_attn.weight": Nodes("qkv", (0, 64, 128, 192), dim=1)}.
        comm: "auto", "peer" (ranks of one host read one another's memory) or "c10d" (messages over Gloo).

    Returns:
        What was passed, with the class ``FSDP<Module>`` mixed in.

    Raises:
        ValueError: for an argument or a parameter that cannot be, naming it; at the first forward also where units of
            one root differ in what must be the same.
        NotImplementedError: for what torch has and this has not.
        RuntimeError: without a process group; where a parameter is shared with a unit that has run already.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard: wanted at least one module, got an empty list")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise ValueError(f"fully_shard: wanted a module, got {type(m).__name__}")
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {m}")
        if isinstance(m, FSDPModule):
            raise ValueError(f"fully_shard has been applied to this module already: {type(m).__name__}")
    if comm not in ("auto", "peer", "c10d"):
        raise ValueError(f'comm: wanted "auto", "peer" or "c10d", got {comm!r}')
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
    below = [(path, m._unit().plan) for top in modules for path, m in top.named_modules() if isinstance(m, FSDPModule)]
    plan, reshard_after_forward = plan_and_reshard(plan, reshard_after_forward, mesh, below)
    stored = _stored_format(modules) if main_dtype is not None else "fp32"
    memory.use_unless_refused()
    unit = Unit(modules, mesh, plan, mp_policy, _format_of(format, mp_policy) or stored, comm, reshard_after_forward,
                dict(units or {}), main_dtype)
    unit.ignored = list(ignored_params or ())
    found, behind = _take_parameters(unit, ignored_params or set())
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
        m.register_forward_pre_hook(torch._dynamo.disable(functools.partial(_before_forward, unit)), prepend=True,
                                    with_kwargs=True)
        m.register_load_state_dict_pre_hook(refuse_whole_tensors)
        m.register_forward_hook(torch._dynamo.disable(functools.partial(_after_forward, unit)), prepend=False,
                                always_call=True)
        cls = type(m)
        if cls not in _classes:
            _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy,
                                                                            "__reduce_ex__": _no_pickle})
        m.__class__ = _classes[cls]
    return module


def _stored_format(modules: list[nn.Module]) -> str:
    """That of the units below, or of the modules' own parameters."""
    for m in (m for top in modules for m in top.modules()):
        if isinstance(m, FSDPModule):
            return m._unit().format
        for p in m._parameters.values():
            if p is not None and unit_of(p) is None:
                return "bf16" if p.dtype == torch.bfloat16 else "fp32"
    return "fp32"


def _format_of(format: str | None, policy: MixedPrecisionPolicy) -> str | None:
    named = {None: None, torch.float32: "fp32", torch.bfloat16: "bf16"}
    if policy.param_dtype not in named:
        raise ValueError(f"param_dtype: wanted torch.float32, torch.bfloat16 or None, got {policy.param_dtype}")
    if policy.reduce_dtype not in named:
        raise ValueError(f"reduce_dtype: wanted torch.float32, torch.bfloat16 or None, got {policy.reduce_dtype}")
    asked = named[policy.param_dtype]
    if format and asked and format != asked:
        raise ValueError(f"format {format!r} and param_dtype {policy.param_dtype}: wanted the same of both")
    return format or asked


def _take_parameters(unit: Unit, ignored: set[nn.Parameter]):
    """Whole parameters of the unit's modules with all references: those that no unit below has, and those that a unit
    below shares with modules outside of it, where this unit holds all of these.

    Apart, those that only modules behind the units below have, which then are used behind them (a head): where they are
    no less than half of the largest of these units, so that reducing them on their own pays.
    """
    inside = {id(m) for top in unit.modules for m in top.modules()}
    skipped = {id(p) for p in ignored}
    found: dict[int, tuple[nn.Parameter, list, str]] = {}
    behind: set[int] = set()
    largest = 0  # of the units below, in elements

    def consider(param: nn.Parameter, module: nn.Module, name: str, prefix: str) -> None:
        places = shared_places(param)
        if (module, name) not in places and places:
            places.append((module, name))
        if id(param) not in found and largest and not places:
            behind.add(id(param))
        if all(id(m) in inside for m, _ in places):
            entry = found.setdefault(id(param), (param, places or [], prefix + name))
            if (module, name) not in entry[1]:
                entry[1].append((module, name))

    def visit(module: nn.Module, prefix: str, below: bool) -> None:
        nonlocal largest
        below = below or isinstance(module, FSDPModule)
        for name, param in module._parameters.items():
            if param is None or id(param) in skipped:
                continue
            if below:  # a unit's own, but for what was given back
                if shared_places(param):
                    consider(param, module, name, prefix)
                continue
            taken = successor_of(param)
            if taken is not None:  # sharded by a unit elsewhere: from here on the lowest unit above both has it
                if taken[0].runtime is not None:
                    raise RuntimeError(f"parameter {prefix}{name} is shared with a unit that has run already: wanted "
                                       "fully_shard on all modules before the first forward")
                take_back(*taken)
            owner = unit_of(param)
            if owner is not None and all(id(m) in inside for m in owner.modules):
                continue  # of a unit below, reached by another path
            _refuse_what_cannot_be(unit, param, prefix + name)
            consider(param, module, name, prefix)
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.", below)
        if isinstance(module, FSDPModule):
            largest = max(largest, 1, sum(s.param.numel() for part in module._unit().parts_of_it() for s in part.slots))

    for i, m in enumerate(unit.modules):
        visit(m, f"{i}." if len(unit.modules) > 1 else "", below=False)
    if 2 * sum(p.numel() for p, _, _ in found.values() if id(p) in behind) < largest:
        behind.clear()
    return ([entry for key, entry in found.items() if key not in behind],
            [entry for key, entry in found.items() if key in behind])


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
    method = getattr(type(module), method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name}")

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

    setattr(module, method_name, types.MethodType(torch._dynamo.disable(around), module))


class UnshardHandle:
    """A gather that was begun."""

    def wait(self) -> None:
        """Returns when the parameters can be read: they can already."""


class FSDPModule:
    """What fully_shard mixes into a module.

    All methods are called on all ranks alike. One that is for the root raises NotImplementedError elsewhere. The engine
    is made anew by the next forward of the root after a call that says so; gradients stay.
    """

    def __new__(cls, *args, **kwargs):
        # Indexing into a container makes another one of its class: of the original class.
        original = cls.__mro__[2]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def _apply(self, fn, *args, **kwargs):
        runtimes = {id(u.runtime): u.runtime for u in self._below(recurse=True) if u.runtime is not None}.values()
        if runtimes:
            becomes = fn(torch.empty(0))
            if becomes.dtype != torch.float32 or becomes.device.type != "cpu":
                raise NotImplementedError("a sharded module that has run keeps its main weights: wanted float32 on "
                                          f"cpu, got {becomes.dtype} on {becomes.device}")
        for runtime in runtimes:
            runtime.engine.release_all()
        super()._apply(fn, *args, **kwargs)
        for runtime in runtimes:
            runtime.take_over()
        return self

    def to_empty(self, *, device: str | torch.device | int | None, recurse: bool = True) -> nn.Module:
        """As of any module. What is not written to before the first forward is an error there, not used."""
        super().to_empty(device=device, recurse=recurse)
        mark_emptied(self)
        for u in self._below(recurse=True):
            if u.runtime is not None:
                u.runtime.values_seen = False
        return self

    def _unit(self) -> Unit:
        return getattr(self, STATE)

    def _below(self, recurse: bool) -> list[Unit]:
        units: list[Unit] = []
        for m in self.modules() if recurse else [self]:
            u = getattr(m, STATE, None)
            if u is not None and u not in units:
                units.append(u)
        return units

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the unit's parameters, own ones only, until reshard(), or the end of its next pass. Collective.

        Args:
            async_op: whether to return a handle; the parameters can be read when this returns in any case.

        Raises:
            RuntimeError: before the first forward of the root.
        """
        for part in self._unit().parts_of_it():
            self._running("unshard").engine.gather(part.index)
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Gives the unit's whole parameters up: modules have the sharded ones again.

        Raises:
            RuntimeError: before the first forward of the root.
        """
        for part in self._unit().parts_of_it():
            self._running("reshard").engine.release(part.index)

    def _running(self, call: str) -> Runtime:
        runtime = self._unit().runtime
        if runtime is None:
            raise RuntimeError(f"{call}: wanted a module whose root has run a forward pass")
        return runtime

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward passes add to whole gradients on each rank and communicate nothing, until it is True again.

        For the whole model: call it on the root, outside of passes. After the first False the next forward makes the
        engine anew, with 4 bytes for each element of the model on every rank, unless gradients are whole already
        (zero2=1).

        Raises:
            RuntimeError: for the first False after a backward pass that set_requires_all_reduce(False) has left
                incomplete.
        """
        runtime = self._at_root("set_requires_gradient_sync", recurse)
        runtime.set_sync(requires_gradient_sync)

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """That as many units are gathered ahead as `modules` has, at least; which, follows from what ran before.

        After the first forward the engine is made anew where that is more than it has done. Each unit ahead is held
        whole on every rank.

        Raises:
            ValueError: for a module that is not sharded.
        """
        self._gather_ahead("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """As set_modules_to_forward_prefetch: one number serves both passes."""
        self._gather_ahead("set_modules_to_backward_prefetch", modules)

    def _gather_ahead(self, call: str, modules: list["FSDPModule"]) -> None:
        for m in modules:
            if not isinstance(m, FSDPModule):
                raise ValueError(f"{call}: wanted modules that fully_shard has sharded, got {type(m).__name__}")
        unit = self._unit()
        unit.prefetch = max(unit.prefetch, len(modules))
        if unit.runtime is not None and unit.runtime.prefetch < unit.prefetch:
            unit.runtime.rebuild()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes what fully_shard was given, outside of passes. The engine is made anew where it has run."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward: wanted a bool, got {type(reshard_after_forward).__name__}")
        units = self._below(recurse)
        changed = any(u.reshard_after_forward != reshard_after_forward for u in units)
        for u in units:
            u.reshard_after_forward = reshard_after_forward
        if changed and self._unit().runtime is not None:
            self._unit().runtime.rebuild()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: all units stay gathered from here on, through forward and backward passes, until True: micro-batches
        without gathers, and every rank holds the whole model. On the root, outside of passes. Collective."""
        self._at_root("set_reshard_after_backward", recurse).keep_gathered(not reshard_after_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: reductions are finished at the end of every backward pass."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward passes leave sums over the ranks of one copy of the parameters, and gradients as they were,
        until one with True sums them over all copies. On the root, outside of passes."""
        runtime = self._at_root("set_requires_all_reduce", recurse)
        runtime.completes = requires_all_reduce
        runtime.engine.set_gradient_completion(requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of the unit's own parameters are the sum over ranks divided by ``factor`` instead of the number of
        ranks, from the next backward pass on. For a whole model call it on every unit.

        Raises:
            ValueError: unless the factor is positive.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: wanted a positive number, got {factor}")
        for part in self._unit().parts_of_it():
            part.factor = float(factor)
        if self._unit().runtime is not None:
            self._unit().runtime.divide()

    def _at_root(self, call: str, recurse: bool) -> Runtime:
        unit = self._unit()
        if unit.runtime is None:
            start(unit)
        if unit.runtime.root is not unit or not recurse:
            raise NotImplementedError(f"{call}: wanted the root module with recurse=True, got "
                                      f"{unit.name or 'recurse=False'}")
        return unit.runtime
