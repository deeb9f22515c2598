"""Update operations of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from .. import _C
from .._runtime import Runtime
from ._base import EngineOptimizer


@dataclass(frozen=True)
class Step:
    """Numbers of one optimizer step, the same on all ranks.

    Attributes:
        number: 1 in the first step.
        lr: of the parameter's group.
        weight_decay: of the parameter's group; 0 where it has none.
    """

    number: int
    lr: float
    weight_decay: float


@dataclass(frozen=True)
class Run:
    """What one call works on.

    Attributes:
        name: of the parameter.
        shape: of the whole parameter; of what this rank has of it where tensor parallelism splits it.
        first: number of the run's first element in the row-major tensor of that shape.
        weight: fp32, to be changed in place: [n], a run of elements, blocks or rows; or [rows, columns], a unit that
            was assembled.
        grad: the same shape, fp32: the mean over ranks, as clipped. To be read.
        state: the operation's fields by name, the same shape, fp32, to be changed in place.
    """

    name: str
    shape: tuple[int, ...]
    first: int
    weight: torch.Tensor
    grad: torch.Tensor
    state: dict[str, torch.Tensor]


class Operation:
    """An update operation: which parts of a parameter it needs whole, what it keeps, and what it does with them.

        class Lion(Operation):
            def __init__(self, beta1=0.9, beta2=0.99):
                self.beta1, self.beta2 = beta1, beta2

            def state(self, name, shape):
                return {"momentum": 0.0}

            def run(self, run, step):
                m = run.state["momentum"]
                run.weight.mul_(1 - step.lr * step.weight_decay)
                run.weight.sub_(step.lr * torch.lerp(run.grad, m, self.beta1).sign_())
                m.lerp_(run.grad, 1 - self.beta2)

        optimizer = Operations(model.parameters(), [Lion()], lr=1e-4, weight_decay=0.1)

    What `run` computes for a unit may depend on that unit and on nothing else: then any number of ranks and any degrees
    give the same weights. It is called without autograd, by one thread, for what this rank owns. Public attributes are
    hyperparameters: they are compared across ranks, and may be changed between steps.
    """

    def applies_to(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the operation updates a parameter."""
        return True

    def unit(self, name: str, shape: tuple[int, ...]) -> str:
        """The smallest part that must be whole in a call: "element", "block:N" (N elements), "row", "matrix",
        "tile:RxC", "head", "expert", or a node that fully_shard(units=) names. "block" and "row" need a plan that does
        not cut them (Plan(block=..., alignment=...)); "matrix", "tile" and nodes are assembled at an owner."""
        return "element"

    def state(self, name: str, shape: tuple[int, ...]) -> dict[str, float]:
        """Fields with one fp32 value per element, and what they begin with. "weight" and "grad" are taken."""
        return {}

    def cost(self, shape: tuple[int, ...]) -> float:
        """Floating-point operations for a unit of `shape`, [rows, columns], by which owners are balanced."""
        rows, columns = shape
        return float(rows * columns)

    def run(self, run: Run, step: Step) -> None:
        """Updates one run or unit in place. Where it raises on any rank, step() raises on all, and weights and state
        are updated in part."""
        raise NotImplementedError


class Operations(EngineOptimizer):
    """An optimizer of one's own operations, in order: a later one sees what an earlier one has written.

    Args:
        operations: for every parameter at least one must apply. State fields of the same name are shared.
        lr, weight_decay: per group, handed to the operations.

    Raises:
        ValueError: without operations, or for an object that is none; at the first step for a unit that cannot be, or
            a parameter to which none applies, naming it.
    """

    def __init__(self, params: ParamsT, operations: Iterable[Operation], lr: float = 1e-3,
                 weight_decay: float = 0.0) -> None:
        if not isinstance(operations, Iterable):
            raise ValueError(f"Operations: operations: wanted a list of them, got {type(operations).__name__}")
        operations = list(operations)
        for op in operations:
            if not isinstance(op, Operation):
                raise ValueError(f"Operations: wanted dovetail.optim.Operation objects, got {type(op).__name__}")
        if not operations:
            raise ValueError("Operations: wanted at least one operation, got an empty list")
        self.operations = operations
        self._failures: list[Exception] = []  # of run() in this step, on this rank
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    def _operations(self, runtime: Runtime) -> list[_C.UpdateOp]:
        groups = {spec.name: group for group in self.param_groups for p in group["params"]
                  for slot, spec in zip(runtime.slots, runtime.specs) if slot.param is p}
        rates = [(g["lr"], g["weight_decay"]) for g in self.param_groups]
        return [_C.make_operation(type(op).__name__, f"{type(op).__name__} {_options(op)} {rates}",
                                  _Adapter(op, groups, self._failures))
                for op in self.operations]

    def _units(self, spec: _C.TensorSpec, kind: str) -> list[str]:
        shape = tuple(spec.shape)
        return [op.unit(spec.name, shape) for op in self.operations if op.applies_to(spec.name, shape)]

    def _hyperparameters(self) -> Any:
        return tuple(str(_options(op)) for op in self.operations)

    def _after_step(self, runtime: Runtime) -> None:
        """Raises on all ranks where run() has raised on one: those that went on would wait for it in the next pass."""
        failure = self._failures[0] if self._failures else None
        self._failures.clear()
        failed = torch.tensor([float(failure is not None)])
        meshes = [mesh for mesh in runtime.all_ranks() if mesh.size() > 1]
        for mesh in meshes:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=mesh.get_group())
        if not failed:
            return
        said = [] if failure is None else [f"rank {dist.get_rank()}: {type(failure).__name__}: {failure}"]
        for mesh in meshes:
            everyone: list[list[str]] = [[] for _ in range(mesh.size())]
            dist.all_gather_object(everyone, said, group=mesh.get_group())
            said = [what for of_rank in everyone for what in of_rank]
        if failure is not None:
            raise failure
        raise RuntimeError("Operations.step: run() of an operation has raised on another rank, and not here: "
                           f"{said[0]}. Weights and state are updated in part")


def _options(op: Operation) -> dict[str, Any]:
    return {k: v for k, v in sorted(vars(op).items()) if not k.startswith("_")}


class _Adapter:
    """What the C++ side calls."""

    def __init__(self, op: Operation, groups: dict[str, dict[str, Any]], failures: list[Exception]):
        self.op, self.groups, self.failures = op, groups, failures

    def _applies_to(self, spec: _C.TensorSpec) -> bool:
        return bool(self.op.applies_to(spec.name, tuple(spec.shape)))

    def _unit(self, spec: _C.TensorSpec) -> tuple[str, int, int]:
        asked = self.op.unit(spec.name, tuple(spec.shape))
        if not isinstance(asked, str):
            raise ValueError(f"{type(self.op).__name__}.unit: {spec.name}: wanted the name of a unit, got "
                             f"{asked!r}")
        kind, _, size = asked.partition(":")
        try:
            if kind == "block":
                return kind, int(size), 0
            if kind == "tile":
                rows, columns = size.split("x")
                return kind, int(rows), int(columns)
        except ValueError:
            raise ValueError(f'{type(self.op).__name__}.unit: wanted "block:N" or "tile:RxC", got {asked!r}') from None
        return kind, 0, 0

    def _state(self, spec: _C.TensorSpec) -> list[tuple[str, float]]:
        fields = self.op.state(spec.name, tuple(spec.shape))
        if not isinstance(fields, dict) or not all(isinstance(name, str) and isinstance(value, (int, float))
                                                   for name, value in fields.items()):
            raise ValueError(f"{type(self.op).__name__}.state: {spec.name}: wanted a number by name of field, got "
                             f"{fields!r}")
        return list(fields.items())

    def _cost(self, spec: _C.TensorSpec, rows: int, columns: int) -> float:
        return float(self.op.cost((rows, columns)))

    def _run(self, spec: _C.TensorSpec, fields: list[tuple[str, torch.Tensor]], first: int, number: int,
             grad_scale: float) -> None:
        tensors = dict(fields)
        weight, grad = tensors.pop("weight"), tensors.pop("grad")
        if grad_scale != 1:
            grad = grad * grad_scale
        group = self.groups[spec.name]
        step = Step(number, group["lr"], group["weight_decay"])
        if self.failures:
            return  # the step is lost: all ranks are told at its end, which they come to together
        try:
            with torch.no_grad():
                self.op.run(Run(spec.name, tuple(spec.shape), first, weight, grad, tensors), step)
        except Exception as error:
            self.failures.append(error)
