"""What all optimizers on the engine have in common: binding to it, steps, state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import ParamsT

from .. import _C
from .._compiler import plain
from .._gradients import refuse_in_hooks
from .._ranks import flat_mesh
from .._runtime import Runtime, runtime_of
from .._unit import Slot, unit_of
from ..ragged import elements_for, local_elements, sharded_tensor
from ._options import check_values, check_words
from ._tensor_parallel import refuse_units_of_parts, skip_together


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer whose step runs on the engine.

    `state` holds views of the engine's memory, as sharded tensors: a field per element has the parameter's shape, one
    per block a value for each block, and of one per unit each unit is an entry of its own, `name.number`.

    Attributes:
        last: of the last step, None before: grad_norm, the 2-norm of all gradients together (with tensor parallelism,
            of this rank's parts); skipped, whether it was not finite, so that weights and state stayed as they were.
        skipped: calls of step() so far that changed nothing for that reason. The first, second, fourth, eighth and so
            on warn.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        if not isinstance(params, Iterable):
            raise TypeError(f"{type(self).__name__}: params: wanted parameters or groups of them, got {params!r}")
        self._runtime: Runtime | None = None  # before groups are added, which asks for it
        super().__init__(params, defaults)
        self._applied: Any = None  # hyperparameters that the engine has
        self.last: _C.StepResult | None = None
        self.skipped = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Nothing is changed where it raises.

        Raises:
            TypeError, ValueError: for an option that cannot be; for a parameter that fully_shard has not sharded, or in
                another root than the others.
        """
        who = f"{type(self).__name__}: group {len(self.param_groups)}"
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"{who}: wanted a dict with params, got {param_group!r}")
        group = {**self.defaults, **param_group}
        params = group["params"]
        if not isinstance(params, (torch.Tensor, Iterable)):
            raise TypeError(f"{who}: params: wanted parameters, got {params!r}")
        if not isinstance(params, set):  # torch refuses these, which have no order
            group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
            self._check_parameters(who, group["params"])
        options = self._options_of(who, group)
        check_words(who, (k for k in param_group if k != "params"), options)
        check_values(who, group, options)
        self._check_together(group)
        plain(torch.optim.Optimizer.add_param_group)(self, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        plain(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        return plain(torch.optim.Optimizer.state_dict)(self)

    def _check_parameters(self, who: str, params: list[Any]) -> None:
        runtimes = {id(self._runtime)} if self._runtime is not None else set()
        for p in (p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params):
            unit = unit_of(p)
            if unit is None and isinstance(p, torch.Tensor):  # torch names what is no tensor
                raise ValueError(f"{who}: wanted parameters that fully_shard has sharded, got one of shape "
                                 f"{tuple(p.shape)} that it has not: make the optimizer after fully_shard, and without "
                                 "ignored_params")
            if unit is not None and unit.runtime is not None:
                runtimes.add(id(unit.runtime))
            if len(runtimes) > 1 or self._runtime is not None and unit is not None and unit.runtime is None:
                raise ValueError(f"{who}: wanted parameters of one root module, got one of shape {tuple(p.shape)} in "
                                 "another")

    # What subclasses say.

    def _options_of(self, who: str, group: dict[str, Any]) -> list[str]:
        """Names of the options that a group has."""
        return list(self.defaults)

    def _check_together(self, group: dict[str, Any]) -> None:
        """Raises ValueError where a group that is to be added does not go with those that are there."""

    def _operations(self, runtime: Runtime) -> list[_C.UpdateOp]:
        raise NotImplementedError

    def _hyperparameters(self) -> Any:
        """All that operations are made from; when it changes they are made anew, and their state goes on."""
        raise NotImplementedError

    def _units(self, spec: "_C.TensorSpec", kind: str) -> list[str]:
        """What operations want of a parameter whole: "element", "block:256", "matrix", ..."""
        raise NotImplementedError

    # Binding.

    def _bind(self) -> Runtime:
        """The runtime, with this optimizer's operations. Collective the first time."""
        if self._runtime is None:
            runtime = runtime_of((p for g in self.param_groups for p in g["params"]), type(self).__name__)
            self._in_no_group(runtime)
            self._start_on(runtime)
        runtime = self._runtime
        if runtime.optimizer is None or runtime.optimizer() is not self:
            raise RuntimeError(f"{type(self).__name__}: the engine runs another optimizer since")
        return runtime

    def _in_no_group(self, runtime: Runtime) -> list[torch.Tensor]:
        """Parameters that this optimizer does not have; raises ValueError for one that is not frozen."""
        grouped = {id(p) for g in self.param_groups for p in g["params"]}
        others = [(slot.param, spec.name) for slot, spec in zip(runtime.slots, runtime.specs)
                  if id(slot.param) not in grouped]
        for param, name in others:
            if param.requires_grad:
                raise ValueError(f"{type(self).__name__}: parameter {name} is in no group: wanted it frozen "
                                 "(requires_grad_(False)) or in a group")
        return [param for param, _ in others]

    def _start_on(self, runtime: Runtime) -> None:
        wanted = self._hyperparameters()
        refuse_units_of_parts(type(self).__name__, runtime, self._units)
        runtime.engine.set_operations(self._operations(runtime))
        before = runtime.optimizer and runtime.optimizer()
        if before is not None:
            before.state.clear()
        runtime.optimizer = weakref.ref(self)
        self._runtime = runtime
        self._applied = wanted
        self._show_state()

    def _show_state(self) -> None:
        runtime = self._runtime
        slots = {spec.name: slot for spec, slot in zip(runtime.specs, runtime.slots)}
        entries = [e for e in runtime.engine.state() if e.field != "weight"]
        whole, shards = flat_mesh(runtime.root.mesh), runtime.root.shards
        everyone: list = [None] * whole.size()
        dist.all_gather_object(everyone, [e.elements for e in entries if not e.per_unit], group=whole.get_group())
        index = {r: i for i, r in enumerate(whole.mesh.tolist())}
        replica = [index[r] for r in shards.mesh.tolist()]  # the ranks of `shards`, as numbers in `whole`
        self.state.clear()
        # The same entries in the same order on every rank.
        for number, entry in enumerate(e for e in entries if not e.per_unit):
            runs = _closed(everyone[r][number] for r in replica)
            slot = slots[entry.tensor]
            self.state[slot.param][entry.field] = slot.layout.state(entry.values, runs, entry.shape)
        self._show_units([e for e in entries if e.per_unit], slots, whole, shards, replica)
        self._show_step()

    def _show_units(self, entries: list[_C.StateEntry], slots: dict[str, Slot], whole: DeviceMesh,
                    shards: DeviceMesh, replica: list[int]) -> None:
        """State per unit, held by owners alone: an entry of no elements for the field, then those of its units here."""
        everyone: list = [None] * whole.size()
        mine = {(e.tensor, e.field, e.elements): e.values for e in entries if e.values.numel()}
        dist.all_gather_object(everyone, list(mine), group=whole.get_group())
        holders: dict = {}
        for r, units in enumerate(everyone):
            for tensor, field, run in units:
                holders.setdefault((tensor, field), {}).setdefault(run, []).append(r)
        empty = {(e.tensor, e.field): e.values for e in entries if not e.values.numel()}
        for (tensor, field), units in sorted(holders.items()):
            for number, run in enumerate(sorted(units)):
                # In each replica, or in one of them alone.
                mesh, ranks = (shards, replica) if len(units[run]) > 1 else (whole, range(whole.size()))
                owner = next(r for r in units[run] if r in ranks)
                size = run[1] - run[0]
                runs = [(0, size) if r == owner else (0, 0) for r in ranks]
                values = mine.get((tensor, field, run), empty[tensor, field])
                slot = slots[tensor]
                self.state[slot.param][f"{field}.{number}"] = (
                    slot.layout.state(values, runs, [size]) if mesh is shards else
                    sharded_tensor(values, mesh, runs, [size]))

    def _show_step(self) -> None:
        step = torch.tensor(float(self._runtime.engine.steps_done()))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = step

    # Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. Collective. Gradients are given up.

        Before the first backward pass it only makes the state, as the state-dict helpers of torch want it. Gradients
        that are not finite change nothing but `last` and `skipped`, and warn.

        Args:
            closure: computes the loss anew, with gradients, before the update.

        Returns:
            What the closure did, None without one.

        Raises:
            RuntimeError: where another optimizer has taken the engine over; where gradients were not made by a backward
                pass of the model, or it was followed by one without communication; inside of a gradient's hook.
            ValueError: for options that cannot be, naming them; where a parameter that is not frozen is in no group.
        """
        refuse_in_hooks(type(self).__name__, (p for g in self.param_groups for p in g["params"]))
        loss = None
        if closure is not None and not callable(closure):
            raise TypeError(f"{type(self).__name__}.step: closure: wanted a function or None, got {closure!r}")
        self._check_options(self.param_groups)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        runtime = self._bind()
        others = self._in_no_group(runtime)
        runtime.leave_broken()
        for unit in runtime.units:
            unit.note_writes()
        runtime.refuse_writes()
        if not runtime.grads_seen:
            if any(p.grad is not None for g in self.param_groups if g["lr"] != 0 for p in g["params"]):
                raise RuntimeError(f"{type(self).__name__}.step: gradients that no backward pass of the model has "
                                   "made, or that one without communication came after: wanted loss.backward() with "
                                   "it right before, and its gradients changed in place")
            return loss
        wanted = self._hyperparameters()
        if wanted != self._applied:
            refuse_units_of_parts(type(self).__name__, runtime, self._units)
            runtime.engine.change_operations(self._operations(runtime))
            self._applied = wanted
        for param in others:
            param.grad = None  # frozen since its backward pass
        runtime.gradients_as_users_left_them()
        if runtime.parallel_ranks is not None:
            skip_together(runtime)
        number = runtime.engine.steps_done() + 1
        self.last = runtime.engine.step(float(self._rate()), 1.0)
        runtime.gradients_are_spent()
        self._show_step()
        if self.last.skipped:
            self._was_skipped(number)
        self._after_step(runtime)
        return loss

    def _after_step(self, runtime: Runtime) -> None:
        """What subclasses do when gradients are given up."""

    def _was_skipped(self, number: int) -> None:
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:  # a power of two: a run of nothing else is not filled with it
            times = "" if self.skipped == 1 else f" This has happened {self.skipped} times."
            warnings.warn(f"{type(self).__name__}: step {number} was skipped: gradients are not finite, their norm is "
                          f"{self.last.grad_norm}. Weights and state are as before, and the gradients are given up; "
                          f"the optimizer's `last` and `skipped` tell.{times}", stacklevel=5)

    def _check_options(self, groups: Iterable[dict[str, Any]]) -> None:
        for i, group in enumerate(groups):
            who = f"{type(self).__name__}: group {i}"
            check_values(who, group, self._options_of(who, group))

    def _rate(self) -> float:
        """The learning rate that all others are multiples of: of the first group where it is not 0."""
        return next((g["lr"] for g in self.param_groups if g["lr"] != 0), 0.0)

    # State.

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies state into the engine's memory, and options into the groups. Collective the first time.

        Takes what state_dict() gave, of sharded or of whole tensors.

        Raises:
            ValueError: for other groups, parameters or fields than this optimizer has; nothing is changed then.
        """
        who = type(self).__name__
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError(f"{who}.load_state_dict: wanted a dict with state and param_groups, got "
                             f"{_kind(state_dict)}")
        runtime, given = self._bind(), state_dict["param_groups"]
        if [len(g["params"]) for g in given] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(f"{who}.load_state_dict: wanted groups of {[len(g['params']) for g in self.param_groups]} "
                             f"parameters, got {[len(g['params']) for g in given]}")
        self._check_options({**mine, **theirs} for mine, theirs in zip(self.param_groups, given))
        order = [p for g in self.param_groups for p in g["params"]]
        ids = [i for g in given for i in g["params"]]
        copies, steps = [], set()
        for p, i in zip(order, ids):
            theirs = state_dict["state"].get(i, {})
            mine = self.state[p]
            if not theirs and not p.requires_grad:
                continue  # torch's keeps none of frozen parameters
            if set(theirs) != set(mine):
                raise ValueError(f"{who}.load_state_dict: parameter {i}: wanted fields {sorted(mine)}, got "
                                 f"{sorted(theirs)}")
            for field, value in theirs.items():
                if field == "step":
                    steps.add(int(value))
                    continue
                if tuple(value.shape) != tuple(mine[field].shape):
                    raise ValueError(f"{who}.load_state_dict: parameter {i}: {field}: wanted shape "
                                     f"{tuple(mine[field].shape)}, got {tuple(value.shape)}")
                copies.append((mine[field], value))
        if len(steps) > 1:
            raise ValueError(f"{who}.load_state_dict: wanted one number of steps, got {sorted(steps)}")
        with torch.no_grad():
            for mine, value in copies:
                local_elements(mine).copy_(elements_for(value, mine))
        for group, theirs in zip(self.param_groups, given):
            group.update({k: v for k, v in theirs.items() if k != "params"})
        if steps:
            runtime.engine.set_steps_done(steps.pop())
        self._show_step()

    def taken_out(self) -> dict[str, Any]:
        """Copies of this rank's state, for put_back() onto another engine of the same layout."""
        fields = {p: {k: local_elements(t).clone() for k, t in s.items() if k != "step"} for p, s in self.state.items()}
        return {"fields": fields, "steps": self._runtime.engine.steps_done()}

    def put_back(self, taken: dict[str, Any]) -> None:
        self._start_on(self._runtime)
        for p, fields in taken["fields"].items():
            for name, values in fields.items():
                local_elements(self.state[p][name]).copy_(values)
        self._runtime.engine.set_steps_done(taken["steps"])
        self._show_step()


def _kind(value: Any) -> str:
    return f"one with {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__


def _closed(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Empty runs as (0, 0)."""
    return [run if run[0] < run[1] else (0, 0) for run in runs]
