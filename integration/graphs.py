"""Decode steps as CUDA graphs: captured once for a number of rows, replayed for every batch that fits.

A forward is about a thousand launches, which take the host longer than they take the GPU; a replay is one. What a step needs to know it
reads on the device: token ids, lengths, block table and work lists stand at addresses that stay, see `radixkv.decode_plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from radixkv.decode_plan import DecodePlan
from radixkv.step import Step

logger = logging.getLogger("radixkv")

Region = Callable[[torch.Tensor], torch.Tensor]
# What a capture gives: a function that runs the captured work again, and the tensor that it writes each time.
Captured = tuple[Callable[[], None], torch.Tensor]


class CudaCapture:
    """Captures what a function launches on one CUDA device, which need not be the current one; all captures share one memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None

    def __call__(self, region: Callable[[], torch.Tensor]) -> Captured:
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = region()
        return graph.replay, result


@dataclass
class _Graph:
    """The steps of one plan. token_ids: int64 [1, rows], read by the captured work."""

    plan: DecodePlan
    token_ids: torch.Tensor
    warm: bool = False
    captured: Captured | None = None


class DecodeGraphs:
    """The captured decode steps of one model.

    The first step with a plan runs as it is, which compiles kernels and makes buffers; the second is captured and replayed; all later
    ones are replayed.

    Args:
        capture: captures and returns what `Captured` says.

    Attributes:
        num_captures, num_replays: so far.
    """

    def __init__(self, capture: Callable[[Callable[[], torch.Tensor]], Captured]):
        self._capture = capture
        self._graphs: dict[tuple[int, str], _Graph] = {}
        self.num_captures = self.num_replays = 0

    def rows_for(self, num_rows: int) -> int:
        """The capacity under which so many rows run: few capacities, so that there are few graphs."""
        return 1 << (num_rows - 1).bit_length()

    def clear(self) -> None:
        """Forget all captured steps: they hold the addresses of weights and pool."""
        self._graphs.clear()

    def run(self, step: Step, token_ids: torch.Tensor, region: Region, flags: str) -> torch.Tensor:
        """Run one decode step.

        Args:
            step: of a `DecodePlan`. token_ids: int64 [rows], at most as many as the plan has.
            region: given token ids [1, plan rows], launches the whole step and returns its logits [plan rows, vocabulary].
            flags: what else the region depends on.

        Returns:
            The logits, valid until the next step.
        """
        plan = step.plan
        assert isinstance(plan, DecodePlan)
        key = (plan.num_rows, flags)
        graph = self._graphs.get(key)
        if graph is None or graph.plan is not plan:
            with torch.inference_mode(False):  # written again by calls that may or may not be in that mode
                ids = torch.zeros((1, plan.num_rows), dtype=torch.int64, device=plan.positions.device)
            graph = self._graphs[key] = _Graph(plan, ids)
        graph.token_ids[0, : len(token_ids)].copy_(token_ids)
        if not graph.warm:
            logits = region(graph.token_ids)
            graph.warm = True
            return logits
        if graph.captured is None:
            ids = graph.token_ids
            graph.captured = self._capture(lambda: region(ids))
            self.num_captures += 1
        replay, logits = graph.captured
        replay()
        self.num_replays += 1
        return logits


def why_not_captured(backend: str, device: torch.device) -> str | None:
    """Why decode steps cannot be captured with a backend on a device, in words; None where they can."""
    if backend != "triton":
        return f"the backend is {backend}"
    if device.type != "cuda":
        return f"the model lies on {device}, and capturing needs a CUDA device"
    return "this is ROCm, where capturing is not supported yet" if torch.version.hip else None


def can_capture(model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether a replay does all that a forward would: no hooks or replaced forwards that Python runs, no tensors passed along."""
    reason = _hindrance(model, inputs)
    if reason is not None:
        logger.debug("decode steps are not captured in this call: %s", reason)
    return reason is None


def _hindrance(model: torch.nn.Module, inputs: dict[str, Any]) -> str | None:
    if any(isinstance(value, torch.Tensor) for value in inputs.values()):
        return "tensors are passed to the model beside the tokens"
    if torch_module._has_any_global_hook():
        return "torch has hooks for all modules"
    for name, module in model.named_modules():
        hooks = module._forward_hooks or module._forward_pre_hooks
        if (hooks and module is not model) or "forward" in module.__dict__:
            return f"module {name or 'model'} has hooks or a forward of its own"
    return None
