"""What options of optimizers can be: checked when a group is added, and before every step, as they may change."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch

# What would change an update and is not there: of torch's optimizers, and in groups that they saved.
_ABSENT = ("amsgrad", "maximize")


def number(value: Any) -> float | None:
    """Of a number, or of a tensor with one, as torch's learning rates may be; None of anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def _within(least: float, most: float, open_below: bool = False, open_above: bool = False) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        x = number(value)
        return (x is not None and (least < x if open_below else least <= x)
                and (x < most if open_above else x <= most))

    return fits


def _whole(least: int, most: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= value <= most


_LARGEST = torch.finfo(torch.float32).max
_decay = _within(0, 1, open_above=True)
_Check = tuple[str, Callable[[Any], bool]]
_LIMITS: dict[str, _Check] = {
    "lr": ("a number of at least 0 that fp32 holds", _within(0, _LARGEST)),
    "weight_decay": ("a number of at least 0 that fp32 holds", _within(0, _LARGEST)),
    "betas": ("two numbers, each at least 0 and below 1",
              lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_decay, value))),
    "eps": ("a positive number that fp32 holds", _within(2.0**-149, _LARGEST)),
    "momentum": ("a number of at least 0 and below 1", _decay),
    "dampening": ("a number from 0 to 1", _within(0, 1)),
    "nesterov": ("True or False", lambda value: isinstance(value, bool)),
    "unit": ("the name of a unit", lambda value: isinstance(value, str) and value != ""),
    "epsilon": ("a number above 0 and below 1", _within(0, 1, open_below=True, open_above=True)),
    "block": ("a whole number from 1 to 32768", _whole(1, 32768)),
    "every": ("a whole number of at least 1", _whole(1, 2**31 - 1)),
}


def check_values(who: str, group: dict[str, Any], options: Iterable[str]) -> None:
    """Raises ValueError for an option that cannot be.

    Args:
        who: names optimizer and group in errors.
        options: those that the group's optimizer has.
    """
    for name in options:
        if name not in _LIMITS:
            continue
        wanted, fits = _LIMITS[name]
        if name not in group:
            raise ValueError(f"{who}: {name}: wanted {wanted}, got none")
        if not fits(group[name]):
            raise ValueError(f"{who}: {name}: wanted {wanted}, got {group[name]!r}")
    if "dampening" in options:
        momentum, dampening, nesterov = group["momentum"], group["dampening"], group["nesterov"]
        if dampening and not momentum:
            raise ValueError(f"{who}: dampening: wanted 0, or momentum above 0, got {dampening!r}")
        if nesterov and (dampening or not momentum):
            raise ValueError(f"{who}: nesterov: wanted momentum above 0 and dampening 0, got {momentum!r} and "
                             f"{dampening!r}")
    for name in _ABSENT:
        if name not in options and group.get(name):
            raise ValueError(f"{who}: {name}: wanted False, since it is not there, got {group[name]!r}")


def check_words(who: str, given: Iterable[str], options: Iterable[str]) -> None:
    """Raises ValueError for a word in a group that is another optimizer's option, or nearly one of these. Others are
    the user's own, as in torch's groups."""
    options = sorted(options)
    for name in given:
        if name not in options and (name in _LIMITS or difflib.get_close_matches(str(name), options, 1, 0.85)):
            raise ValueError(f"{who}: wanted options {options}, got {name!r}")
