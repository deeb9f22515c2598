"""The operands of operations on sharded tensors: which there are, which are changed, what a rank needs of each."""

import functools

import torch
from torch.distributed.tensor import DTensor, Replicate

from .sharded import ShardedTensor, gather, same_elements

aten = torch.ops.aten


def tensors_in(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation; those lie at most one list deep."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(t for t in value if isinstance(t, torch.Tensor))
    return found


def exchanged(kind: type, convert, value):
    """`value` with convert(t) for every tensor t of `kind` in it, at most one list deep."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, (list, tuple)) and any(isinstance(t, kind) for t in value):
        return type(value)([convert(t) if isinstance(t, kind) else t for t in value])
    return value


def exchange(kind: type, convert, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of an operation with convert(t) for every tensor t of `kind`."""
    return (tuple(exchanged(kind, convert, value) for value in args),
            {name: exchanged(kind, convert, value) for name, value in kwargs.items()})


@functools.cache
def _element_wise_names() -> frozenset[str]:
    """Base names of aten's element-wise operations: torch's tag, and those that it leaves out."""
    tagged = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name[len("aten::"):].partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if op is not None and torch.Tag.pointwise in op.tags:
                tagged.add(packet.rstrip("_"))
    # Tagged though they also reduce, draw random numbers, or answer with a Python value.
    tagged -= {"max", "min", "rrelu", "equal", "clone"}
    return frozenset(tagged | {"copy", "fill", "zero", "masked_fill"})


@functools.cache
def element_wise(func) -> bool:
    name = func._schema.name.split("::")[1]
    if func in (aten.max.other, aten.min.other, aten.max.out, aten.min.out):
        return True
    return func._schema.name.startswith("aten::") and name.rstrip("_") in _element_wise_names()


@functools.cache
def element_wise_list(func) -> bool:
    """_foreach_* of an element-wise operation, and the fused optimizers."""
    name = func._schema.name.split("::")[1]
    if name.startswith("_foreach_"):
        return name[len("_foreach_"):].rstrip("_") in _element_wise_names() | {"clone", "copy", "zero"}
    return name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


@functools.cache
def write_arguments(func) -> tuple[tuple[int, str], ...]:
    return tuple((i, a.name) for i, a in enumerate(func._schema.arguments)
                 if a.alias_info is not None and a.alias_info.is_write)


def written(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that a call changes, in the order of the schema."""
    values = tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in write_arguments(func))
    return tensors_in(values, {})


def bind(func, args: tuple, kwargs: dict) -> dict:
    """Argument name -> value, of the arguments given."""
    return {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs


def describe(t: torch.Tensor) -> str:
    layout = f", {t.placements[0] if len(t.placements) == 1 else t.placements}" if isinstance(t, DTensor) else ""
    return f"{type(t).__name__}(shape {tuple(t.shape)}{layout})"


def part(x: torch.Tensor, like: ShardedTensor, func) -> torch.Tensor:
    """This rank's elements of an operand of `func`, in the layout of `like`: 1-D, or 0-dim for a 0-dim operand.

    Raises RuntimeError for an operand in another layout, on another mesh, or plain and of several elements.
    """
    if isinstance(x, ShardedTensor) and x._spec is like._spec:
        return x._local_tensor

    def refuse(why: str) -> RuntimeError:
        return RuntimeError(f"{func}: {why}: {describe(like)} and {describe(x)}")

    if not isinstance(x, DTensor):
        if x.numel() != 1 or x.ndim > like.ndim and like.ndim > 0:
            raise refuse("a sharded tensor and a plain tensor of several elements; distribute that one with "
                         "from_full(), or use local_elements() of the other")
        x = x.reshape(()) if x.ndim == 0 and like.ndim > 0 else x.reshape(1)
        return x
    if x.device_mesh is not like.device_mesh and x.device_mesh != like.device_mesh:
        raise refuse("tensors on different meshes")
    if x.shape == like.shape:
        if x.placements == like.placements:
            return x._local_tensor
        if same_elements(x, like):
            return x._local_tensor.reshape(-1)
        if isinstance(x, ShardedTensor) or any(p.is_shard() for p in x.placements):
            raise refuse("tensors in different layouts")
    whole = whole_of(x)
    if whole.ndim == 0 and like.ndim > 0:
        return whole  # a 0-dim operand has less say in the type of the result
    return like.cut(whole)


def whole_of(x: torch.Tensor) -> torch.Tensor:
    """The plain whole tensor behind any DTensor; a collective unless it is Replicate."""
    if isinstance(x, ShardedTensor):
        return gather(x)
    if not all(p.is_replicate() for p in x.placements):
        x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return x._local_tensor


def refuse_other_layout(func, target: torch.Tensor, operand: ShardedTensor) -> None:
    """Raises RuntimeError when a stock tensor in another sharded layout than the operand's is to be changed by it."""
    if isinstance(target, DTensor) and target.shape == operand.shape and not whole_everywhere(target):
        if not same_elements(target, operand):
            raise RuntimeError(f"{func}: tensors in different layouts: {describe(target)} and {describe(operand)}")


def whole_everywhere(t: DTensor) -> bool:
    return all(p.is_replicate() for p in t.placements)
