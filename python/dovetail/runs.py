"""Runs of a row-major tensor: the integer arithmetic of shards that are intervals of elements. No tensors here."""

import math
from collections.abc import Sequence

Interval = tuple[int, int]
Box = tuple[tuple[int, ...], tuple[int, ...], int]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`, as torch computes them (0 counts as 1)."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def check_intervals(intervals: Sequence[Sequence[int]], numel: int) -> tuple[Interval, ...]:
    """The intervals as a tuple of pairs of ints.

    Raises ValueError unless the non-empty ones, sorted, tile [0, numel): every element has exactly one owner.
    """
    clean = tuple((int(begin), int(end)) for begin, end in intervals)
    at = 0
    for begin, end in sorted(run for run in clean if run[0] != run[1]):
        if begin != at or end < begin:
            raise ValueError(f"intervals {clean} do not tile the elements [0, {numel}): [{begin}, {end}) after {at}")
        at = end
    if at != numel:
        raise ValueError(f"intervals {clean} hold {at} elements, the tensor has {numel}")
    return clean


def same_runs(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    """Whether two lists give every rank the same elements; where an empty interval lies says nothing."""
    return canonical(one) == canonical(other)


def canonical(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """The intervals with every empty one written as (0, 0)."""
    return tuple(run if run[0] < run[1] else (0, 0) for run in intervals)


def clipped(intervals: Sequence[Interval], begin: int, length: int) -> tuple[Interval, ...]:
    """What each rank holds of the run [begin, begin + length), counted from the run's first element."""
    def clip(at: int) -> int:
        return min(max(at - begin, 0), length)

    return tuple((clip(first), clip(last)) for first, last in intervals)


def chunk_intervals(shape: Sequence[int], ranks: int) -> tuple[Interval, ...] | None:
    """The intervals of Shard(0): chunks of ceil(rows / ranks) rows, as torch.chunk cuts them; None for shape ()."""
    if not shape:
        return None
    row = math.prod(shape[1:])
    chunks = (chunk(shape[0], ranks, r) for r in range(ranks))
    return tuple((first * row, (first + length) * row) for first, length in chunks)


def chunk(size: int, ranks: int, rank: int) -> Interval:
    """(first, length) of what Shard gives a rank of a dimension of `size`: chunks of ceil(size / ranks)."""
    each = -(-size // ranks)
    first = min(rank * each, size)
    return first, min(each, size - first)


def boxes(begin: int, end: int, shape: Sequence[int]) -> list[Box]:
    """The run [begin, end) cut into boxes: at most 2 * ndim - 1 of them, none for an empty run.

    A box is (offsets, sizes, first element): its elements are themselves a run that starts at `first element` of the
    whole tensor. Checkpoints describe shards by boxes.
    """
    if begin >= end:
        return []
    shape = tuple(shape)
    if not shape:
        return [((), (), begin)]
    row = math.prod(shape[1:])
    found: list[Box] = []

    def part_of_row(index: int, first: int, last: int) -> None:
        for offsets, sizes, start in boxes(first, last, shape[1:]):
            found.append(((index, *offsets), (1, *sizes), index * row + start))

    first_whole, end_whole = -(-begin // row), end // row
    if first_whole > end_whole:
        part_of_row(end_whole, begin - end_whole * row, end - end_whole * row)
        return found
    if begin < first_whole * row:
        part_of_row(first_whole - 1, begin - (first_whole - 1) * row, row)
    if first_whole < end_whole:
        offsets = (first_whole, *(0 for _ in shape[1:]))
        found.append((offsets, (end_whole - first_whole, *shape[1:]), first_whole * row))
    if end > end_whole * row:
        part_of_row(end_whole, 0, end - end_whole * row)
    return found
