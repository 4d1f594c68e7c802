"""A second device on a machine that has only a CPU: tensors that say they are elsewhere, and refuse to meet those that are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend()
# transformers 4.57 switches autocast off around its rotary embedding.
torch.privateuseone.get_amp_supported_dtype = lambda: [torch.float16]  # type: ignore[attr-defined]
CPU, OTHER = torch.device("cpu"), torch.device("privateuseone", 0)
# What moves or reads values between devices; and what takes indices from the CPU on any device.
MOVES = {"aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense"}
INDEXED = {"aten::index", "aten::index_put_"}


class Elsewhere(Tensor):
    """A tensor on `OTHER`, whose values are those of a tensor on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, requires_grad: bool | None = None) -> Any:
        if requires_grad is not None:  # accelerate makes a parameter by the class of the one before
            return nn.Parameter(values, requires_grad)
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype, device=OTHER
        )
        made.held = values
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        return run(func, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """What makes tensors of data that is none yet does so out of sight of a dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or CPU) == OTHER:
            return func(*args, **{**kwargs, "device": CPU}).to(OTHER)
        if func is Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].held.tolist()
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(torch.from_numpy(index) if isinstance(index, np.ndarray) else index for index in args[1])
        return func(*args, **kwargs)


@contextmanager
def second_device() -> Iterator[None]:
    """Inside this block tensors can be made on `OTHER` and moved there."""
    with _Factories(), _Moves():
        yield


class _Moves(TorchDispatchMode):

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU what is said to be computed on the device of the arguments.

    Raises:
        RuntimeError: arguments are on both devices.
    """
    flat, form = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    name = func._schema.name
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.ndim]
    is_other = any(isinstance(tensor, Elsewhere) for tensor in tensors)
    if name in INDEXED:
        here = [] if isinstance(args[0], Elsewhere) else here
    if is_other and here and name not in MOVES:
        raise RuntimeError(f"{name}: tensors are on {CPU} and on {OTHER}")
    args, kwargs = tree_unflatten([value.held if isinstance(value, Elsewhere) else value for value in flat], form)
    if kwargs.get("device") is not None:
        is_other = torch.device(kwargs["device"]).type == OTHER.type
        kwargs = {**kwargs, "device": CPU} if is_other else kwargs
    result = func(*args, **kwargs)
    if name == "aten::copy_":
        return flat[0]
    owners = {id(value.held): value for value in flat if isinstance(value, Elsewhere)}
    return tree_map_only(Tensor, lambda made: owners[id(made)] if id(made) in owners else Elsewhere(made), result) if is_other else result
