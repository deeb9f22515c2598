"""Sharded data-parallel training of PyTorch modules on Dovetail's engine.

    from dovetail import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

takes the place of ``from torch.distributed.fsdp import fully_shard``.
"""

import torch  # first: the C++ module finds torch's libraries loaded

from . import checkpoint, memory, nn, optim
from ._C import CommError, ConfigError, Error, FileError, PlanError, StateError
from ._fsdp_module import FSDPModule, UnshardHandle
from ._fully_shard import fully_shard, register_fsdp_forward_method
from ._ranks import close_worlds, set_deadline
from .plan import Heads, Nodes, Plan
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .ragged import Ragged, ShardedTensor

__all__ = [
    "CPUOffloadPolicy", "CommError", "ConfigError", "Error", "FSDPModule", "FileError", "Heads",
    "MixedPrecisionPolicy", "Nodes", "OffloadPolicy", "Plan", "PlanError", "Ragged", "ShardedTensor", "StateError",
    "UnshardHandle", "checkpoint", "close_worlds", "fully_shard", "memory", "nn", "optim",
    "register_fsdp_forward_method", "set_deadline",
]
