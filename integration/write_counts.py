"""Whether any of many tensors was written to, by the counts that autograd keeps of the writes to each."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

_count_of = attrgetter("_version")


class WriteCounts:
    """The write counts of some tensors at one moment.

    A node of autograd's graph compares the counts of all tensors that it saved when it is asked for them: one call, which takes half as
    long as reading each count from Python. What it saves are tensors without elements that share nothing but the count, so that memory
    which `parameter.data = other` gives up is free at once, and `torch.utils.swap_tensors` finds nobody else at a tensor.

    Args:
        tensors: none made in inference mode, as those have no count; not changed.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        try:
            plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided]
            # A hook that takes part in the saving would get the tensors in place of the node, which then compares nothing.
            with torch.inference_mode(False), torch.enable_grad(), disable_saved_tensors_hooks("radixkv compares write counts"):
                # The output is kept because a node without one takes twice as long to answer.
                self._output = _Node.apply(torch.zeros((), requires_grad=True), _sharing_counts(plain))
                self._node: Any = self._output.grad_fn
        except RuntimeError:
            plain, self._node = [], _NoNode
        compared = set(map(id, plain))
        self._others = [tensor for tensor in tensors if id(tensor) not in compared]
        self._num_writes = self._count_others()

    def changed(self) -> bool:
        """Whether any tensor was written to since."""
        try:
            self._node.saved_tensors  # noqa: B018
        except RuntimeError:
            return True
        return bool(self._others) and self._count_others() != self._num_writes

    def _count_others(self) -> int:
        # A count only grows, so the sum is as it was only if every one is.
        return sum(map(_count_of, self._others))


class _NoNode:
    """In the place of a node that could not be made."""

    saved_tensors = ()


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, saved: list[Tensor]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*saved)
        return start.clone()


def _sharing_counts(tensors: list[Tensor]) -> list[Tensor]:
    """For each a tensor without elements that has its count."""
    sharing = []
    empty: dict[tuple[torch.dtype, torch.device], Tensor] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        if kind not in empty:
            empty[kind] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        shared = tensor.detach()
        shared.data = empty[kind]
        sharing.append(shared)
    return sharing
