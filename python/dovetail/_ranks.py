"""Ranks of a mesh: dovetail's world of them, and the meshes over which main weights are sharded."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _C

_worlds: dict = {}
_meshes: dict = {}
_pairs: dict = {}  # 2-D meshes by their two dimensions
_counts: dict = {}  # per list of ranks: those outside of it make no such world, and do not count it
_seen: "weakref.WeakValueDictionary[int, DeviceMesh]" = weakref.WeakValueDictionary()  # by id: several are equal
_engines: "weakref.WeakSet" = weakref.WeakSet()  # what has an attribute `engine`
_deadline = 300.0


def set_deadline(seconds: float) -> None:
    """How long a rank waits for others until a CommError names them, also for them to come together: 300 s unless set.
    Counts for worlds that are made from now on: one for each set of ranks, at the first forward of a root on them.

    Raises:
        ValueError: unless the number is positive.
    """
    global _deadline
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise ValueError(f"deadline: wanted a positive number of seconds, got {seconds!r}")
    _deadline = float(seconds)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The mesh's ranks in the default process group, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def index_in(mesh: DeviceMesh) -> int:
    """This rank's number among them."""
    return ranks_of(mesh).index(dist.get_rank())


def keep_track_of(mesh: DeviceMesh) -> None:
    """Of a mesh whose process groups are to be let go at the end of the process."""
    _seen[id(mesh)] = mesh


def keep_track_of_engine(owner: Any) -> None:
    """Of what has an attribute `engine`, which a child of fork() must not take apart."""
    _engines.add(owner)


def world_of(mesh: DeviceMesh, comm: str) -> "_C.Group":
    """Dovetail's ranks of a mesh, which meet in the store of torch's process group. Collective at the first call."""
    ranks = ranks_of(mesh)
    default = dist.distributed_c10d._get_default_group()
    key = (id(default), ranks, comm)
    if key not in _worlds:
        store = dist.distributed_c10d._get_default_store()
        number = next(_counts.setdefault(ranks, itertools.count()))
        name = f"dovetail-{number}-{'.'.join(map(str, ranks))}"
        # The group is kept so that no other gets its id.
        _worlds[key] = (default, _C.make_world(store, index_in(mesh), len(ranks), name, comm, _deadline))
    return _worlds[key][1]


def shard_mesh(mesh: DeviceMesh, zero1: int) -> DeviceMesh:
    """The 1-D mesh of the `zero1` ranks that hold one copy of the main weights, this rank's: consecutive ranks of
    `mesh`, a dimension of it where one has them. Collective over them at the first call."""
    ranks = ranks_of(mesh)
    first = index_in(mesh) // zero1 * zero1
    mine = ranks[first:first + zero1]
    if mesh.ndim == 1 and zero1 == len(ranks):
        return mesh
    if mesh.ndim == 2 and mesh.mesh_dim_names and zero1 == mesh.size(1):
        return mesh[mesh.mesh_dim_names[1]]
    return _mesh_of(mine)


def flat_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh of all its ranks. Collective over them at the first call."""
    return mesh if mesh.ndim == 1 else _mesh_of(ranks_of(mesh))


def _mesh_of(ranks: tuple[int, ...]) -> DeviceMesh:
    default = dist.distributed_c10d._get_default_group()
    key = (id(default), ranks)
    if key not in _meshes:
        group = dist.new_group(list(ranks), use_local_synchronization=True)
        _meshes[key] = (default, DeviceMesh.from_group(group, "cpu"))
        keep_track_of(_meshes[key][1])
    return _meshes[key][1]


def concatenated(one: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """The 2-D mesh of two 1-D slices of one mesh, as torch's fully_shard makes it.

    Raises:
        ValueError: where they are no slices of one mesh, or of the same dimension.
    """
    default = dist.distributed_c10d._get_default_group()
    key = (id(default), one, other)
    if key not in _pairs:
        if one.ndim != 1 or other.ndim != 1 or not one.mesh_dim_names or not other.mesh_dim_names:
            raise ValueError('wanted two dimensions of one mesh with names, as mesh["dp"] and mesh["tp"]')
        if set(one.mesh_dim_names) & set(other.mesh_dim_names):
            raise ValueError(f"wanted another dimension, got {one.mesh_dim_names[0]} of both")
        try:
            _pairs[key] = (default, DeviceMesh._concatenate([one, other]))
        except RuntimeError as error:
            raise ValueError(f'wanted two dimensions of one mesh, as mesh["dp"] and mesh["tp"]: {error}') from None
    return _pairs[key][1]


def close_worlds() -> None:
    """Takes leave of all ranks, as soon as no model uses them any more; the end of the process does it too. Called on
    all ranks alike; models that start from here on meet in new worlds."""
    _worlds.clear()
    _meshes.clear()
    _pairs.clear()


def _leave() -> None:
    """At the end of the process. destroy_process_group() does not reach the groups that meshes hold: their threads
    would still let tensors of the last operation go when the interpreter is gone, and abort the process."""
    close_worlds()
    for mesh in list(_seen.values()):
        for holder in (mesh, getattr(mesh, "_root_mesh", None)):
            getattr(holder, "_pg_registry", {}).clear()


def _in_child() -> None:
    """In a child of fork() threads of worlds are missing, and connections are the parent's: what would wait for the one
    or close the other at the end stays."""
    atexit.unregister(_leave)
    for held in [world for _, world in _worlds.values()] + [owner.engine for owner in _engines]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


atexit.register(_leave)
os.register_at_fork(after_in_child=_in_child)
