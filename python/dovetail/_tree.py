"""Tensors in what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class Tree:
    """A structure taken apart: what torch's pytree knows, and dataclasses, as torch's fully_shard looks into them.

    Attributes:
        tensors: all tensors of it, in order; to be replaced in place.
    """

    def __init__(self, value: Any):
        self._flat, self._spec = tree_flatten(value)
        self._inner: dict[int, Tree] = {}
        self.tensors: list[torch.Tensor] = []
        for i, x in enumerate(self._flat):
            if isinstance(x, torch.Tensor):
                self.tensors.append(x)
            elif dataclasses.is_dataclass(x) and not isinstance(x, type):
                inner = Tree({f.name: getattr(x, f.name) for f in dataclasses.fields(x) if hasattr(x, f.name)})
                if inner.tensors:
                    self._inner[i] = inner
                    self.tensors += inner.tensors

    def put_together(self) -> Any:
        """The same structure with `tensors`; of dataclasses those are copies in which any is another one."""
        return self._with(iter(self.tensors))

    def _with(self, tensors: Iterator[torch.Tensor]) -> Any:
        flat = list(self._flat)
        for i, x in enumerate(flat):
            if isinstance(x, torch.Tensor):
                flat[i] = next(tensors)
            elif i in self._inner:
                inner = self._inner[i]
                now = [next(tensors) for _ in inner.tensors]
                if all(a is b for a, b in zip(now, inner.tensors)):
                    continue  # what a module changes in it is seen outside
                flat[i] = copy.copy(x)
                for name, value in inner._with(iter(now)).items():
                    object.__setattr__(flat[i], name, value)  # of frozen ones too
        return tree_unflatten(flat, self._spec)
