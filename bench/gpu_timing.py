"""Time on a device, and what is moved and computed in it: events, medians, rates, and the byte and FLOP formulas of attention.

GB is 1e9 bytes, TFLOP is 1e12 operations. Where there is no GPU (a dry run) the wall clock is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Written between two runs; several times the L2 cache of any GPU so far.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Microseconds per run: median, and the 20 and 80 percentiles; how many runs, and whether they were replays of a CUDA graph."""

    us: float
    low_us: float
    high_us: float
    num_runs: int
    graph: bool

    @classmethod
    def of(cls, runs: Sequence[float], *, graph: bool) -> Timing:
        """Sum up single runs, in microseconds."""
        ordered = sorted(runs)
        low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8))
        return cls(middle, low, high, len(ordered), graph)


class Deadline:
    """The end of a stage's time.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, below 0 when it has passed."""
        return self._end - time.monotonic()


def time_function(function: Callable[[], Any], *, flush: bool, seconds: float = 0.15, max_runs: int = 40) -> Timing:
    """Time a function on the current device.

    On a GPU its launches are captured in a CUDA graph and the replays are timed, so that what Python costs is not in the figure; what
    cannot be captured is timed as it is.

    Args:
        function: what to time; run several times.
        flush: whether to empty the L2 cache before each run.
        seconds: about how long to measure.
        max_runs: at most that many runs.
    """
    if not torch.cuda.is_available():
        runs = []
        for _ in range(2):
            begin = time.perf_counter()
            function()
            runs.append((time.perf_counter() - begin) * 1e6)
        return Timing.of(runs, graph=False)
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    run, graph = _captured(function)
    once = _time_runs(run, 2, flush)[-1]
    num_runs = int(min(max_runs, max(5, seconds * 1e6 / max(once, 1.0))))
    return Timing.of(_time_runs(run, num_runs, flush), graph=graph)


def copy_gbps(num_bytes: int) -> float:
    """GB/s of a copy on the device, bytes read and written counted."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    source.random_(0, 255)
    return 2 * num_bytes / time_function(lambda: target.copy_(source), flush=False).us / 1e3


def matrix_tflops(size: int, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product of random numbers."""
    left, right = (torch.randn((size, size), device=_device()).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / time_function(lambda: torch.mm(left, right, out=out), flush=False).us / 1e6


def kv_bytes(num_keys: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of the K and V of num_keys tokens of one layer."""
    return 2 * num_keys * num_kv_heads * head_dim * itemsize


def row_bytes(num_tokens: int, num_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of query and output of num_tokens tokens."""
    return 2 * num_tokens * num_heads * head_dim * itemsize


def partial_bytes(num_partials: int, num_heads: int, head_dim: int) -> int:
    """Bytes of fp32 partials and their LSE, written once and read once."""
    return 2 * num_partials * num_heads * (head_dim + 1) * 4


def attention_flop(query_lens: Sequence[int], seq_lens: Sequence[int], num_heads: int, head_dim: int) -> int:
    """Operations of causal attention: 4 * head_dim for each (query, head, key it sees)."""
    pairs = sum(query_len * (2 * seq_len - query_len + 1) // 2 for query_len, seq_len in zip(query_lens, seq_lens, strict=True))
    return 4 * pairs * num_heads * head_dim


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _captured(function: Callable[[], Any]) -> tuple[Callable[[], Any], bool]:
    """Return a replay of the function's launches and True, or the function and False where it cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError:
        # A sync or a foreign stream inside: nothing was launched, and the capturing stream may still be the current one.
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return function, False
    graph.replay()
    return graph.replay, True


def _time_runs(run: Callable[[], Any], num_runs: int, flush: bool) -> list[float]:
    """Time single runs by events, microseconds each."""
    scratch = torch.empty(_FLUSH_BYTES if flush else 0, dtype=torch.int8, device="cuda")
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(num_runs):
        scratch.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]
