"""The optimizers that come with the engine."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from .. import _C
from .._runtime import Runtime
from ._base import EngineOptimizer


class _Named(EngineOptimizer):
    """Groups may differ in ``lr`` and ``weight_decay``; every other option is the same in all groups.

    Options that cannot be are a ValueError that names them, when a group is added and, where they were changed, at the
    step.
    """

    _name = ""
    _whole = "element"  # what its operation needs of a parameter whole

    def _configure(self, options: _C.OptimizerOptions, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _operations(self, runtime: Runtime) -> list[_C.UpdateOp]:
        names = {id(slot.param): spec.name for slot, spec in zip(runtime.slots, runtime.specs)}
        options = _C.OptimizerOptions()
        options.name = self._name
        self._configure_all(options)
        options.set_rules(0.0, True, [
            _C.ParameterRule(names[id(p)], *factors, group.get("optimizer", ""))
            for group, factors in zip(self.param_groups, self._factors()) for p in group["params"]])
        return _C.make_optimizer(options, runtime.specs)

    def _configure_all(self, options: _C.OptimizerOptions) -> None:
        self._configure(options, self.param_groups[0])

    def _units(self, spec: _C.TensorSpec, kind: str) -> list[str]:
        return [self._whole]

    def _factors(self) -> list[tuple[float, float]]:
        """Of each group, its learning rate as a part of _rate(), and its weight decay."""
        rate = self._rate()
        # To the digits that fp32 has: the ratio of two rates that one schedule multiplies changes by rounding only.
        return [(float(f"{g['lr'] / rate:.7g}") if rate else 1.0, g["weight_decay"]) for g in self.param_groups]

    def _check_together(self, group: dict[str, Any]) -> None:
        self._shared(self.param_groups + [group])

    def _shared(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The options that all groups have alike."""
        shared = [k for k in self.defaults if k not in ("lr", "weight_decay")]
        first, *others = ({k: tuple(g[k]) if k == "betas" else g[k] for k in shared} for g in groups)
        for number, own in enumerate(others, 1):
            if own != first:
                raise ValueError(f"{type(self).__name__}: group {number}: wanted {first} as in the first group, got "
                                 f"{own}")
        return first

    def _hyperparameters(self) -> Any:
        return self._factors(), self._shared(self.param_groups)


class AdamW(_Named):
    """AdamW with decoupled weight decay, fused: one pass over weights, gradients and moments. torch's formula.

    Steps are counted once for all parameters; torch's counts for each those in which it had a gradient. A parameter
    without one, as of an expert that no rank used, is left alone by both, but its bias corrections differ from then on.
    Where its first gradient comes in step t, its first update is (1 - beta1) / (1 - beta1**t) * sqrt((1 - beta2**t) /
    (1 - beta2)) of torch's: with the default betas between 0.48 (step 12) and 3.2. AdamW8bit has the same.

    State: exp_avg and exp_avg_sq, fp32, of the parameter's shape.

    Args:
        lr: learning rate; also the factor of weight_decay.
        betas: decay of the two moments, each at least 0 and below 1.
        eps: added to the root of the second moment; positive.
        weight_decay: at least 0, of all parameters of the group.
    """

    _name = "adamw"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def _configure(self, options: _C.OptimizerOptions, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        options.set_adamw(beta1, beta2, group["eps"])


class AdamW8bit(AdamW):
    """AdamW whose moments are 8-bit codes with a scale per 256 elements; parameters below 4096 elements keep fp32.

    State: exp_avg_code and exp_avg_sq_code, uint8, of the parameter's shape; exp_avg_scale and exp_avg_sq_scale, fp32,
    [blocks]. Shards must not cut such a block, which is a ValueError at the first step:
    fully_shard(..., plan=Plan(alignment=256)).
    """

    _name = "adam8"
    _whole = "block:256"


class SGD(_Named):
    """SGD with momentum; weight decay is added to the gradient. torch's formula.

    State: momentum_buffer, fp32, of the parameter's shape; none with a momentum of 0.

    Args:
        momentum: at least 0 and below 1.
        dampening: 0 to 1; above 0 only with momentum.
        nesterov: only with momentum and without dampening.
    """

    _name = "sgd"

    def __init__(self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                                      nesterov=nesterov))

    def _configure(self, options: _C.OptimizerOptions, group: dict[str, Any]) -> None:
        options.set_sgd(group["momentum"], group["dampening"], group["nesterov"], False)


class _OfMatrices(_Named):
    """Something on matrices, AdamW on vectors and embeddings."""

    _whole = "matrix"

    def _units(self, spec: _C.TensorSpec, kind: str) -> list[str]:
        if len(spec.shape) < 2 or kind == "embedding":
            return ["element"]
        return [self.param_groups[0].get("unit", self._whole)]


class Muon(_OfMatrices):
    """Muon on matrices, AdamW on vectors and embeddings, with the same learning rate: an update of Muon is scaled by
    0.2 * sqrt(max(rows, columns)), which gives it the size of AdamW's.

    State: momentum, fp32, of a matrix's shape; of the rest that of AdamW.

    Args:
        momentum: at least 0 and below 1.
        unit: what is orthogonalised, [rows, columns] each: "matrix" (of fused experts each one's), "head" or the name
            of Nodes, where fully_shard(units=) says that a weight has them, else the matrix. A ValueError at the first
            step where none has.
        betas, eps: of AdamW.
    """

    _name = "muon"

    def __init__(self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.95, nesterov: bool = True,
                 unit: str = "matrix", betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov, unit=unit, betas=betas, eps=eps,
                                      weight_decay=weight_decay))

    def _configure(self, options: _C.OptimizerOptions, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        options.set_adamw(beta1, beta2, group["eps"])
        options.set_muon(group["momentum"], group["nesterov"], group["unit"])


class Shampoo(_OfMatrices):
    """Shampoo with RMSprop grafting on matrices, AdamW on vectors and embeddings.

    State: graft_sq and shampoo_momentum, fp32, of a matrix's shape; of tile N of [rows, columns] shampoo_left.N,
    shampoo_right.N and their roots, the lower triangle of a symmetric matrix of a side, and shampoo_scale.N, [4].

    Args:
        betas: decay of momentum, and of statistics and squares: each at least 0 and below 1.
        epsilon: of the largest eigenvalue, added to all; above 0 and below 1.
        block: most elements on a side of a tile, 1 to 32768.
        every: steps from root to root, at least 1.
        eps: of AdamW, which has the same betas.
    """

    _name = "shampoo"

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99),
                 epsilon: float = 1e-6, block: int = 1024, every: int = 10, eps: float = 1e-8,
                 weight_decay: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, epsilon=epsilon, block=block, every=every, eps=eps,
                                      weight_decay=weight_decay))

    def _configure(self, options: _C.OptimizerOptions, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        options.set_adamw(beta1, beta2, group["eps"])
        options.set_shampoo(beta1, beta2, group["epsilon"], group["block"], group["every"])
