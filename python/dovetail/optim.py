"""Optimizers that run Dovetail's update operations on the main weights.

Ordinary torch optimizers of a model that fully_shard has sharded: param_groups, LR schedulers. A unit that an operation
needs whole (a matrix for Muon, a tile for Shampoo) is assembled at its owner where shards cut it; nothing else travels.
"""

from __future__ import annotations

import torch

from . import _C
from ._unit import unit_of

__all__ = ["AdamW", "AdamW8bit", "Muon", "SGD", "Shampoo"]


class _Operations(torch.optim.Optimizer):
    """An optimizer whose step runs on the engine.

    Groups may differ in ``lr`` and ``weight_decay``; the ratios of their learning rates stay what they were in the
    first step. Parameters of the model that no group has must be frozen.
    """

    _name = ""

    def __init__(self, params, defaults: dict):
        super().__init__(params, defaults)
        self._runtime = None
        self._factors: list[tuple[float, float]] | None = None
        self.last = None  # _C.StepResult of the last step on the engine

    def _configure(self, options: "_C.OptimizerOptions", group: dict) -> None:
        raise NotImplementedError

    def _bind(self) -> None:
        runtimes = {id(u.runtime): u.runtime for g in self.param_groups for p in g["params"]
                    if (u := unit_of(p)) is not None}
        strangers = [p for g in self.param_groups for p in g["params"] if unit_of(p) is None]
        if strangers:
            raise ValueError(f"{type(self).__name__}: wanted parameters that fully_shard has sharded, got one of shape "
                             f"{tuple(strangers[0].shape)} that it has not")
        if None in runtimes.values():
            raise RuntimeError(f"{type(self).__name__}.step: wanted a forward and backward pass of the root before")
        if len(runtimes) != 1:
            raise ValueError(f"{type(self).__name__}: wanted parameters of one root module, got {len(runtimes)}")
        runtime = next(iter(runtimes.values()))
        names = {id(slot.param): spec.name for slot, spec in zip(runtime.slots, runtime.specs)}
        base = self.param_groups[0]
        options = _C.OptimizerOptions()
        options.name = self._name
        self._configure(options, base)
        self._factors = self._ratios()
        rules = [_C.ParameterRule(names[id(p)], *factors)
                 for group, factors in zip(self.param_groups[1:], self._factors[1:]) for p in group["params"]]
        grouped = {id(p) for g in self.param_groups for p in g["params"]}
        for slot in runtime.slots:
            if id(slot.param) not in grouped and slot.param.requires_grad:
                raise ValueError(f"{type(self).__name__}: parameter {names[id(slot.param)]} is in no group: wanted it "
                                 "frozen (requires_grad_(False)) or in a group")
        options.set_rules(base["weight_decay"], True, rules)
        runtime.engine.set_operations(options, runtime.specs)
        runtime.optimizer = self
        self._runtime = runtime

    def _ratios(self) -> list[tuple[float, float]]:
        """Of each group, its learning rate as a part of the first group's, and its weight decay."""
        rates = [g["lr"] for g in self.param_groups]
        if not any(rates):  # a schedule that starts or ends at 0: the rates of other steps say what the ratios are
            rates = [g.get("initial_lr", 0) for g in self.param_groups] if self._factors is None else \
                [factor for factor, _ in self._factors]
        if not any(rates):
            rates = [1.0] * len(rates)
        if not rates[0]:
            raise NotImplementedError("the first parameter group has a learning rate of 0 and others have not: wanted "
                                      "the parameters frozen, or another group first")
        return [(rate / rates[0], g["weight_decay"]) for rate, g in zip(rates, self.param_groups)]

    @torch.no_grad()
    def step(self, closure=None):
        """One update. Collective.

        Raises:
            RuntimeError: before the first backward pass; where another optimizer has taken the engine over.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._runtime is None:
            self._bind()
        runtime = self._runtime
        if runtime.optimizer is not self:
            raise RuntimeError(f"{type(self).__name__}.step: the engine runs another optimizer, or was made anew since")
        for was, now in zip(self._factors, self._ratios()):
            if abs(was[0] - now[0]) > 1e-9 * abs(was[0]) or was[1] != now[1]:
                raise NotImplementedError("the ratio of learning rates or the weight decay of parameter groups has "
                                          f"changed since the first step: wanted {was}, got {now}")
        runtime.gradients_as_users_left_them()
        self.last = runtime.engine.step(float(self.param_groups[0]["lr"]), 1.0)
        runtime.gradients_are_spent()
        return loss


class AdamW(_Operations):
    """AdamW with decoupled weight decay, fused: one pass over weights, gradients and moments."""

    _name = "adamw"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def _configure(self, options, group):
        options.set_adamw(*group["betas"], group["eps"])


class AdamW8bit(AdamW):
    """AdamW whose moments are 8-bit codes with a scale per 256 elements; small parameters keep fp32.

    Shards must not cut such a block: fully_shard(..., plan=Plan(alignment=256)).
    """

    _name = "adam8"


class SGD(_Operations):
    """SGD with momentum; weight decay is added to the gradient."""

    _name = "sgd"

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                                      nesterov=nesterov))

    def _configure(self, options, group):
        options.set_sgd(group["momentum"], group["dampening"], group["nesterov"], False)


class Muon(_Operations):
    """Muon on matrices, AdamW on vectors and embeddings, with the same learning rate.

    Args:
        unit: what is orthogonalised: "matrix" or "head".
    """

    _name = "muon"

    def __init__(self, params, lr=1e-3, momentum=0.95, nesterov=True, unit="matrix", betas=(0.9, 0.999), eps=1e-8,
                 weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov, unit=unit, betas=betas, eps=eps,
                                      weight_decay=weight_decay))

    def _configure(self, options, group):
        options.set_adamw(*group["betas"], group["eps"])
        options.set_muon(group["momentum"], group["nesterov"], group["unit"])


class Shampoo(_Operations):
    """Shampoo with RMSprop grafting on matrices, AdamW on vectors and embeddings.

    Args:
        block: most elements on a side of a tile.
        every: steps from root to root.
    """

    _name = "shampoo"

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), epsilon=1e-6, block=1024, every=10, eps=1e-8,
                 weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, betas=betas, epsilon=epsilon, block=block, every=every, eps=eps,
                                      weight_decay=weight_decay))

    def _configure(self, options, group):
        options.set_adamw(*group["betas"], group["eps"])
        options.set_shampoo(*group["betas"], group["epsilon"], group["block"], group["every"])
