"""Policies of fully_shard, with the names and fields that torch's fully_shard has."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit's passes; main weights stay in the parameters' own dtype.

    Attributes:
        param_dtype: of runtime parameters and of the gradients that kernels write: torch.float32, torch.bfloat16 or
            None (that of the parameters).
        reduce_dtype: accepted for compatibility: gradients travel in the dtype that kernels wrote and are always summed
            in fp32, which gives what torch.float32 gives and never less than torch.bfloat16.
        output_dtype: floating-point outputs of the unit's forward are cast to it; None: they are left as they are.
        cast_forward_inputs: whether floating-point inputs of the unit's forward are cast to param_dtype.

    Raises:
        ValueError: from fully_shard, for another param_dtype or reduce_dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass
class OffloadPolicy:
    """No offloading: the only choice on a CPU mesh, whichever class is used."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Main weights, gradients and optimizer state on the CPU, where a CPU mesh has them in any case.

    Attributes:
        pin_memory: of no effect on a CPU mesh.
    """

    pin_memory: bool = True
