"""Several of the engine's optimizers in one, by parameter group."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim.optimizer import ParamsT

from .. import _C
from .._runtime import Runtime
from ._named import SGD, AdamW, AdamW8bit, Muon, Shampoo, _Named

_KINDS: dict[str, type[_Named]] = {kind._name: kind for kind in (SGD, Muon, Shampoo, AdamW8bit, AdamW)}
_OWN = ("lr", "weight_decay")  # of each group


def _options_of(name: str) -> dict[str, Any]:
    """The options of an optimizer with their defaults, but for those that groups have of their own."""
    parameters = inspect.signature(_KINDS[name]).parameters
    return {k: p.default for k, p in parameters.items() if k not in (*_OWN, "params")}


class Composed(_Named):
    """Every group by an optimizer of its own:

        Composed([{"params": hidden, "optimizer": "muon", "momentum": 0.9},
                  {"params": rest, "optimizer": "adamw", "betas": (0.9, 0.95), "lr": 3e-4}], lr=1e-3)

    ``optimizer``: "adamw", "adam8", "sgd", "muon" or "shampoo", of all the group's parameters, whatever their shapes: a
    vector as a row for Muon and Shampoo. Groups take the options of the class of that name, with its defaults; what has
    the same optimizer has the same options but for ``lr`` and ``weight_decay``.

    State: as of those classes.

    Raises:
        ValueError: for an optimizer or an option that is not there, naming the group.
    """

    _name = "adamw"

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 1e-2, optimizer: str = "adamw") -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, optimizer=optimizer))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # what it is else, is named above
            number, name = len(self.param_groups), param_group.get("optimizer", self.defaults["optimizer"])
            options = self._kind_of(f"Composed: group {number}", name)
            for key in param_group:
                if key not in (*options, *_OWN, "params", "optimizer", "initial_lr", "param_names"):
                    raise ValueError(f"Composed: group {number}: wanted options of {name}, "
                                     f"{sorted([*options, *_OWN])}, got {key!r}")
            param_group = {**options, **param_group}
        super().add_param_group(param_group)

    def _kind_of(self, who: str, name: Any) -> dict[str, Any]:
        """The options of the optimizer of that name."""
        if not isinstance(name, str) or name not in _KINDS:
            raise ValueError(f"{who}: optimizer: wanted one of {sorted(_KINDS)}, got {name!r}")
        return _options_of(name)

    def _options_of(self, who: str, group: dict[str, Any]) -> list[str]:
        return ["optimizer", *_OWN, *self._kind_of(who, group["optimizer"])]

    def _check_together(self, group: dict[str, Any]) -> None:
        self._options_by_name(self.param_groups + [group])

    def _options_by_name(self, groups: list[dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
        """Of each optimizer that a group has: its options but for those that groups have of their own."""
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        for number, group in enumerate(self.param_groups if groups is None else groups):
            name = group["optimizer"]
            own = {k: tuple(group[k]) if k == "betas" else group[k] for k in _options_of(name)}
            first, wanted = found.setdefault(name, (number, own))
            if own != wanted:
                raise ValueError(f"Composed: group {number}: wanted {wanted} as in group {first}, which has the "
                                 f"optimizer {name} too, got {own}")
        adamw, adam8 = (found.get(name, (0, None))[1] for name in ("adamw", "adam8"))
        if adamw is not None and adam8 is not None and adamw != adam8:
            raise ValueError(f"Composed: adamw and adam8: wanted the same options of both, got {adamw} and {adam8}")
        return {name: own for name, (_, own) in found.items()}

    def _configure_all(self, options: _C.OptimizerOptions) -> None:
        by_name = self._options_by_name()
        for name, kind in _KINDS.items():  # those that would set AdamW's options too come before it
            if name in by_name:
                kind._configure(self, options, by_name[name])

    def _start_on(self, runtime: Runtime) -> None:
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        self._groups = {spec.name: groups.get(id(slot.param)) for slot, spec in zip(runtime.slots, runtime.specs)}
        super()._start_on(runtime)

    def _units(self, spec: _C.TensorSpec, kind: str) -> list[str]:
        group = self._groups[spec.name]
        if group is None:
            return []
        return [group.get("unit", _KINDS[group["optimizer"]]._whole)]

    def _hyperparameters(self) -> Any:
        return self._factors(), self._options_by_name()
