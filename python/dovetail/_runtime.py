"""The engine under a root module: made at the first forward pass, when all units are known."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from ._gradients import Gradients
from ._mistakes import refuse_unset, warn_of_strangers
from ._ranks import flat_mesh, keep_track_of_engine, ranks_of, world_of
from ._residence import Residence
from ._tree import Tree
from ._unit import Unit, main_values, outermost, spec_of, unit_of

STATE = "_dovetail_unit"  # on a module: its unit


def start(unit: Unit) -> None:
    """Makes the engine of a root: finds all units below it. Collective."""
    units = []
    for path, m in unit.modules[0].named_modules():
        u = getattr(m, STATE, None)
        if u is None or u is unit or u in units:
            continue
        if u.runtime is not None:
            raise RuntimeError(f"{path}: its forward ran as a root of its own before; run the outermost module first")
        u.name = path
        units.append(u)
    units.append(unit)
    warn_of_strangers(unit.modules[0], [part for u in units for part in u.parts_of_it()])
    Runtime(_in_forward_order(units))


def _in_forward_order(units: list[Unit]) -> list[Unit]:
    """With their parts behind the units below them, before the root."""
    order = list(units)
    for u in units:
        if u.behind is not None:
            inside = {id(m) for top in u.modules for m in top.modules()}
            last = max(i for i, other in enumerate(order[:-1]) if id(other.modules[0]) in inside)
            order.insert(last + 1, u.behind)
            u.behind.name = u.name
    return order


def runtime_of(params: Iterable[torch.Tensor], who: str) -> "Runtime":
    """The runtime of the one root that all parameters belong to, which is made where no forward has yet. Collective.

    Raises:
        ValueError: where a parameter is not sharded, or they belong to several roots.
    """
    units = []
    for p in params:
        u = unit_of(p)
        if u is None:
            raise ValueError(f"{who}: wanted parameters that fully_shard has sharded, got one of shape "
                             f"{tuple(p.shape)} that it has not")
        if u not in units:
            units.append(u)
    if all(u.runtime is None for u in units) and (root := outermost(units)) is not None:
        start(root)
    runtimes = {id(u.runtime): u.runtime for u in units}
    if len(runtimes) != 1 or None in runtimes.values():
        raise ValueError(f"{who}: wanted parameters of one root module, got units {[u.name for u in units]} that no "
                         "root holds")
    return next(iter(runtimes.values()))


def runtime_under(unit: Unit) -> "Runtime":
    """The runtime of a unit, which is made of the outermost module around it where no forward has yet. Collective."""
    if unit.runtime is None:
        start(outermost([unit]) or unit)
    if unit.runtime is None:
        raise RuntimeError("wanted a module below the first of those that fully_shard made the outermost unit of")
    return unit.runtime


def _weakly(method):
    """For the engine to call, which must not keep alive what keeps it."""
    ref = weakref.WeakMethod(method)

    def call(*args):
        alive = ref()
        if alive is not None:
            alive(*args)

    return call


class Runtime(Residence):
    """Units of one root and the engine that drives them.

    Args:
        units: in forward order as far as known, the root last.
    """

    def __init__(self, units: list[Unit]):
        super().__init__(units)
        self.accumulates = False   # room for whole gradients of micro-batches without communication
        self.values_seen = False   # whether all memory that to_empty() made was written to
        self.syncs = True          # backward passes reduce
        self.completes = True      # and over replicas
        self.gradients = Gradients()
        self.anew = False          # the engine is to be made anew
        self.engine: "_C.Engine | None" = None
        keep_track_of_engine(self)
        self.optimizer: "weakref.ref | None" = None  # of the optimizer whose operations the engine has
        self._build()

    # The engine.

    @torch.inference_mode(False)  # training may follow a first forward in it
    def _build(self) -> None:
        root = self.root
        for u in self.units:
            for what in ("mesh", "plan", "comm"):
                if getattr(u, what) != getattr(root, what):
                    raise ValueError(f"fully_shard: {u.name or 'the root'}: wanted the {what} of the root, "
                                     f"{getattr(root, what)}, got {getattr(u, what)}")
        options = root.options()
        options.local_accumulation = self.has_room = self.accumulates
        self.anew = False
        self.prefetch = options.prefetch = max([options.prefetch] + [u.prefetch for u in self.units])
        model, self.specs, self.slots = [], [], []
        for index, u in enumerate(self.units):
            u.index = index
            compute = torch.bfloat16 if u.format == "bf16" else torch.float32
            parameters = []
            for slot in u.slots:
                if slot.runtime is None:
                    slot.runtime = nn.Parameter(torch.empty(0, dtype=compute), requires_grad=slot.param.requires_grad)
                name = ".".join(filter(None, (u.name, slot.name)))
                values = main_values(slot)
                if values.dtype != torch.float32:
                    raise ValueError(f"parameter {name}: wanted main weights of float32, got {values.dtype}")
                if values.is_meta:
                    raise RuntimeError(f"parameter {name} is on the meta device: materialise the model with to_empty() "
                                       "and initialise it before the first forward")
                shape = list(slot.layout.shape)
                parameters.append(_C.UnitParameter(name, slot.runtime, shape, values))
                self.specs.append(spec_of(name, shape, slot.kind, slot.parts))
                self.slots.append(slot)
            group = u.name if u.front is None else f"{u.name} (behind its units)".lstrip()
            model.append(_C.ModelUnit(group, parameters, u.format, u.keep_after_forward(root), u.front is not None,
                                      _weakly(u.residence_changed)))
        meshes = {slot.parallel.mesh for slot in self.slots if slot.parallel is not None}
        if len(meshes) > 1:
            raise ValueError(f"fully_shard: wanted one mesh of tensor parallelism below a root, got {list(meshes)}")
        self.parallel_ranks = next(iter(meshes), None)  # the mesh of tensor parallelism
        self.world = world_of(root.mesh, root.comm)
        self.engine = _C.Engine(model, self.world, options, self.specs)
        self.divide()
        self.engine.set_gradient_completion(self.completes)
        self.engine.set_gradient_sync(self.syncs)
        self.engine.on_backward(_weakly(self._enter_backward), _weakly(self._leave_backward))
        for i, slot in enumerate(self.slots):
            slot.runtime._dovetail_sink = self.engine.sink(i)  # for dovetail.nn.Linear
        self.gradients.show(self.slots, self._show())
        self.broken = 0  # backward passes that threw, left so far
        for u in self.units:
            u.runtime = self
            u.gathered = False
            u.show(runtime=False)
        if self.stays_gathered:
            self.keep_gathered(True)

    def all_ranks(self) -> list[DeviceMesh]:
        """1-D meshes that together reach all ranks of the model: of the engine, and of tensor parallelism."""
        return [flat_mesh(self.root.mesh)] + ([self.parallel_ranks] if self.parallel_ranks is not None else [])

    def _show(self) -> "list[torch.Tensor]":
        """Makes the engine's main weights the memory of the sharded parameters. Returns that of their gradients."""
        parameters = self.engine.parameters()
        for slot, p in zip(self.slots, parameters):
            local = slot.param._local_tensor
            local.data = p.main.view(local.shape)
        return [p.grad for p in parameters]

    def take_over(self) -> None:
        """Values of parameters and gradients whose memory was exchanged under them, as Module._apply does."""
        with torch.no_grad():
            for slot, p in zip(self.slots, self.engine.parameters()):
                local = slot.param._local_tensor
                if p.main.numel() and local.data_ptr() != p.main.data_ptr():
                    p.main.copy_(local.reshape(-1))
            self.gradients.take_over(self._show())

    def set_sync(self, sync: bool) -> None:
        """Whether backward passes communicate."""
        if not sync and not self.accumulates and self.root.options().zero2 > 1:
            if self.gradients.partial:
                raise RuntimeError("set_requires_gradient_sync(False), for the first time: wanted it before a backward "
                                   "pass with set_requires_all_reduce(False), or after one that completes gradients")
            self.accumulates = True
            self.rebuild()
        self.syncs = sync
        if not self._lacks_room():
            self.engine.set_gradient_sync(sync)

    def rebuild(self) -> None:
        """The next forward of the root makes the engine anew, with the weights and gradients of this one and the state
        of its optimizer; a later one where passes without communication have left something in this one."""
        self.anew = True

    def _lacks_room(self) -> bool:
        """Whether passes are to leave gradients on this rank that only a new engine has room for."""
        return self.accumulates and not self.has_room

    def _rebuild(self) -> None:
        optimizer = self.optimizer and self.optimizer()
        state = optimizer and optimizer.taken_out()
        for slot in self.slots:
            local = slot.param._local_tensor
            local.data = local.detach().clone()
        self.engine.release_all()
        self.optimizer = None
        self.engine = None
        self._build()
        if optimizer:
            optimizer.put_back(state)

    def reset(self) -> None:
        """Drops gradients, and what passes that were broken off have left."""
        self.leave_broken()
        self.in_backward = False
        self.running.clear()
        self._give_up(self.units)
        self.engine.zero_grad()
        self.gradients.spent()

    # Passes.

    def before_forward(self, unit: Unit, args, kwargs):
        begins = not self.leave_broken() and unit is self.root  # else a checkpoint may hold the root
        if begins:
            self.running.clear()
            self._root_begins()
        elif not self.running and not self.in_backward:
            self.gradients.forward_begins(self.engine, root=False)
        if not self.running and not self.in_backward:
            for u in self.units:
                u.note_writes()
            self.refuse_writes()
        given = Tree((args, kwargs))
        compute = torch.bfloat16 if unit.format == "bf16" else unit.policy.param_dtype
        dtype = compute if unit.policy.cast_forward_inputs else None
        tensors = [t.to(dtype) if dtype and t.is_floating_point() else t for t in given.tensors]
        self.running.append((unit, sys.exc_info()[1]))
        given.tensors = self.engine.before_forward(unit.index, tensors)
        if begins:
            self.in_backward = False
        if unit.behind is not None:
            self.engine.before_forward(unit.behind.index, [])
        for part in unit.parts_of_it():
            part.begin_pass()
        return given.put_together()

    def after_forward(self, unit: Unit, output):
        begun = self._begun(unit)
        error = sys.exc_info()[1]
        # A forward may be called where another exception is handled.
        if error is not None and error is not (self.running[begun][1] if begun is not None else None):
            self.forward_failed(unit)
            return None
        if begun is not None:
            del self.running[begun:]
        result = Tree(output)
        dtype = unit.policy.output_dtype
        tensors = result.tensors
        for part in reversed(unit.parts_of_it()):
            tensors = self.engine.after_forward(part.index, tensors)
        result.tensors = [t.to(dtype) if dtype and t.is_floating_point() else t for t in tensors]
        if not self.in_backward:
            self._look_for_writes(unit)
            if not self.running or unit is self.root:
                # Between passes parameters are the sharded ones, also of units that stay gathered.
                for u in self._ended_with(unit):
                    u.show(runtime=False)
        return result.put_together()

    def leave_broken(self) -> bool:
        """Leaves a backward pass that threw, which is collective. Gradients are what it had reduced until then.

        Returns:
            Whether a backward pass is under way.
        """
        inside = self.engine.in_backward()
        if self.engine.broken_backwards() != self.broken:
            self.broken = self.engine.broken_backwards()
            self.in_backward = False
            self.running.clear()
            self._give_up(self.units)
            self.gradients.broke_off(self.engine)
        return inside

    def _root_begins(self) -> None:
        if not self.values_seen:
            refuse_unset(self.root.modules[0], self.all_ranks())
            self.values_seen = True
        if self.anew and not self.gradients.partial:
            with torch.inference_mode(False), torch.no_grad():
                self._rebuild()
        self.gradients.forward_begins(self.engine, root=True)
        for slot, spec in zip(self.slots, self.specs):
            if slot.runtime.requires_grad != slot.param.requires_grad:
                slot.runtime.requires_grad_(slot.param.requires_grad)
            for module, name in slot.places:
                registered = module._parameters.get(name)
                if registered is not slot.param and registered is not slot.shown:
                    raise RuntimeError(f"parameter {spec.name} was replaced by another object: wanted a write into the "
                                       "sharded one, as load_state_dict() without assign=True does")

    def _enter_backward(self) -> None:
        self.leave_broken()
        for u in self.units:  # for what is computed again
            if u.gathered:
                u.show(runtime=True)
        if self._lacks_room() and not self.syncs:
            raise RuntimeError("set_requires_gradient_sync(False) for the first time, between a forward and its "
                               "backward pass: wanted it before the forward, which makes room for gradients on every "
                               "rank")
        self.gradients.backward_begins(self.engine, self.syncs and self.completes, self.scaled)
        self.in_backward = True

    def _leave_backward(self) -> None:
        self.in_backward = False
        if self.stays_gathered:
            for u in self.units:
                u.show(runtime=False)
        complete = self.syncs and self.completes
        self.gradients.backward_ends(self.engine.have_gradients() if complete else None, self.scaled)
        self.refuse_writes()

    def divide(self) -> None:
        """Tells the engine what to divide sums over ranks by, as units have it."""
        ranks = float(len(ranks_of(self.root.mesh)))
        factors = [u.factor or ranks for u in self.units if u.slots]
        # Whole gradients take the engine's factor in passes without communication too, those of units only with it.
        all_by = factors[0] if len(set(factors)) == 1 and self.root.options().zero2 > 1 else ranks
        self.engine.set_gradient_factor(1.0 / all_by)
        self.scaled = [all_by / (u.factor or ranks) for u in self.units for _ in u.slots]

    # Steps on the engine.

    @property
    def grads_seen(self) -> bool:
        """Whether the engine has complete gradients."""
        return self.gradients.seen

    def gradients_as_users_left_them(self) -> None:
        """What users have dropped or put in the place of gradients, the engine has too."""
        self.gradients.hand_over([spec.name for spec in self.specs])

    def gradients_are_spent(self) -> None:
        """After a step on the engine, which gives them up."""
        self.gradients.spent()
