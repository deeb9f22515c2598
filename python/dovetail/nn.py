"""Layers whose weight gradients are written where they are reduced from."""

from __future__ import annotations

import torch

from . import _C

__all__ = ["Linear", "swap_linears"]


class Linear(torch.nn.Linear):
    """torch.nn.Linear, of which the backward pass writes the weight's gradient straight into the engine's buffer: no
    tensor of its own, no copy. In bfloat16 its products are also those of the C++ trainer.

    [..., in_features] becomes [..., out_features]. The same parameters and state dict. Where no engine holds the
    weight it is torch.nn.Linear.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        sink = getattr(self.weight, "_dovetail_sink", None)
        if sink is None or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return _C.linear(input, self.weight, self.bias, sink)


def swap_linears(module: torch.nn.Module) -> torch.nn.Module:
    """Makes every torch.nn.Linear below, and `module` itself, a dovetail.nn.Linear with the same parameters, in place.
    Subclasses stay what they are. To be called before fully_shard.

    Returns:
        `module`.

    Raises:
        ValueError: for what is no module.
    """
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"swap_linears: wanted a module, got {type(module).__name__}")
    for m in module.modules():
        if type(m) is torch.nn.Linear:
            m.__class__ = Linear
    return module
