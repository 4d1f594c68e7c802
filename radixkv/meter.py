"""How fast the model computes prompts, as seen from the steps of a cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MAX_PENDING = 64


class PromptMeter:
    """The best rate, in tokens per second, of the prompt steps so far.

    The best and not the mean: first steps compile and warm up, and short prompts leave the device idle. On a GPU the time is taken by
    events on the stream, which cost the host microseconds and are read only when somebody asks.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._best: float | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque(maxlen=_MAX_PENDING)

    @contextmanager
    def measure(self, num_tokens: int) -> Iterator[None]:
        """Times a step of `num_tokens` tokens; one that raises is not counted."""
        if not self._on_cuda:
            started = time.perf_counter()
            yield
            self._take(num_tokens, time.perf_counter() - started)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)  # of this device, which need not be the current one
        begin.record(stream)
        yield
        end.record(stream)
        self._pending.append((begin, end, num_tokens))

    def tokens_per_s(self) -> float | None:
        """The best rate, None when nothing was computed; waits for what the device is still computing."""
        while self._pending:
            begin, end, num_tokens = self._pending.popleft()
            end.synchronize()
            self._take(num_tokens, begin.elapsed_time(end) / 1000)
        return self._best

    def _take(self, num_tokens: int, seconds: float) -> None:
        if seconds > 0:
            self._best = max(self._best or 0.0, num_tokens / seconds)
