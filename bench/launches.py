"""Take down what the launchers launch, and compile it for a GPU that is not there.

The real launchers run on meta tensors while Triton only takes notes, so constants and options are the launchers' own. Kernels must be
compiled ones: TRITON_INTERPRET unset before triton is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels import advance, decode, merge, prefill, store
from radixkv.kernels.configs import layout_for
from radixkv.kernels.work import Phase, build_work

SM_90 = GPUTarget("cuda", 90, 32)
# Query heads, K/V heads, head_dim.
HEAD_SHAPES = {
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-1.5b": (12, 2, 128),
    "qwen2.5-7b": (28, 4, 128),
    "smollm2-135m": (9, 3, 64),
    "d80": (8, 1, 80),
    "d96": (5, 5, 96),
    "d256": (16, 2, 256),
}
# New tokens and tokens of one sequence: a step of generation, a long prompt, a few tokens after a long cached prefix.
CALLS: tuple[tuple[Phase, int, int], ...] = (("decode", 1, 8192), ("prefill", 16384, 16384), ("prefill", 20, 8192))
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: the function, its arguments by name, and Triton's own options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def module(self) -> str:
        """Name of the module that defines the kernel, such as "decode"."""
        return self.kernel.fn.__module__.rpartition(".")[2]

    def variant(self) -> str:
        """Write down all that makes Triton compile anew: constants, options, dtypes, and what it specializes integers on."""
        parts = [self.kernel.fn.__name__, *(f"{name}={value}" for name, value in self.options.items())]
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if isinstance(value, torch.Tensor):
                parts.append(f"{parameter.name}: {value.dtype}")
            elif parameter.is_constexpr or value is None:
                parts.append(f"{parameter.name}={value}")
            elif isinstance(value, int) and not parameter.do_not_specialize:
                parts.append(f"{parameter.name}: is one {value == 1}, multiple of sixteen {value % 16 == 0}")
        return " ".join(parts)

    def compile(self, target: GPUTarget = SM_90) -> Any:
        """Compile ahead of time, specialized as Triton does at a launch; every pointer counts as a multiple of 16."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes = {}
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, self.arguments[parameter.name]
            is_special = isinstance(value, int) and not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                signature[name] = _POINTERS[value.dtype]
            elif parameter.is_constexpr or value is None or (is_special and value == 1):
                signature[name] = "constexpr"
                constants[name] = value
                continue
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (is_special and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=target, options=self.options)


def record(function: Callable[[], Any]) -> list[Launch]:
    """Run a function and return what it would launch, launching nothing."""
    launches: list[Launch] = []
    original = triton.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = set(self.arg_names)
        arguments = dict(zip(self.arg_names, args, strict=False)) | {name: value for name, value in kwargs.items() if name in names}
        launches.append(Launch(self, arguments, {name: value for name, value in kwargs.items() if name not in names}))

    triton.JITFunction.run = run
    try:
        function()
    finally:
        triton.JITFunction.run = original
    return launches


def kernel_launches(heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, **options: Any) -> list[Launch]:
    """Return a launch of each attention kernel, of the merge as well; arguments as in attention_launches."""
    launches: dict[str, Launch] = {}
    for phase, query_len, seq_len in CALLS:
        for launch in attention_launches(phase, heads, dtype, block_size, query_lens=[query_len], seq_lens=[seq_len], **options):
            launches.setdefault(launch.variant(), launch)
    return list(launches.values())


def attention_launches(
    phases: Phase | Sequence[Phase],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int,
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    arch: str = "cuda",
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> list[Launch]:
    """Return the launches of one call: of decode_attention where all sequences are in that phase, else of prefill_attention.

    Args:
        phases: of all sequences, or of each.
        heads: query heads, K/V heads, head_dim.
        dtype: of query and pools.
        block_size: tokens per block.
        query_lens: new tokens per sequence; 1 in decode.
        seq_lens: tokens per sequence, the new ones included. Sequences share no block.
        arch: one of configs.ARCHS.
        sliding_window, softcap: as in the call.
    """
    num_heads, num_kv_heads, head_dim = heads
    num_seqs, num_tokens = len(seq_lens), sum(query_lens)
    borders = [0, *accumulate(-(-seq_len // block_size) for seq_len in seq_lens)]
    block_tables = [list(range(begin, end)) for begin, end in zip(borders[:-1], borders[1:], strict=True)]
    layout = layout_for(head_dim, num_heads // num_kv_heads, dtype, block_size, num_kv_heads, arch)
    work = build_work(
        block_tables, query_lens, seq_lens, phases=phases, backend="triton", layout=layout, window=sliding_window, device="meta"
    )

    def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    # As models hand it over: [heads, tokens, head_dim], so that a stride grows with the batch.
    query = empty(num_heads, num_tokens, head_dim, dtype=dtype).transpose(0, 1)
    k_pool, v_pool = (empty(borders[-1] + 1, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2))
    table, lens = empty(num_seqs, max(map(len, block_tables)) + 3), empty(num_seqs)
    options: dict[str, Any] = {"scale": 0.1, "plan": work, "sliding_window": sliding_window, "softcap": softcap}
    with _as_on(arch):
        if set([phases] if isinstance(phases, str) else phases) == {"decode"}:
            return record(lambda: decode.decode_attention(query, k_pool, v_pool, table, lens, **options))
        return record(lambda: prefill.prefill_attention(query, k_pool, v_pool, table, empty(num_seqs + 1), lens, **options))


def move_launches(dtype: torch.dtype, block_size: int, head_dim: int, num_rows: int = 3) -> list[Launch]:
    """Return the launches of store_kv and rope_store_kv, with and without source rows, of copy_blocks, merge_partials and advance_rows."""
    k_pool, v_pool = (torch.empty((8, 2, block_size, head_dim), dtype=dtype, device="meta") for _ in range(2))
    rows = torch.empty((2, num_rows, head_dim), dtype=dtype, device="meta").transpose(0, 1)
    turn = torch.empty((num_rows, head_dim), dtype=dtype, device="meta")
    ids = torch.empty(num_rows, dtype=torch.int64, device="meta")
    counts = ids.int()
    table = torch.empty((num_rows, num_rows + 3), dtype=torch.int32, device="meta")
    part_out = torch.empty((num_rows, 4, head_dim), dtype=torch.float32, device="meta")
    return [
        *record(lambda: store.store_kv(k_pool, v_pool, rows, rows, ids)),
        *record(lambda: store.store_kv(k_pool, v_pool, rows, rows, ids, counts)),
        *record(lambda: store.rope_store_kv(rows, rows, rows, turn, turn, k_pool, v_pool, ids)),
        *record(lambda: store.rope_store_kv(rows, rows, rows, turn, turn, k_pool, v_pool, ids, counts)),
        *record(lambda: store.copy_blocks([(k_pool, v_pool)], ids, ids, counts)),
        *record(lambda: merge.merge_partials(part_out, part_out[..., 0].contiguous())),
        *record(lambda: advance.advance_rows(ids, counts, ids, table, block_size)),
    ]


@contextmanager
def _as_on(arch: str) -> Iterator[None]:
    """Have the launchers choose configurations as on another kind of GPU."""
    modules = [module for name, module in sys.modules.items() if name.startswith("radixkv.kernels.") and hasattr(module, "current_arch")]
    originals = [module.current_arch for module in modules]
    try:
        for module in modules:
            module.__dict__["current_arch"] = lambda tensor: arch
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.__dict__["current_arch"] = original
