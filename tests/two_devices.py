"""Two devices that are none: a strict stand-in for a machine with two GPUs.

`lazy` is a device type that torch knows and that has no hardware. Inside `two_devices()` its tensors hold ordinary CPU tensors, and
every operation, forward and backward, goes through `_run`, which refuses what real devices refuse: operands on two devices, or
on one and the CPU (numbers, and indices on the CPU, apart). What is computed is what the CPU computes, so that tables can be
compared. `operations` counts what ran where.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FIRST, SECOND = "lazy:0", "lazy:1"
_PRETENDED = "lazy"
_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
operations: Counter = Counter()  # by device


class Placed(torch.Tensor):
    """A tensor that says it is on a pretended device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False):
        if device is None:  # as accelerate makes a parameter of the class of the one before
            return torch.nn.Parameter(inner, requires_grad)
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device,
        )  # fmt: skip

    def __init__(self, inner, device=None, requires_grad=False):
        if device is not None:
            self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """What torch does with Python's lists below its dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": args[0].device} | kwargs
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(torch.tensor(x) if isinstance(x, list) else x for x in args[1]))
        return func(args[0].cpu()) if func is torch.Tensor.tolist else func(*args, **kwargs)


@contextmanager
def two_devices():
    """Inside, tensors can be made on FIRST and SECOND, and moved to and from them."""
    autocast = torch.autocast

    def without(device_type, *args, **kwargs):  # there is none for `lazy`
        return nullcontext() if device_type == _PRETENDED else autocast(device_type, *args, **kwargs)

    operations.clear()
    module = patch.object(torch, _PRETENDED, SimpleNamespace(), create=True)
    with patch.object(torch, "autocast", without), module, _Lists(), _Dispatch():
        yield


def _run(func, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    asked = kwargs.get("device")
    place = None if asked is None else torch.device(asked)
    if not any(isinstance(x, Placed) for x in tensors) and (place is None or place.type != _PRETENDED):
        return func(*args, **kwargs)
    operands = tensors[:1] if func in _MOVES else tensors
    if func in _INDEXING:
        indices = {id(x) for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor) and x.device.type == "cpu"}
        operands = [x for x in tensors if id(x) not in indices]
    devices = {str(x.device) for x in operands if isinstance(x, Placed) or x.dim()}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(devices)} in {func}")
    place = place or torch.device(*devices)
    operations[str(place)] += 1
    held = {id(x.inner): x for x in tensors if isinstance(x, Placed)}

    def inner(x):
        if isinstance(x, torch.device) and x.type == _PRETENDED:
            return torch.device("cpu")
        return x.inner if isinstance(x, Placed) else x

    def outer(x):
        if not isinstance(x, torch.Tensor):
            return x
        if place.type != _PRETENDED:
            return x.clone() if id(x) in held else x
        return held[id(x)] if id(x) in held else Placed(x, place)  # in place: the very same tensor

    return tree_map(outer, func(*tree_map(inner, args), **tree_map(inner, kwargs)))
