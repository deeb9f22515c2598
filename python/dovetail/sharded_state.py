"""What torch.distributed's state-dict helpers must know of sharded tensors.

Three helpers build DTensors from a whole tensor, or from a meta tensor, by placements alone, and know only those of
torch: they take a `Ragged` placement for Replicate, or refuse it. `install` puts a wrapper around each. A wrapper deals
with the sharded tensors of a state dict and leaves everything else to torch. One more releases units before a load.
"""

import functools

import torch
from torch.distributed import _state_dict_utils as utils
from torch.distributed.checkpoint import default_planner, state_dict
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as norm_types

from ._gathered import release_before_load
from .sharded import ShardedTensor


def distributed(whole: torch.Tensor, like: ShardedTensor, device: torch.device) -> ShardedTensor:
    """This rank's part, a copy on `device`, of a plain whole tensor; no communication.

    Raises ValueError when the shapes differ.
    """
    if whole.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} for one of shape {tuple(like.shape)}")
    return like.with_local(like.cut(whole.detach()).to(device, copy=True))


def _broadcast_tensors(stock):
    @functools.wraps(stock)
    def distribute(local_state_dict, keys, device, pg=None):
        for key in keys:
            value = local_state_dict.get(key)
            if isinstance(value, tuple) and isinstance(value[0], ShardedTensor):
                local_state_dict[key] = distributed(value[1], value[0], device)
        return stock(local_state_dict, keys, device, pg)

    return distribute


def _whole_state_dict(stock):
    # Serves both the whole state dict of every rank and the one that rank 0 broadcasts. torch exchanges 0-dim entries
    # for plain tensors there.
    @functools.wraps(stock)
    def distribute(full_state_dict, local_state_dict, device, *args, **kwargs):
        layouts = {key: t for key, t in local_state_dict.items() if isinstance(t, ShardedTensor)}
        whole_here = stock is _originals["_distribute_state_dict"]
        given = {k: v for k, v in full_state_dict.items() if not (whole_here and k in layouts)}
        stock(given, local_state_dict, device, *args, **kwargs)
        for key, like in layouts.items():
            value = full_state_dict.get(key) if whole_here else local_state_dict.get(key)
            if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
                local_state_dict[key] = distributed(value, like, device)

    return distribute


def _into_released(stock):
    # Which parameters are sharded is asked before load_state_dict, which releases units.
    @functools.wraps(stock)
    def load(model, *args, **kwargs):
        release_before_load(model)
        return stock(model, *args, **kwargs)

    return load


def _materialized(stock):
    @functools.wraps(stock)
    def init(entries):
        _materialize(entries)
        return stock(entries)

    return init


def _materialize(entries):
    """Exchanges sharded tensors on the meta device, in nested dicts and lists, for empty ones on the mesh's device."""
    for key, value in (entries.items() if isinstance(entries, dict) else enumerate(entries)):
        if isinstance(value, ShardedTensor) and value.is_meta:
            entries[key] = torch.empty_like(value, device=value.device_mesh.device_type)
        elif isinstance(value, (dict, list)):
            _materialize(value)


_WRAPPED = ((utils, "_distribute_tensors", _broadcast_tensors),
            (state_dict, "_distribute_state_dict", _whole_state_dict),
            (state_dict, "_broadcast_state_dict", _whole_state_dict),
            (state_dict, "_load_model_state_dict", _into_released),
            (default_planner, "_init_state_dict", _materialized))
_originals = {name: getattr(module, name) for module, name, _ in _WRAPPED}


def install() -> None:
    """Puts the wrappers in place, once, and lets CUDA take the foreach kernels for sharded tensors."""
    for module, name, wrap in _WRAPPED:
        if getattr(module, name) is _originals[name]:
            setattr(module, name, wrap(_originals[name]))
    for types in (optimizer_types, norm_types):
        if ShardedTensor not in types:
            types.append(ShardedTensor)
