"""Gradients of sharded parameters as users have them, over memory that the engine writes anew in every step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from . import _C
from ._unit import Slot, unit_of
from .ragged import local_elements


class Gradients:
    """Of all parameters of a root.

    Between passes the engine's memory holds nothing of this step; or complete gradients, which are `.grad` where users
    have not dropped them; or what passes without communication have left for one that completes it. Gradients that
    users keep or assign, and complete ones that such a pass comes after, have memory of their own: they are added when
    the next pass is complete, as torch's own fully_shard adds to `.grad`.

    Attributes:
        seen: the engine's memory holds complete gradients.
        partial: it holds what is not complete.
        running_hooks: users' hooks are being called.
    """

    def __init__(self) -> None:
        self.seen = self.partial = self.running_hooks = False
        self.slots: list[Slot] = []
        self._complete: list[bool] = []        # per slot: the engine has a gradient of it
        self._free: list[tuple[int, ...]] = []  # per slot: the holders of `slot.gradient` while no user is one
        self._given = False                    # users may hold some

    def show(self, slots: list[Slot], memories: Iterable[torch.Tensor]) -> None:
        """Of a new engine, or anew: what users hold of the one before keeps its memory alive."""
        self.slots = slots
        self.seen = self.partial = False
        self._complete = [False] * len(slots)
        self._free = [()] * len(slots)
        for i, (slot, memory) in enumerate(zip(slots, memories)):
            slot.memory = memory
            self._make(i)

    def take_over(self, memories: Iterable[torch.Tensor]) -> None:
        """Values of gradients whose memory was exchanged under them."""
        shown = [slot for slot in self.slots if slot.param.grad is not None and slot.param.grad is slot.gradient]
        before = self.seen, self.partial, self._complete
        self.show(self.slots, memories)
        self.seen, self.partial, self._complete = before
        for slot in shown:
            slot.memory.copy_(local_elements(slot.param.grad))
            slot.param.grad = slot.gradient

    def _make(self, i: int) -> None:
        slot = self.slots[i]
        # A storage of its own: who uses it can be counted.
        slot.gradient = slot.layout.tensor(torch.from_dlpack(slot.memory) if slot.memory.numel() else slot.memory)
        self._free[i] = _holders(slot.gradient)

    def is_shown(self, slot: Slot) -> bool:
        """Whether `.grad` is the engine's memory."""
        grad = slot.param.grad
        if grad is None or grad is slot.gradient:
            return grad is not None
        local = grad._local_tensor if isinstance(grad, DTensor) else grad
        if not local.numel() or local.data_ptr() != slot.memory.data_ptr() or local.numel() != slot.memory.numel():
            return False
        slot.param.grad = slot.gradient  # another tensor over it: detach()
        return True

    # Passes.

    def forward_begins(self, engine: "_C.Engine", root: bool) -> None:
        """Before the engine gives memory back that holds nothing of this step."""
        self._leave_to_users()
        if root and self.seen and not any(map(self.is_shown, self.slots)):
            engine.zero_grad()
            self.seen = False

    def broke_off(self, engine: "_C.Engine") -> None:
        """A backward pass threw: what it had reduced is in the engine's memory, for gradients that users still have."""
        self.seen = any(map(self.is_shown, self.slots))
        if not self.seen:
            engine.discard_gradients()
            self.partial = False

    def backward_begins(self, engine: "_C.Engine", completes: bool, scaled: Sequence[float]) -> None:
        """
        Args:
            completes: the pass will end with complete gradients.
            scaled: per slot, what its gradient of this pass is multiplied by at the end.
        """
        self._leave_to_users()
        if not self.seen:
            return
        shown = [self.is_shown(slot) for slot in self.slots]
        with torch.no_grad():
            if completes and any(shown):
                self._move([i for i, mine in enumerate(shown) if mine and scaled[i] != 1])
                for slot in self.slots:
                    if slot.param.grad is not slot.gradient:
                        slot.memory.zero_()
                return
            self._move([i for i, mine in enumerate(shown) if mine])
        engine.discard_gradients()
        self.seen = False

    def backward_ends(self, has: Sequence[bool] | None, scaled: Sequence[float]) -> None:
        """Sets `.grad`, and calls the hooks for it: of the unit that backward came to first, first.

        Args:
            has: per slot, whether the engine has its gradient; None where the pass has not completed any.
        """
        self.partial = has is None
        if has is None:
            return
        self._complete = [there and slot.param.requires_grad for there, slot in zip(has, self.slots)]
        with torch.no_grad():
            for slot, there, factor in zip(self.slots, self._complete, scaled):
                if not there:
                    continue
                if factor != 1:
                    slot.memory.mul_(factor)
                if slot.param.grad is not None and not self.is_shown(slot):
                    slot.memory.add_(local_elements(slot.param.grad))
                slot.param.grad = slot.gradient
                self.seen = self._given = True
            self._call_hooks()

    def _call_hooks(self) -> None:
        called = [(slot.param, hooks) for slot, there in zip(self.slots, self._complete)
                  if there and (hooks := getattr(slot.param, "_post_accumulate_grad_hooks", None))]
        self.running_hooks = True
        try:
            for param, hooks in reversed(called):
                for hook in list(hooks.values()):
                    hook(param)
        finally:
            self.running_hooks = False

    # A step on the engine.

    def hand_over(self, names: Sequence[str]) -> None:
        """What users have dropped or put in the place of gradients, the engine has too.

        Raises:
            RuntimeError: where users have put a gradient of a parameter that no backward pass has reached.
        """
        self._leave_to_users()
        with torch.no_grad():
            for slot, there, name in zip(self.slots, self._complete, names):
                if slot.param.grad is None:
                    slot.memory.zero_()
                elif not self.is_shown(slot):
                    if not there:
                        raise RuntimeError(f"parameter {name} has a gradient that no backward pass of the model has "
                                           "made: wanted one that it was made by or added to")
                    slot.memory.copy_(local_elements(slot.param.grad))

    def spent(self) -> None:
        """After the step, which gives gradients up."""
        self.seen = self.partial = False
        for slot in self.slots:
            slot.param.grad = None

    # What users keep.

    def _leave_to_users(self) -> None:
        """Gradients that users have dropped from `.grad` and hold elsewhere keep their values."""
        if not self._given:
            return
        dropped = [i for i, slot in enumerate(self.slots) if not self.is_shown(slot)]
        self._given = len(dropped) < len(self.slots)
        with torch.no_grad():
            self._move([i for i in dropped if self.slots[i].memory.numel()
                        and _holders(self.slots[i].gradient) != self._free[i]])

    def _move(self, which: list[int]) -> None:
        """Gives gradients that users have memory of their own, with all tensors that share it."""
        left = []
        for i in which:
            local = self.slots[i].gradient._local_tensor
            old, new = local.untyped_storage(), local.detach().clone().untyped_storage()
            _rest_on(local, new)
            if torch._C._storage_Use_Count(old._cdata) > 1:  # by more than `old`
                left.append((old, range(old.data_ptr(), old.data_ptr() + old.nbytes()), new))
            self._make(i)
        if not left:
            return
        for t in gc.get_objects():  # views, which nothing refers to from here
            if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout is not torch.strided:
                continue
            try:
                place = t.data_ptr()
            except RuntimeError:  # a wrapper, inside of a transform
                continue
            # Storages of other tensors are left alone: other threads may be letting them go.
            for old, places, new in left:
                if place in places and t.untyped_storage()._cdata == old._cdata:
                    _rest_on(t, new)


def _holders(gradient: DTensor) -> tuple[int, ...]:
    """Counts of what refers to a gradient, to its elements, and to their memory."""
    local = gradient._local_tensor
    return (sys.getrefcount(gradient), gradient._use_count(), sys.getrefcount(local), local._use_count(),
            torch._C._storage_Use_Count(local.untyped_storage()._cdata))


def _rest_on(t: torch.Tensor, storage: torch.UntypedStorage) -> None:
    moved = torch.empty(0, dtype=t.dtype)
    t.data = moved.set_(storage, t.storage_offset(), t.size(), t.stride())


def refuse_in_hooks(who: str, params: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError where a hook of a gradient calls what takes the gradients of all parameters."""
    for p in params:
        runtime = getattr(unit_of(p), "runtime", None)
        if runtime is not None and runtime.gradients.running_hooks:
            raise RuntimeError(f"{who}.step: inside of a hook of register_post_accumulate_grad_hook: it updates all "
                               "parameters at once; wanted it after backward(), or an optimizer of torch for each "
                               "parameter")
