"""Sharded data-parallel training of PyTorch modules on Dovetail's engine.

    from dovetail import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

takes the place of ``from torch.distributed.fsdp import fully_shard``.
"""

import torch  # first: the C++ module finds torch's libraries loaded

from . import optim
from ._C import CommError, ConfigError, Error, FileError, PlanError, StateError
from ._fully_shard import FSDPModule, UnshardHandle, fully_shard
from ._runtime import close_worlds, set_deadline
from .plan import Plan
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .ragged import Ragged, ShardedTensor

__all__ = [
    "CPUOffloadPolicy", "CommError", "ConfigError", "Error", "FSDPModule", "FileError", "MixedPrecisionPolicy",
    "OffloadPolicy", "Plan", "PlanError", "Ragged", "ShardedTensor", "StateError", "UnshardHandle", "close_worlds",
    "fully_shard", "optim", "set_deadline",
]
