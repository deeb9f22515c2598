"""What torch operations do to sharded tensors.

| operation | what happens |
|---|---|
| element-wise, in place or not, also over lists (`_foreach_*`, `_fused_*`) | each rank computes its own elements |
| views whose elements are one run: `view`, `w[i]`, `w[a:b]` | a sharded tensor over the same storage |
| other views: `t()`, `w[:, j]`, `expand`; any of split parts | `GatheredView`: a gathered copy that writes through |
| factories of the same shape: `zeros_like`, `new_empty`, ... | a sharded tensor; no communication |
| reductions to one number, `equal`, `item` | one gather of a number per rank; Replicate, the same bits on every rank |
| random fills: `normal_`, `rand_like`, ... | each rank draws the whole tensor and keeps its run |
| anything else | gathers, and runs as Replicate; if it would change a sharded tensor, it raises NotImplementedError |

Operands of an element-wise operation may be sharded in the same layout, Replicate, or have one element. Two layouts,
or a plain tensor of several elements, raise RuntimeError.
"""

import torch
from torch.distributed.tensor import DTensor

from . import sharded_reductions as reductions
from .runs import clipped, row_major_strides
from .sharded import ShardedTensor, gather, replicated
from .sharded_operands import (bind, describe, element_wise, element_wise_list, exchange, exchanged, part,
                               refuse_other_layout, tensors_in, whole_everywhere, whole_of, write_arguments, written)

aten = torch.ops.aten


def dispatch(func, args: tuple, kwargs: dict):
    """The entry: gathered views are exchanged for what they show, and what is written to them goes on to the shards."""
    views = [t for t in tensors_in(args, kwargs) if isinstance(t, GatheredView)]
    if not views:
        return _dispatch(func, args, kwargs)
    for view in views:
        view.refresh()
    touched = written(func, args, kwargs)
    plain_args, plain_kwargs = exchange(GatheredView, GatheredView.stock, args, kwargs)
    out = _dispatch(func, plain_args, plain_kwargs)
    stale = [view for view in views if any(view is t for t in touched)]
    for view in stale:
        view.write_back()
    if stale:
        return touched[0] if len(touched) == 1 else out
    return exchanged(DTensor, views[0].over, out) if func.is_view else out


def _dispatch(func, args: tuple, kwargs: dict):
    if not any(isinstance(t, ShardedTensor) for t in tensors_in(args, kwargs)):  # only gathered views were
        return as_replicate(func, args, kwargs)
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    if element_wise(func):
        return _element_wise(func, args, kwargs)
    if element_wise_list(func):
        return _lists(func, args, kwargs)
    if reductions.reduces_to_one(func):
        out = reductions.reduce(func, bind(func, args, kwargs))
        return as_replicate(func, args, kwargs) if out is None else out
    if func.is_view and isinstance(args[0], ShardedTensor):
        return _view(func, args, kwargs)
    return as_replicate(func, args, kwargs)


def as_replicate(func, args: tuple, kwargs: dict):
    """Gathers what is sharded and runs on the whole, on every rank; the result is Replicate.

    Raises NotImplementedError when `func` would change a sharded tensor, or the shape of any.
    """
    tensors = tensors_in(args, kwargs)
    targets = written(func, args, kwargs)
    for t in targets:
        if isinstance(t, ShardedTensor) or torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} changes {describe(t)} in place and is not element-wise: a rank cannot "
                                      "do its part of it alone. Gather with full_tensor() and write back with copy_()")
    if not all(isinstance(t, ShardedTensor) or whole_everywhere(t) for t in tensors if isinstance(t, DTensor)):
        args, kwargs = exchange(ShardedTensor, lambda t: replicated(gather(t), t.device_mesh), args, kwargs)
        return func(*args, **kwargs)  # torch knows how to go on from Shard and Partial
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    for t in tensors:
        if t.device_mesh != mesh if isinstance(t, DTensor) else t.numel() != 1:
            raise RuntimeError(f"{func}: {describe(t)} among tensors on {mesh}; distribute it there first. (A "
                               "parameter that fully_shard took is whole only while its unit runs: a module that is "
                               "called outside of its unit's forward wants fully_shard of its own)")
    # On plain tensors: every operation is there, also those that DTensor has no rule for.
    args, kwargs = exchange(DTensor, whole_of, args, kwargs)
    out = func(*args, **kwargs)
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    return exchanged(torch.Tensor, lambda t: replicated(t, mesh), out)


def _element_wise(func, args: tuple, kwargs: dict):
    tensors = tensors_in(args, kwargs)
    sharded = [t for t in tensors if isinstance(t, ShardedTensor)]
    targets = written(func, args, kwargs)
    shape = sharded[0].shape
    if any(t.shape != shape for t in tensors):
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if targets:
        like = targets[0]
        if not isinstance(like, ShardedTensor):
            for t in sharded:
                refuse_other_layout(func, like, t)
            return as_replicate(func, args, kwargs)
        if shape != like.shape:
            raise RuntimeError(f"{func}: a result of shape {tuple(shape)} does not fit into {describe(like)}")
    else:
        like = next((t for t in sharded if t.shape == shape), None)
        if like is None:  # the result is larger than what is sharded
            return as_replicate(func, args, kwargs)
    local_args, local_kwargs = exchange(torch.Tensor, lambda t: part(t, like, func), args, kwargs)
    out = func(*local_args, **_without_format(local_kwargs))
    if targets:
        return targets[0] if len(targets) == 1 else tuple(targets)
    return exchanged(torch.Tensor, like.with_local, out)


def _lists(func, args: tuple, kwargs: dict):
    """An element-wise operation over lists: the sharded entries in one call on shards, the others in one stock call."""
    names = [a.name for a in func._schema.arguments]
    values = bind(func, args, kwargs)
    first = values[names[0]]
    mine = [i for i, t in enumerate(first) if isinstance(t, ShardedTensor)]
    others = [i for i in range(len(first)) if i not in set(mine)]

    def pick(value, chosen, convert):
        if isinstance(value, (list, tuple)):
            return [convert(value[i], i) for i in chosen] if len(value) == len(first) else value
        if isinstance(value, torch.Tensor) and value.ndim == 1:  # a tensor of scalars, one per entry
            return (whole_of(value) if isinstance(value, DTensor) else value)[chosen]
        return value

    def to_shard(t, i):
        return part(t, first[i], func) if isinstance(t, torch.Tensor) else t

    def to_stock(t, i):
        if not isinstance(t, ShardedTensor):
            return t
        refuse_other_layout(func, first[i], t)
        return replicated(gather(t), t.device_mesh)

    results = [None] * len(first)
    for chosen, convert in ((others, to_stock), (mine, to_shard)):
        if not chosen:
            continue
        call = {name: pick(value, chosen, convert) for name, value in values.items()}
        if convert is to_shard:
            call = {name: whole_of(v) if isinstance(v, DTensor) else v for name, v in call.items()}
        ordered = [call.pop(name) for name in names[:len(args)]]
        out = func(*ordered, **call)
        for i, t in zip(chosen, out or ()):
            results[i] = first[i].with_local(t) if convert is to_shard else t
    return None if write_arguments(func) else results


def _view(func, args: tuple, kwargs: dict):
    """A view: of a run where its elements are one, else of a gathered copy."""
    t, *rest = args
    shadow = torch.empty_strided(t.shape, row_major_strides(t.shape), dtype=t.dtype, device="meta")
    shown = func(shadow, *rest, **kwargs)
    outs = shown if isinstance(shown, (list, tuple)) else [shown]
    if not all(o.is_contiguous() and o.dtype == t.dtype and o.is_conj() == t.is_conj() and
               (t.split_dim is None or o.shape == t.shape) for o in outs):
        view = GatheredView.of(t)
        return exchanged(DTensor, view.over, as_replicate(func, (view.stock(), *rest), kwargs))
    views = []
    for out in outs:
        begin, _ = t.run
        if out.numel() == t.numel():
            views.append(t.with_local(t._local_tensor, out.shape))
            continue
        first, last = clipped([t.run], out.storage_offset(), out.numel())[0]
        skip = max(out.storage_offset() - begin, 0) if last > first else 0
        views.append(t.with_local(t._local_tensor[skip:skip + last - first], out.shape,
                                  clipped(t.intervals, out.storage_offset(), out.numel())))
    return type(shown)(views) if isinstance(shown, (list, tuple)) else views[0]


class GatheredView(DTensor):
    """A view of a sharded tensor whose elements are no run: Replicate, over a gathered copy of the whole.

    It reads what the shards hold (gathered again after they changed), and hands what is written to it on to them, so
    that `w[:, 0] = 0` and `w.t().mul_(2)` do what they say. Using it is a collective.
    """

    @classmethod
    def of(cls, base: ShardedTensor) -> "GatheredView":
        return cls._make(base, whole := gather(base), whole, [base._version])

    @classmethod
    def _make(cls, base, whole, shown, version) -> "GatheredView":
        view = cls(shown, replicated(shown, base.device_mesh)._spec, requires_grad=False)
        view._shards, view._whole, view._seen = base, whole, version
        return view

    def over(self, shown: DTensor) -> "GatheredView":
        """Another view of the same copy."""
        return self._make(self._shards, self._whole, shown._local_tensor, self._seen)

    def stock(self) -> DTensor:
        return replicated(self._local_tensor, self._shards.device_mesh)

    def refresh(self) -> None:
        if self._shards._version != self._seen[0]:
            self._whole.copy_(gather(self._shards))
            self._seen[0] = self._shards._version

    def write_back(self) -> None:
        self._shards._local_tensor.copy_(self._shards.cut(self._whole))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def _without_format(kwargs: dict) -> dict:
    """A shard is 1-D: a memory format of the whole means nothing to it."""
    return {name: value for name, value in kwargs.items() if name != "memory_format"}


def _same_elements(func, args, kwargs):
    # detach, alias: the very same tensor below, so that they follow when its storage is swapped.
    return args[0].with_local(args[0]._local_tensor)


def _on_shard(func, args, kwargs):
    t, *rest = args
    return t.with_local(func(t._local_tensor, *rest, **_without_format(kwargs)))


def _new(func, args, kwargs):
    """new_empty and its like: sharded for the same shape, else Replicate. Never communicates."""
    t, size, *rest = args
    strides = rest[:1] if func is aten.new_empty_strided.default else []
    if tuple(size) != tuple(t.shape):
        return replicated(func(t._local_tensor, size, *rest, **kwargs), t.device_mesh)
    local = t._local_tensor
    strides = [local.stride()] if strides else []
    return t.with_local(func(local, local.shape, *strides, *rest[len(strides):], **kwargs))


def _random_fill(func, args, kwargs):
    """Draws the whole tensor and keeps this rank's run.

    Ranks whose generators are in the same state fill as one process does, whatever their number, and stay in the same
    state; replicas of a shard agree then. Costs the memory of the whole tensor for the duration.
    """
    t, *rest = args
    rest, kwargs = exchange(DTensor, whole_of, tuple(rest), kwargs)
    whole = func(torch.empty(t.shape, dtype=t.dtype, device=t.device), *rest, **kwargs)
    drawn = t.cut(whole)
    if write_arguments(func):
        t._local_tensor.copy_(drawn)
        return t
    return t.with_local(drawn.clone())


def _masked_put(func, args, kwargs):
    """w[mask] = value for a mask of the same shape and one value; other indices are not element-wise."""
    t, indices, values, *accumulate = args
    index = indices[0] if len(indices) == 1 else None
    if not isinstance(t, ShardedTensor) or index is None or values.numel() != 1 or (accumulate and accumulate[0]):
        return as_replicate(func, args, kwargs)
    value = (whole_of(values) if isinstance(values, DTensor) else values).reshape(())
    if index.dtype in (torch.bool, torch.uint8) and index.shape == t.shape:
        mask = part(index, t, func).bool()
    elif t.shape == (1,) and not isinstance(index, DTensor):  # how torch writes a mask of a 0-dim tensor
        mask = torch.full_like(t._local_tensor, index.numel() > 0, dtype=torch.bool)
    else:
        return as_replicate(func, args, kwargs)
    if func is aten.index_put.default:
        return t.with_local(t._local_tensor.masked_fill(mask, value))
    t._local_tensor.masked_fill_(mask, value)
    return t


def _record_stream(func, args, kwargs):
    args[0]._local_tensor.record_stream(*args[1:])


def _of_shard(func, args, kwargs):
    return func(args[0]._local_tensor, *args[1:], **kwargs)


_HANDLERS = {
    aten.detach.default: _same_elements,
    aten.alias.default: _same_elements,
    aten.detach_.default: lambda func, args, kwargs: args[0],
    aten.clone.default: _on_shard,
    aten._to_copy.default: _on_shard,
    aten._pin_memory.default: _on_shard,
    aten.is_pinned.default: _of_shard,
    aten.record_stream.default: _record_stream,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
    aten._local_scalar_dense.default: lambda func, args, kwargs: gather(args[0]).item(),
    aten.equal.default: lambda func, args, kwargs: reductions.equal(*args),
    aten._foreach_norm.Scalar: lambda func, args, kwargs: reductions.norms(**bind(func, args, kwargs)),
    aten._amp_foreach_non_finite_check_and_unscale_.default:
        lambda func, args, kwargs: reductions.unscale(**bind(func, args, kwargs)),
    aten.index_put.default: _masked_put,
    aten.index_put_.default: _masked_put,
    aten._index_put_impl_.default: _masked_put,
    **{getattr(aten, name).default: _on_shard for name in ("empty_like", "zeros_like", "ones_like", "full_like")},
    **{getattr(aten, name).default: _new for name in ("new_empty", "new_zeros", "new_ones", "new_full",
                                                      "new_empty_strided")},
    **{op: _random_fill for name in ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_",
                                     "random_", "bernoulli_", "rand_like", "randn_like", "randint_like")
       for op in (getattr(getattr(aten, name), overload) for overload in getattr(aten, name).overloads()
                  if "out" not in overload)},
}
