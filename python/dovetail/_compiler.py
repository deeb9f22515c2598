"""torch's compiler, kept off what it cannot see through, and not loaded to that end: it takes some 30 MiB and a second
in every rank (benchmarks/results/heap.txt), for nothing where nobody compiles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def keep_off(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch._dynamo.disable: compiled code calls the function as it is, and nothing in it is compiled."""
    if is_loaded():
        return torch._dynamo.disable(function)
    kept_off = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal kept_off
        if kept_off is None:
            if not is_loaded():
                return function(*args, **kwargs)
            kept_off = torch._dynamo.disable(function)
        return kept_off(*args, **kwargs)

    call._torchdynamo_disable = True  # the compiler's own mark: code that it compiles does not look into `call` either
    return call


def plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's without the decorator that loads the compiler to keep it off, unless it is loaded."""
    return method if is_loaded() else getattr(method, "__wrapped__", method)
