"""A unit: parameters that are gathered together, and where modules refer to them."""

from __future__ import annotations

import copy
import fnmatch
import functools
import weakref
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd as _Convolution

from . import _C
from ._gathered import UNIT, have_state_sharded, mark_shown, unit_of
from ._layout import Layout, TensorParallel, part_of, tensor_parallel
from ._ranks import ranks_of, shard_mesh
from .plan import Heads, Nodes, Plan
from .policies import MixedPrecisionPolicy
from .ragged import local_elements
from .sharded import deepcopy, gather_part

# On an original parameter: the sharded one that took its place. Other modules may still refer to the original.
_SUCCESSOR = "_dovetail_successor"
# On a whole parameter that was given back since modules outside of its unit refer to it too: the references so far.
_SHARED = "_dovetail_shared"
_MARKS = (_SUCCESSOR, UNIT, _SHARED, "__deepcopy__")


@dataclass(eq=False)  # compared by identity
class Slot:
    """One parameter of a unit.

    Attributes:
        param: the sharded parameter that users see: this rank's part of the main weight.
        places: (module, name) of every reference to it.
        name: within the unit's first module.
        runtime: the engine's whole parameter in the compute dtype, readable while the unit is gathered; None before the
            first pass. What modules have then is this, or of a tensor-parallel parameter a DTensor over it, `shown`.
        memory: of the gradient of this rank's part, the engine's; None before the first pass.
        gradient: the sharded gradient over it, which `.grad` is.
        versions: of the runtime parameter and of a DTensor over it, when they were last looked at.
    """

    param: nn.Parameter
    places: list[tuple[nn.Module, str]]
    name: str
    kind: str
    parts: list["Heads | Nodes"]
    layout: Layout
    original: weakref.ref  # of the whole parameter, which lives on where a module outside of the unit refers to it
    runtime: nn.Parameter | None = None
    memory: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    versions: tuple[int, int] = (0, 0)

    @property
    def parallel(self) -> TensorParallel | None:
        return self.layout.parallel

    def whole(self) -> torch.Tensor:
        """What fully_shard was given: the whole values, or their tensor-parallel DTensor. Collective."""
        if self.parallel is None:
            return self.param.full_tensor()
        return self.parallel.whole(gather_part(self.param)).detach()

    def show(self, runtime: bool) -> None:
        """Which parameter modules have from now on.

        A DTensor over the runtime parameter is another one each time. It has a node in autograd's graph, and a backward
        pass comes to nodes in the reverse of the order they were made in: one made before the unit's passes would
        hand its gradient on only after the unit was reduced.
        """
        self.shown = (self.parallel.whole(self.runtime) if self.parallel else self.runtime) if runtime else None
        if self.shown is not None:
            mark_shown(self.shown, self)
        self.versions = (self.versions[0], self._versions()[1])
        self.register(self.param if self.shown is None else self.shown)

    def look(self) -> bool:
        """Whether somebody has written to the whole parameter since the last look. The engine writes to its memory,
        which counts no version."""
        before, self.versions = self.versions, self._versions()
        return before != self.versions

    def _versions(self) -> tuple[int, int]:
        over = None if self.parallel is None or self.shown is None or self.shown.is_inference() else self.shown
        return tuple(0 if t is None else t._version for t in (self.runtime, over))

    def register(self, param: torch.Tensor) -> None:
        for module, name in self.places:
            module._parameters[name] = param


@dataclass(eq=False)
class Unit:
    modules: list[nn.Module]
    mesh: DeviceMesh
    plan: Plan
    policy: MixedPrecisionPolicy
    format: str
    comm: str
    reshard_after_forward: bool | None
    parts: "dict[str, Heads | Nodes | list]" = field(default_factory=dict)  # by pattern of names within the unit
    main_dtype: torch.dtype | None = None
    prefetch: int = 0                # units to be gathered ahead, as far as users have said
    factor: float | None = None      # that its sums over ranks are divided by; None: the number of ranks
    shards: DeviceMesh = field(init=False)  # ranks of one copy of the main weights
    slots: list[Slot] = field(default_factory=list)
    ignored: list[nn.Parameter] = field(default_factory=list)  # that the user asked to leave alone
    runtime: "object | None" = None  # of the root that this unit belongs to, from its first forward on
    index: int = -1                  # of the unit in it
    name: str = ""
    gathered: bool = False           # runtime parameters can be read
    behind: "Unit | None" = None     # parameters that the modules use behind the units below them (a head)
    front: "Unit | None" = None      # of such a one: the unit that it is a part of

    def __post_init__(self):
        _units.add(self)
        self.shards = shard_mesh(self.mesh, self.options().zero1)  # refuses plans that cannot be

    def split(self) -> "Unit":
        """Makes the part for parameters used behind the units below, which the engine reduces on its own."""
        self.behind = copy.copy(self)
        self.behind.slots, self.behind.ignored, self.behind.front = [], [], self
        return self.behind

    def parts_of_it(self) -> "list[Unit]":
        """Itself and what is behind."""
        return [self] if self.behind is None else [self, self.behind]

    def mark_parameters(self) -> None:
        """What tells that sharded parameters are this unit's. To be called again after Module._apply, which exchanges
        their attributes for those of new tensors."""
        for part in self.parts_of_it():
            for slot in part.slots:
                setattr(slot.param, UNIT, part)
                # On the parameter, since a stock DTensor's own would copy the storage, which is that of the whole unit.
                slot.param.__deepcopy__ = functools.partial(deepcopy, slot.param)

    def write(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """This rank's elements, 1-D, into a parameter of the unit; one on the meta device is materialised."""
        slot = next(s for s in self.slots if s.param is param)
        if param.is_meta:
            local, said = values.to(param.dtype, copy=True), dict(vars(param))
            torch.utils.swap_tensors(param, slot.layout.parameter(local, param.requires_grad))
            vars(param).update(said)
        else:
            with torch.no_grad():
                local_elements(param).copy_(values)

    def options(self) -> "_C.PlanOptions":
        """Of the planner, for the ranks of the mesh. The second dimension of a 2-D mesh is that over which is sharded.
        """
        return self.plan.options(len(ranks_of(self.mesh)), self.format, self.mesh.size(self.mesh.ndim - 1))

    def keep_after_forward(self, root: "Unit") -> bool | None:
        """Whether it stays gathered until its backward. None: as the plan has it by its place, which keeps the root and
        the unit that backward comes to next."""
        if self.front is not None:
            kept = self.front.keep_after_forward(root)
            return self.front is root if kept is None else kept
        if self.reshard_after_forward is False:
            return True
        return False if self.reshard_after_forward and self is root else None

    def residence_changed(self, gathered: bool) -> None:
        if gathered:
            for slot in self.slots:
                slot.look()
        else:
            self.note_writes()
        self.gathered = gathered
        self.show(runtime=gathered)

    def note_writes(self) -> None:
        """Looks whether somebody has written to whole parameters, for `Runtime.refuse_writes`."""
        if not self.gathered:
            return
        for slot in self.slots:
            if slot.look():
                self.runtime.written.append(".".join(filter(None, (self.name, slot.name))))

    def refuse_writes(self) -> None:
        self.note_writes()
        self.runtime.refuse_writes()

    @property
    def shows_runtime(self) -> bool:
        return any(slot.shown is not None for slot in self.slots)

    def show(self, runtime: bool) -> None:
        """Which parameters the modules have from now on."""
        for slot in self.slots:
            slot.show(runtime)

    def begin_pass(self) -> None:
        """To be called in a forward pass, after the engine has begun it. Units that were gathered before may show the
        sharded parameters."""
        for slot in self.slots:
            if slot.parallel is not None or slot.shown is None:
                slot.show(runtime=True)


# All units that live. The outermost around some of them is found among these.
_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()


def outermost(units: "list[Unit]") -> "Unit | None":
    """The unit whose modules hold those of all `units` and of every other that does; None where there is none."""
    inner = [m for u in units for m in u.modules]
    best, most = None, 0
    for unit in _units:
        held = {id(m) for top in unit.modules for m in top.modules()}
        if len(held) > most and all(id(m) in held for m in inner):
            best, most = unit, len(held)
    return best


def kind_of(param: nn.Parameter, module: nn.Module) -> str:
    """The planner's kind of a weight that its shape does not tell."""
    if param.dim() == 2 and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if param.dim() == 3 and param.shape[0] > 1 and not isinstance(module, _Convolution):
        return "expert"  # one matrix per expert, as mixtures of experts hold them
    return ""


def successor_of(param: nn.Parameter) -> "tuple[Unit, Slot] | None":
    """The unit and the shard that took a whole parameter's place."""
    return getattr(param, _SUCCESSOR, None)


def shard_parameters(unit: Unit, found: list[tuple[nn.Parameter, list[tuple[nn.Module, str]], str]]) -> None:
    """Replaces parameters by their shards.

    Args:
        found: whole parameter, all references to it inside the unit, name inside the unit.
    """
    rank = unit.shards.get_local_rank()
    values = [part_of(param) for param, _, _ in found]
    kinds = [kind_of(value, places[0][0]) for value, (_, places, _) in zip(values, found)]
    parts = parts_of(unit.parts, [name for _, _, name in found])
    layouts = layouts_of(unit, [tensor_parallel(param, unit.shards, name) for param, _, name in found],
                         [spec_of(name, v.shape, k, q) for (_, _, name), v, k, q in zip(found, values, kinds, parts)])
    for (param, places, name), value, kind, part, layout in zip(found, values, kinds, parts, layouts):
        begin, end = layout.intervals[rank]
        local = value.contiguous().view(-1)[begin:end].clone()
        if unit.main_dtype is not None:
            local = local.to(unit.main_dtype)
        sharded = layout.parameter(local, param.requires_grad)
        for key, value in vars(param).items():  # marks that users have put on parameters
            if key not in _MARKS:
                setattr(sharded, key, value)
        slot = Slot(sharded, list(places), name, kind, part, layout, weakref.ref(param))
        slot.register(sharded)
        setattr(param, _SUCCESSOR, (unit, slot))
        unit.slots.append(slot)
        for module, _ in places:
            have_state_sharded(module)
    unit.mark_parameters()


def parts_of(patterns: "dict[str, Heads | Nodes | list]", names: list[str]) -> "list[list[Heads | Nodes]]":
    """What `units=` says of each parameter."""
    return [[part for pattern, said in patterns.items() if fnmatch.fnmatchcase(name, pattern)
             for part in (said if isinstance(said, (list, tuple)) else [said])] for name in names]


def spec_of(name: str, shape, kind: str, parts: "list[Heads | Nodes]") -> "_C.TensorSpec":
    """What the planner knows of a parameter."""
    spec = _C.TensorSpec(name, list(shape), kind)
    for part in parts:
        part.apply(spec)
    return spec


def plan_intervals(unit: Unit, specs: "list[_C.TensorSpec]"):
    """(begin, end) of each tensor's shard on each rank of `unit.shards`, in elements."""
    runs = _C.shard_intervals(unit.options(), _C.GroupSpec("unit", specs))
    return [tuple(tuple(r) for r in per_rank) for per_rank in runs]


def layouts_of(unit: Unit, parallels: "list[TensorParallel | None]", specs: "list[_C.TensorSpec]") -> list[Layout]:
    """Of the unit's parameters, in order."""
    # Parts of several sizes leave the others' runs elsewhere on each tensor-parallel rank: one writes them.
    uneven = next((p for p in parallels if p is not None and not p.even), None)
    first = uneven is None or uneven.mesh.get_local_rank() == 0
    return [Layout(unit.shards, runs, torch.Size(spec.shape), parallel,
                   writes=first or parallel is not None and parallel.splits)
            for parallel, spec, runs in zip(parallels, specs, plan_intervals(unit, specs))]


def shared_places(param: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """References to a parameter that was taken back from a unit; none for any other. Kept by whoever finds more."""
    return getattr(param, _SHARED, [])


def take_back(unit: Unit, slot: Slot) -> None:
    """Undoes the sharding of one parameter, which another unit refers to as well; the others' shards are laid out anew.

    The whole parameter is the original: nobody has trained it yet.
    """
    unit.slots.remove(slot)
    with torch.no_grad():
        whole = [s.whole() for s in unit.slots]
    rest, unit.slots = unit.slots, []
    original = slot.original()
    delattr(original, _SUCCESSOR)
    slot.register(original)
    setattr(original, _SHARED, list(slot.places))
    found = [(nn.Parameter(full, requires_grad=s.param.requires_grad), s.places, s.name)
             for s, full in zip(rest, whole)]
    shard_parameters(unit, found)


def main_values(slot: Slot) -> torch.Tensor:
    """This rank's elements of the main weight: [n], fp32."""
    return local_elements(slot.param)
