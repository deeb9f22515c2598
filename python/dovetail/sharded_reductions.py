"""Reductions of sharded tensors to one number.

Each rank reduces its shard, the ranks' numbers are gathered and combined in mesh order, so that every rank has the
same bits; over a second mesh dimension those of its parts, or of the first of its copies. An empty shard takes part in
the gather and counts for nothing.
"""

import math

import torch
from torch.distributed.tensor import DTensor

from .sharded import ShardedTensor, all_gather, gather, replicated, same_elements
from .sharded_operands import part, whole_everywhere, whole_of

aten = torch.ops.aten
_NAMES = ("sum", "mean", "prod", "any", "all", "max", "min", "amax", "amin", "norm", "linalg_vector_norm")


def reduces_to_one(func) -> bool:
    """Whether `func` may reduce to one number; `reduce` says whether a call does."""
    return func._schema.name.removeprefix("aten::") in _NAMES and not func._schema.is_mutable


def reduce(func, values: dict) -> DTensor | None:
    """The 0-dim Replicate result of a reduction over all elements; None for one over some dimensions.

    values: the arguments by name. Elements of less than 32 bits are reduced in fp32 and rounded once.
    """
    t, name = values.pop("self"), func._schema.name.removeprefix("aten::")
    dims = values.pop("dim", None)
    if not isinstance(t, ShardedTensor) or values.pop("keepdim", False) or dims not in (None, [], ()):
        return None
    if name in ("norm", "linalg_vector_norm"):
        order = values.pop("ord", values.pop("p", 2))
        return norms([t], 2 if order is None else order, values.pop("dtype", None))[0]
    dtype = values.pop("dtype", None)
    if name in ("max", "min"):
        name = "a" + name
    operation = getattr(torch, name)
    if t.numel() == 0:  # torch's own answer, or its own error
        whole = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        return replicated(operation(whole) if dtype is None else operation(whole, dtype=dtype), t.device_mesh)
    local = t._local_tensor if dtype is None else t._local_tensor.to(dtype)
    result_dtype = operation(local.new_zeros(1)).dtype
    local = _widened(local)
    partial = torch.sum if name == "mean" else operation
    number = partial(local) if local.numel() else partial(local.new_zeros(1))
    total = _combined(number.reshape(1), t, partial)
    if name == "mean":
        total = total / t.numel()
    return replicated(total.to(result_dtype), t.device_mesh)


def norms(self: list, ord=2, dtype: torch.dtype | None = None) -> list[DTensor]:
    """The vector norms of a list of tensors, one gather for all that are sharded; the others take the stock way.

    ord: any order that torch.linalg.vector_norm has. Of a tensor without elements 0, or infinity for a
    negative order.
    """
    order = float(ord)
    results: list = [None] * len(self)
    groups: dict = {}
    for i, t in enumerate(self):
        if isinstance(t, ShardedTensor):
            groups.setdefault((t.device_mesh, t.dtype, t.device), []).append(i)
    stock = [i for i, t in enumerate(self) if not isinstance(t, ShardedTensor)]
    if stock:
        for i, norm in zip(stock, torch._foreach_norm([self[i] for i in stock], ord, dtype)):
            results[i] = norm
    for (mesh, _, _), members in groups.items():
        shards = [_widened(self[i]._local_tensor if dtype is None else self[i]._local_tensor.to(dtype))
                  for i in members]
        # An empty shard has the norm that changes no other: torch raises for some orders of an empty tensor.
        mine = torch.full((len(shards),), 0. if order >= 0 else math.inf, dtype=shards[0].abs().dtype,
                          device=shards[0].device)
        held = [column for column, shard in enumerate(shards) if shard.numel()]
        if held:
            mine[held] = torch.stack(torch._foreach_norm([shards[column] for column in held], order))
        total = _norm_of_norms(torch.stack(all_gather(mine, [len(mine)] * mesh.size(0), mesh)), order)
        if mesh.ndim > 1:
            table = torch.stack(all_gather(total, [len(total)] * mesh.size(1), mesh, 1))
            split = torch.tensor([self[i].split_dim is not None for i in members], device=total.device)
            total = torch.where(split, _norm_of_norms(table, order), table[0])
        real = torch.empty(0, dtype=dtype or self[members[0]].dtype).abs().dtype
        for i, norm in zip(members, total.to(real).unbind()):
            results[i] = replicated(norm, mesh)
    return results


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """torch.equal: the same answer on every rank. Tensors in two layouts are gathered."""
    if one.shape != other.shape:
        return False
    like, operand = (one, other) if isinstance(one, ShardedTensor) else (other, one)
    if not isinstance(operand, DTensor) or operand.device_mesh != like.device_mesh:
        part(operand, like, aten.equal.default)  # says why not
        return torch.equal(gather(like), operand)
    here = whole_everywhere(operand) or same_elements(operand, like)
    mesh = like.device_mesh
    if mesh.ndim > 1:  # on the ranks of some parts runs may be the same by chance
        here = all(t.item() for t in all_gather(torch.tensor([here], device=like.device), [1] * mesh.size(1), mesh, 1))
    if not here:
        return torch.equal(gather(like), whole_of(operand))
    same = torch.equal(like._local_tensor, part(operand, like, aten.equal.default))
    return bool(_combined(torch.tensor([same], device=like.device), like, torch.all))


def unscale(self: list, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """GradScaler's step over gradients of both kinds; found_inf, [1], becomes 1 everywhere when one is not finite."""
    sharded = [t for t in self if isinstance(t, ShardedTensor)]
    stock = [t for t in self if not isinstance(t, ShardedTensor)]
    scale = aten._amp_foreach_non_finite_check_and_unscale_
    if stock:
        scale(stock, found_inf, inv_scale)
    flag = whole_of(found_inf) if isinstance(found_inf, DTensor) else found_inf
    factor = whole_of(inv_scale) if isinstance(inv_scale, DTensor) else inv_scale
    scale([t._local_tensor for t in sharded], flag, factor)
    for mesh in {t.device_mesh for t in sharded}:
        for dim in range(mesh.ndim):
            flag.copy_(torch.stack(all_gather(flag.reshape(1), [1] * mesh.size(dim), mesh, dim)).amax())


def _widened(t: torch.Tensor) -> torch.Tensor:
    return t.float() if t.is_floating_point() and t.element_size() < 4 else t


def _combined(number: torch.Tensor, t: ShardedTensor, combine) -> torch.Tensor:
    """combine() of the numbers, [1] each, of the ranks that hold elements, 1-D in mesh order. A collective."""
    mesh = t.device_mesh
    everyone = all_gather(number, [1] * len(t.intervals), mesh)
    held = [x for x, (begin, end) in zip(everyone, t.intervals) if begin < end]
    total = combine(torch.cat(held) if held else number)
    if mesh.ndim == 1:
        return total
    parts = all_gather(total.reshape(1), [1] * mesh.size(1), mesh, 1)
    if t.split_dim is None:
        return parts[0].reshape(())
    return combine(torch.cat([x for x, shape in zip(parts, t.part_shapes) if shape.numel()] or [number]))


def _norm_of_norms(parts: torch.Tensor, order: float) -> torch.Tensor:
    """[columns] from [ranks, columns]: the norm of a vector from those of its pieces."""
    if order == 0:  # a count
        return parts.sum(0)
    if math.isinf(order):
        return parts.amax(0) if order > 0 else parts.amin(0)
    return torch.linalg.vector_norm(parts, order, dim=0)
