"""What a model's shards are: degrees of sharding and the smallest pieces that no shard boundary cuts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import _C

FORMATS = ("fp32", "bf16")


def _check_kind(owner: object, name: str, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises ValueError unless a field of a dataclass is of a kind; whether its value can be, the planner says."""
    value = getattr(owner, name)
    if not isinstance(value, kind) or isinstance(value, bool) or isinstance(value, int) and abs(value) >= 2**31:
        raise ValueError(f"{type(owner).__name__}: {name}: wanted {wanted}, got {value!r}")


@dataclass(frozen=True)
class Heads:
    """That a weight consists of attention heads: the unit "head" of update operations, and the block "head" of plans.

    Attributes:
        count: of heads, each dimension / count rows or columns; divides the dimension.
        dim: that they lie along: 0, runs of rows (q, k and v projections), or 1, runs of columns (the output
            projection).

    Raises:
        ValueError: for what is no number; from fully_shard, naming the parameter, where they do not fit its shape.
    """

    count: int
    dim: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "dim"):
            _check_kind(self, name, int, "a whole number")

    def apply(self, spec: _C.TensorSpec) -> None:
        if self.dim not in range(min(2, len(spec.shape))) or self.count < 1 or spec.shape[self.dim] % self.count:
            raise ValueError(f"units: {spec.name}: wanted a number of heads that divides a dimension, 0 or 1, of its "
                             f"shape {spec.shape}, got {self}")
        spec.set_heads(self.count, self.dim)


@dataclass(frozen=True)
class Nodes:
    """Named parts of a fused weight: a unit of update operations.

    Attributes:
        name: of the unit: "qkv".
        edges: ascending from 0 to the size of the dimension: (0, 64, 80, 96).
        dim: that the parts lie along, 0 or 1.

    Raises:
        ValueError: for another kind of value; from fully_shard, naming the parameter, where they do not fit its shape.
    """

    name: str
    edges: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        _check_kind(self, "name", str, "the name of a unit")
        _check_kind(self, "edges", (tuple, list), "whole numbers, ascending from 0")
        for edge in self.edges:
            if not isinstance(edge, int) or isinstance(edge, bool):
                raise ValueError(f"Nodes: edges: wanted whole numbers, ascending from 0, got {self.edges!r}")
        _check_kind(self, "dim", int, "a whole number")

    def apply(self, spec: _C.TensorSpec) -> None:
        spec.add_nodes(self.name, self.dim, list(self.edges))


@dataclass(frozen=True)
class Plan:
    """How parameters, gradients and optimizer state are sharded over the ranks of a mesh.

    Attributes:
        zero1: ranks over which main weights and optimizer state are sharded; 0: all of a 1-D mesh, those of the second
            dimension of a 2-D mesh. Divides the number of ranks: the others hold copies.
        zero2: ranks over which gradients are sharded between the passes of a step; 0: as zero1. Divides zero1. 1: they
            are whole on every rank, and passes without communication need no further memory.
        zero3: ranks over which runtime parameters are sharded; 0: as zero2. Divides zero2. 1: they are whole on every
            rank, and nothing is gathered in a pass.
        block: what no shard boundary cuts: "element", "row", "32-row", "128-row", "head", "expert" or "matrix".
        boundary: "block", or "unit" to pad so that no unit of the update is cut.
        segments: most runs of memory that a unit is split into, so that large blocks waste less padding: 1 to 3.
        alignment: elements, at least 1; tensors, and boundaries inside them, lie at multiples of it. AdamW8bit wants
            256.
        prefetch: units gathered ahead of the one that computes; 0: none.
        pending_reductions: reductions left under way while the next unit computes; -1: as suits the transport.

    Raises:
        ValueError: for another kind of value; from fully_shard for one that cannot be. Both name the option, what was
            wanted and what was got.
    """

    zero1: int = 0
    zero2: int = 0
    zero3: int = 0
    block: str = "element"
    boundary: str = "block"
    segments: int = 1
    alignment: int = 64
    prefetch: int = 1
    pending_reductions: int = -1

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in ("block", "boundary"):
                _check_kind(self, field.name, str, "a name")
            else:
                _check_kind(self, field.name, int, "a whole number")

    def options(self, world: int, format: str = "fp32", sharded: int = 0) -> _C.PlanOptions:
        """The same for the C++ planner, with the degrees filled in for `world` ranks, of which `sharded` share one copy
        where zero1 does not say.

        Raises:
            ValueError: for an option that cannot be, naming it.
        """
        if format not in FORMATS:
            raise ValueError(f"format: wanted one of {', '.join(FORMATS)}, got {format!r}")
        zero1 = self.zero1 or sharded or world
        zero2 = self.zero2 or zero1
        zero3 = self.zero3 or zero2
        o = _C.PlanOptions()
        o.world = world
        o.format = format
        o.set_degrees(zero1, zero2, zero3)
        o.set_block(self.block)
        o.set_boundary(self.boundary)
        o.segments = self.segments
        o.alignment = self.alignment
        o.prefetch = self.prefetch
        o.pending_reductions = self.pending_reductions
        o.validate()
        return o
