"""Memory of CPU tensors that come and go in every training step."""

from __future__ import annotations

from typing import NamedTuple

from . import _C

__all__ = ["HeapUse", "heap_use", "release_pages", "use_tensor_heap"]

_asked = False  # whether the user has said on or off


class HeapUse(NamedTuple):
    """Bytes."""

    in_use: int       # in tensors
    held: int         # of memory, in tensors or kept for the next
    most_in_use: int  # of in_use, so far


def use_tensor_heap(on: bool = True) -> bool:
    """Says whether new CPU tensors of 128 KiB and more come out of dovetail's heap, which keeps the pages of freed ones
    for the next, fewer than the process is below what it needed at its height lately, and is of huge pages where the
    system has them. malloc gives pages back and faults them in again, one by one, in every step. fully_shard
    switches it on for the process, unless this was called before.

    Returns:
        Whether they do: False where the system has no addresses for a heap (ulimit -v).

    Raises:
        ValueError: for what is no bool.
    """
    global _asked
    if not isinstance(on, bool):
        raise ValueError(f"use_tensor_heap: wanted True or False, got {on!r}")
    _asked = True
    return _switch(on)


def _switch(on: bool) -> bool:
    heap = _C.install_tensor_heap() if on else _C.tensor_heap()
    if heap is None:
        return False
    heap.switch_on(on)
    return on


def use_unless_refused() -> None:
    if not _asked:
        _switch(True)


def heap_use() -> HeapUse | None:
    """What the heap holds, of the whole process; None where there is none."""
    heap = _C.tensor_heap()
    return None if heap is None else HeapUse(*heap.use())


def release_pages() -> None:
    """Gives the memory back that the heap keeps for tensors to come."""
    heap = _C.tensor_heap()
    if heap is not None:
        heap.trim()
