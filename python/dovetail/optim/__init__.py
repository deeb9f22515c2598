"""Optimizers that run Dovetail's update operations on the main weights.

Ordinary torch optimizers of a model that fully_shard has sharded: param_groups, LR schedulers, state_dict. A unit that
an operation needs whole (a matrix for Muon, a tile for Shampoo) is assembled at its owner where shards cut it; nothing
else travels. `Composed` gives groups different ones, `Operation` is for one's own.
"""

from ._composed import Composed
from ._named import SGD, AdamW, AdamW8bit, Muon, Shampoo
from ._operation import Operation, Operations, Run, Step

__all__ = ["AdamW", "AdamW8bit", "Composed", "Muon", "Operation", "Operations", "Run", "SGD", "Shampoo", "Step"]
