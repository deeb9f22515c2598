"""What fully_shard mixes into a module: its methods, beside those of torch's FSDPModule."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn as nn

from ._mistakes import mark_emptied
from ._runtime import STATE, Runtime, runtime_under
from ._unit import Unit


class UnshardHandle:
    """A gather that was begun."""

    def wait(self) -> None:
        """Returns when the parameters can be read: they can already."""


def _refused(name: str, why: str):
    """A method that torch's has, and this has not."""
    def method(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {why}")

    method.__name__ = name
    method.__doc__ = f"Not there: {why}."
    return method


def _want_bool(call: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{call}: wanted a bool, got {type(value).__name__} {value!r}")


class FSDPModule:
    """What fully_shard mixes into a module.

    All methods are called on all ranks alike. One that is for the root raises NotImplementedError elsewhere, but for a
    switch that stands so already: a loop over all modules with one value works, since the root comes first. The engine
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
        for u in self._below(recurse=True):
            u.mark_parameters()
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

        They are for reading, and have the values that the sharded ones had when the first of the units that are
        unsharded at the same time was.

        Args:
            async_op: whether to return a handle; the parameters can be read when this returns in any case.
        """
        runtime_under(self._unit()).unshard(self._unit())
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Gives the unit's whole parameters up: modules have the sharded ones again.

        Raises:
            RuntimeError: where whole parameters were written to.
        """
        if self._unit().runtime is not None:
            self._unit().runtime.reshard(self._unit())

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward passes add to whole gradients on each rank and communicate nothing, until it is True again.

        For the whole model: call it on the root, outside of passes. After the first False the next forward makes the
        engine anew, with 4 bytes for each element of the model on every rank, unless gradients are whole already
        (zero2=1).

        Raises:
            RuntimeError: for the first False after a backward pass that set_requires_all_reduce(False) has left
                incomplete.
        """
        _want_bool("set_requires_gradient_sync", requires_gradient_sync)
        if (runtime := self._to_change("set_requires_gradient_sync", recurse, "syncs", requires_gradient_sync)):
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
        if not isinstance(modules, (list, tuple)):
            raise ValueError(f"{call}: wanted a list of modules, got {type(modules).__name__}")
        for m in modules:
            if not isinstance(m, FSDPModule):
                raise ValueError(f"{call}: wanted modules that fully_shard has sharded, got {type(m).__name__}")
        unit = self._unit()
        unit.prefetch = max(unit.prefetch, len(modules))
        if unit.runtime is not None and unit.runtime.prefetch < unit.prefetch:
            unit.runtime.rebuild()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes what fully_shard was given, outside of passes. The engine is made anew where it has run."""
        _want_bool("set_reshard_after_forward", reshard_after_forward)
        units = self._below(recurse)
        changed = any(u.reshard_after_forward != reshard_after_forward for u in units)
        for u in units:
            u.reshard_after_forward = reshard_after_forward
        if changed and self._unit().runtime is not None:
            self._unit().runtime.rebuild()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: all units stay gathered from here on, through forward and backward passes, until True: micro-batches
        without gathers, and every rank holds the whole model. On the root, outside of passes. Collective."""
        _want_bool("set_reshard_after_backward", reshard_after_backward)
        keeps = not reshard_after_backward
        if (runtime := self._to_change("set_reshard_after_backward", recurse, "stays_gathered", keeps)):
            runtime.keep_gathered(keeps)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: reductions are finished at the end of every backward pass."""
        _want_bool("set_is_last_backward", is_last_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward passes leave sums over the ranks of one copy of the parameters, and gradients as they were,
        until one with True sums them over all copies. On the root, outside of passes."""
        _want_bool("set_requires_all_reduce", requires_all_reduce)
        if (runtime := self._to_change("set_requires_all_reduce", recurse, "completes", requires_all_reduce)):
            runtime.completes = requires_all_reduce
            runtime.engine.set_gradient_completion(requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of the unit's own parameters are the sum over ranks divided by ``factor`` instead of the number of
        ranks, from the next backward pass on. For a whole model call it on every unit.

        Raises:
            ValueError: unless the factor is positive.
        """
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: wanted a positive number, got {factor!r}")
        for part in self._unit().parts_of_it():
            part.factor = float(factor)
        if self._unit().runtime is not None:
            self._unit().runtime.divide()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The name that torch had before for set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients always travel as they are, are summed, and then divided."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted: a parameter that only some ranks used is always reduced, with zeros of the others. Of one that no
        rank used, ``.grad`` stays None."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Accepted with True: units are gathered for their backward passes.

        Raises:
            NotImplementedError: with False.
        """
        if not unshard_in_backward:
            raise NotImplementedError("set_unshard_in_backward(False): every unit is gathered for its backward pass: "
                                      "wanted reshard_after_forward=False, which leaves it gathered, for a unit whose "
                                      "backward pass should gather nothing")

    def reset_iter_state(self) -> None:
        """After a backward pass that raised: training can go on from the weights and the optimizer's state that there
        are. Gradients are lost, those of earlier micro-batches too. On the root. Collective.

        zero_grad() does as well: the next call leaves such a pass by itself. After a forward that raised nothing is to
        be done: its units are released already.
        """
        self._at_root("reset_iter_state", True).reset()

    set_all_reduce_hook = _refused(
        "set_all_reduce_hook", "the engine sums over all copies itself: wanted a 2-D mesh, or a "
        "change of .grad after the backward pass (set_requires_all_reduce(False) puts the sum over copies off)")
    set_custom_all_gather = _refused(
        "set_custom_all_gather", 'the engine communicates itself: wanted comm="peer" or comm="c10d" of fully_shard')
    set_custom_reduce_scatter = _refused(
        "set_custom_reduce_scatter",
        'the engine communicates itself: wanted comm="peer" or comm="c10d" of fully_shard')
    set_allocate_memory_from_process_group_for_comm = _refused(
        "set_allocate_memory_from_process_group_for_comm", "the engine allocates its buffers itself: wanted "
        'comm="peer" of fully_shard, where ranks of one host read the memory of others')
    set_symm_mem_for_comm = _refused(
        "set_symm_mem_for_comm", 'there is no NCCL on the CPU: wanted comm="peer" of fully_shard, where ranks of one '
        "host read the memory of others")
    set_post_optim_event = _refused(
        "set_post_optim_event",
        "there are no streams on the CPU, and a step is done when it returns: leave the call out")
    set_reduce_scatter_max_input_buffers = _refused(
        "set_reduce_scatter_max_input_buffers", "how many reductions are under way is of the whole root: wanted "
        "plan=Plan(pending_reductions=...) of fully_shard")
    set_separate_reduce_scatter_group = _refused(
        "set_separate_reduce_scatter_group", "collectives of the engine use no process group of torch that they would "
        "queue in: leave the call out")

    def _to_change(self, call: str, recurse: bool, attribute: str, value: bool) -> Runtime | None:
        """The root's runtime; below the root None where it is so already, as after the same call on the root."""
        runtime = runtime_under(self._unit())
        if runtime.root is not self._unit() and getattr(runtime, attribute) == value:
            return None
        return self._at_root(call, recurse)

    def _at_root(self, call: str, recurse: bool) -> Runtime:
        unit = self._unit()
        runtime_under(unit)
        if unit.runtime.root is not unit or not recurse:
            raise NotImplementedError(f"{call}: wanted the root module with recurse=True, got "
                                      f"{unit.name or 'recurse=False'}")
        return unit.runtime
