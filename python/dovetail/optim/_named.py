"""The optimizers that come with the engine."""

from __future__ import annotations

from .. import _C
from .._runtime import Runtime
from ._base import EngineOptimizer


class _Named(EngineOptimizer):
    """Groups may differ in ``lr`` and ``weight_decay``; every other option is the same in all groups."""

    _name = ""

    def _configure(self, options: "_C.OptimizerOptions", group: dict) -> None:
        raise NotImplementedError

    def _operations(self, runtime: Runtime) -> "list[_C.UpdateOp]":
        names = {id(slot.param): spec.name for slot, spec in zip(runtime.slots, runtime.specs)}
        options = _C.OptimizerOptions()
        options.name = self._name
        self._configure(options, self.param_groups[0])
        rules = [_C.ParameterRule(names[id(p)], *factors) for group, factors in zip(self.param_groups, self._factors())
                 for p in group["params"]]
        options.set_rules(0.0, True, rules)
        return _C.make_optimizer(options, runtime.specs)

    def _units(self, spec: "_C.TensorSpec", kind: str) -> list[str]:
        return ["element"]

    def _factors(self) -> list[tuple[float, float]]:
        """Of each group, its learning rate as a part of _rate(), and its weight decay."""
        rate = self._rate()
        # To the digits that fp32 has: the ratio of two rates that one schedule multiplies changes by rounding only.
        return [(float(f"{g['lr'] / rate:.7g}") if rate else 1.0, g["weight_decay"]) for g in self.param_groups]

    def _hyperparameters(self):
        first, *others = ({k: g[k] for k in self.defaults if k not in ("lr", "weight_decay")} for g in self.param_groups)
        for number, own in enumerate(others, 1):
            if own != first:
                raise ValueError(f"{type(self).__name__}: group {number}: wanted {first} as in the first group, got {own}")
        return self._factors(), first


class AdamW(_Named):
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

    def _units(self, spec, kind):
        return ["block:256"]


class SGD(_Named):
    """SGD with momentum; weight decay is added to the gradient."""

    _name = "sgd"

    def __init__(self, params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                                      nesterov=nesterov))

    def _configure(self, options, group):
        options.set_sgd(group["momentum"], group["dampening"], group["nesterov"], False)


class _OfMatrices(_Named):
    """Something on matrices, AdamW on vectors and embeddings."""

    def _unit(self) -> str:
        return "matrix"

    def _units(self, spec, kind):
        return ["element" if len(spec.shape) < 2 or kind == "embedding" else self._unit()]


class Muon(_OfMatrices):
    """Muon on matrices, AdamW on vectors and embeddings, with the same learning rate.

    Args:
        unit: what is orthogonalised: "matrix" or "head".
    """

    _name = "muon"

    def __init__(self, params, lr=1e-3, momentum=0.95, nesterov=True, unit="matrix", betas=(0.9, 0.999), eps=1e-8,
                 weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov, unit=unit, betas=betas, eps=eps,
                                      weight_decay=weight_decay))

    def _unit(self):
        return self.param_groups[0]["unit"]

    def _configure(self, options, group):
        options.set_adamw(*group["betas"], group["eps"])
        options.set_muon(group["momentum"], group["nesterov"], group["unit"])


class Shampoo(_OfMatrices):
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
