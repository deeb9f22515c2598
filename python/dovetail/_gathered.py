"""Parameters while their unit is gathered: whole ones, to be read. State dicts have the sharded ones all the same."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

if TYPE_CHECKING:
    from ._unit import Slot, Unit

# On what modules have of a slot while its unit is gathered: the slot. Weakly, since the engine holds this tensor.
_SLOT = "_dovetail_slot"
# On a sharded parameter: its unit.
UNIT = "_dovetail_unit"
# On a module, in the midst of its state_dict(): the whole parameters that it has otherwise, by name.
_EXCHANGED = "_dovetail_exchanged"


def unit_of(param: torch.Tensor) -> "Unit | None":
    return getattr(param, UNIT, None)


def mark_shown(tensor: torch.Tensor, slot: "Slot") -> None:
    setattr(tensor, _SLOT, weakref.ref(slot))


def _shown_slot(tensor: torch.Tensor | None) -> "Slot | None":
    ref = getattr(tensor, _SLOT, None)
    return ref and ref()


# Writes.

def refuse_writes(names: list[str]) -> None:
    """Raises for parameters whose whole values were written to."""
    if names:
        said = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise RuntimeError(f"written to while gathered: parameter {said}. Between the gather of its unit and its "
                           "release a module has whole parameters for reading only: such a write is lost, or changes "
                           "the weights of all ranks at any moment, so that weights can be wrong now. Wanted a write "
                           "to the sharded parameter, before the forward of its unit or after reshard()")


# State dicts.

def have_state_sharded(module: nn.Module) -> None:
    """Makes state_dict() and load_state_dict() of a module that has parameters of a unit see the sharded ones."""
    if _exchange in module._state_dict_pre_hooks.values():
        return
    module.register_state_dict_pre_hook(_exchange)
    module.register_state_dict_post_hook(_exchange_back)
    module.register_load_state_dict_pre_hook(release_before_load)


# Functions of the module, so that a module below a unit can be copied and pickled as before.

def _exchange(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Only until the state dict is made, so that one in the midst of a forward does not disturb it."""
    shown = {name: p for name, p in module._parameters.items() if _shown_slot(p) is not None}
    for p in shown.values():
        unit_of(_shown_slot(p).param).refuse_writes()
    for name, p in shown.items():
        module._parameters[name] = _shown_slot(p).param
    module.__dict__[_EXCHANGED] = shown


def _exchange_back(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, p in module.__dict__.pop(_EXCHANGED, {}).items():
        slot = _shown_slot(p)
        if slot is not None and slot.shown is p and module._parameters.get(name) is slot.param:
            module._parameters[name] = p


def release_before_load(module: nn.Module, *args: Any) -> None:
    """Whole values would be outdated, and must not be written to."""
    for m in module.modules():
        for name, p in m._parameters.items():
            slot = _shown_slot(p)
            if slot is not None:
                unit_of(slot.param).runtime.release_for_load(unit_of(slot.param), name)


# Transforms.

def refuse_transforms(module: nn.Module) -> None:
    """Raises inside of a transform of torch.func."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(f"torch.func over a sharded module, {type(module).__name__}: gathers and reductions "
                                  "are no operations that grad, vjp, jvp, jacrev, vmap and the like can transform. "
                                  "Wanted a plain call, with backward() or torch.autograd.grad, or functional_call on "
                                  "a module that is not sharded with full_tensor() of the parameters")
