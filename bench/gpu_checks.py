"""The correctness stages of a GPU check: every kernel against float64 on fresh random inputs, and a captured graph replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from radixkv.bench.gpu_cases import Case, Heads, build_case, flat, shared
from radixkv.bench.gpu_report import Report
from radixkv.bench.gpu_timing import Deadline
from radixkv.kernels import decode, prefill, reference, store
from radixkv.kernels.merge import merge_partials
from radixkv.kernels.work import Capacity, Work
from radixkv.testing import OUT_TOLERANCE, assert_attention_close, attention_error, kernel_device, paged_batch

# Name of a check, whether it passed, what was found.
Outcome = tuple[str, bool, str]


@dataclass(frozen=True)
class Kind:
    """One kind of head and what is asked of attention with it."""

    heads: Heads
    dtype: torch.dtype
    block_size: int
    sliding_window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        features = f"{f' window {self.sliding_window}' if self.sliding_window else ''}{f' softcap {self.softcap}' if self.softcap else ''}"
        return f"{self.heads} {str(self.dtype).removeprefix('torch.')} block {self.block_size}{features}"


# Every head_dim, dtype and block size once, and the heads of Qwen2.5-0.5B, 1.5B and 7B.
KINDS = (
    Kind(Heads(28, 4, 128), torch.bfloat16, 64),
    Kind(Heads(28, 4, 128), torch.bfloat16, 16),
    Kind(Heads(14, 2, 64), torch.bfloat16, 16),
    Kind(Heads(14, 2, 64), torch.float16, 64, sliding_window=300, softcap=30.0),
    Kind(Heads(12, 2, 128), torch.float32, 16),
    Kind(Heads(12, 2, 128), torch.bfloat16, 128, sliding_window=100),
    Kind(Heads(8, 1, 80), torch.bfloat16, 32),
    Kind(Heads(5, 5, 96), torch.float16, 16),
    Kind(Heads(16, 2, 256), torch.bfloat16, 64),
)
DRY_KINDS = (Kind(Heads(6, 2, 64), torch.float32, 16), Kind(Heads(4, 1, 80), torch.bfloat16, 32, sliding_window=20))


def check_kernels(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Compare attention, merge and the kernels that move K/V with the reference in float64.

    On a GPU kinds of heads are checked in processes of their own, four at a time, because nearly all of the time is compilation.
    """
    size, heads = (1, Heads(6, 2, 64)) if dry else (40, Heads(28, 4, 128))
    for name, sequences in (
        ("tree decode", shared(5 if dry else 40, 64 * size, 24)),
        ("flat decode", flat(3, 50 * size)),
        ("forest decode", [*shared(3, 32 * size, 20), [("other", 32 * size), ("end", 7)], [("alone", 40 * size)]]),
    ):
        for exact in (False, True):
            plan = "exact plan" if exact else "default plan"
            _report_all(report, [_guarded(f"{name}, {plan}", partial(_check_case, name, sequences, heads, exact, seed))])
    kinds = DRY_KINDS if dry else KINDS
    if dry:
        for kind in kinds:
            _report_all(report, check_kind(kind, seed, dry))
        return
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(check_kind, kind, seed, dry): kind for kind in kinds}
        done, late = wait(pending, timeout=deadline.left)
        for future in done:
            error = future.exception()
            _report_all(report, [(str(pending[future]), False, repr(error))] if error else future.result())
        for future in late:
            future.cancel()
            report.check(str(pending[future]), False, "not checked: the stage's time is over")


def check_kind(kind: Kind, seed: int, dry: bool) -> list[Outcome]:
    """Compare every kernel with the reference for one kind of heads."""
    size = 1 if dry else 40
    outcomes = [
        _guarded(f"store, rope, copy: {kind}", partial(_check_moves, kind, seed)),
        _guarded(f"merge: {kind}", partial(_check_merge, kind, seed)),
    ]
    # Cold and warm prompts, chunks of prompts, short extensions of long prefixes; decode of empty, short and long rows.
    for name, query_lens, prefix_lens in (
        ("cold prefill", [7 * size, 1, 3 * size, 0], [0, 0, 0, 5]),
        ("cached prefill", [5 * size, 2 * size, 1], [13 * size, 64, 30 * size]),
        ("short extension", [20, 2, 9], [60 * size, 50 * size, 3]),
        ("decode", [1] * 6, [0, -1, 16, 31 * size, 63, 90 * size]),
    ):
        outcomes.append(_guarded(f"{name}: {kind}", partial(_check_attention, kind, query_lens, prefix_lens, seed)))
    return outcomes


def check_graph(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Capture decode at short lengths, and replay it after other batches were copied to its addresses: longer, shared, short again.

    One batch has grown since its work was built. Without a GPU the launches are made anew instead, over the same tensors.
    """
    heads, num_seqs, scale = (Heads(6, 2, 64), 3, 1) if dry else (Heads(28, 4, 128), 16, 32)
    batches = {
        "short": flat(num_seqs, 40),
        "long": flat(num_seqs, 256 * scale),
        "shared": shared(num_seqs, 192 * scale, 30),
        "grown on the device": shared(num_seqs, 64 * scale, 60),
        "short again": flat(num_seqs, 33),
    }
    cases = {
        name: build_case(name, parts, heads=heads, phase="decode", block_size=16, seed=seed + i)
        for i, (name, parts) in enumerate(batches.items())
    }
    capacity = Capacity.for_decode(num_seqs, 256 * scale, cases["short"].layout)
    held = _Held.of(cases["long"], capacity)
    cases["short"].work(capacity=capacity, into=held.work)
    held.load(cases["short"])
    held.attend()
    run: Callable[[], Any] = held.attend
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.attend()
        run = graph.replay
    for name, case in cases.items():
        tokens_ago = 9 if name == "grown on the device" else 0
        work = case.work(capacity=capacity, into=held.work, tokens_ago=tokens_ago)
        assert min(work.rebuild_at) > case.seq_lens[0], "this work must not be used any more at this length"
        held.load(case)
        held.out.fill_(float("nan"))
        run()
        error = attention_error(held.out, case.exact_rows(range(num_seqs)))
        report.check(f"graph replay, {name}", error <= OUT_TOLERANCE[case.query.dtype], f"off by {error:.1e}")


@dataclass(frozen=True)
class _Held:
    """Tensors at fixed addresses that a captured decode reads, and its output."""

    query: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_table: Tensor
    seq_lens: Tensor
    out: Tensor
    lse: Tensor
    work: Work
    scale: float

    @classmethod
    def of(cls, case: Case, capacity: Capacity) -> _Held:
        """Make room for cases of up to this one's blocks and columns."""
        out = torch.empty_like(case.query)
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        pools = torch.empty_like(case.k_pool), torch.empty_like(case.v_pool)
        tables = torch.full_like(case.block_table, -1), torch.zeros_like(case.seq_lens_device)
        return cls(torch.empty_like(case.query), *pools, *tables, out, lse, case.work(capacity=capacity), case.scale)

    def load(self, case: Case) -> None:
        """Copy a case to the fixed addresses; its work list is built where it is."""
        blocks, columns = case.k_pool.shape[0], min(case.table.shape[1], self.block_table.shape[1])
        self.query.copy_(case.query)
        for pool, source in ((self.k_pool, case.k_pool), (self.v_pool, case.v_pool)):
            pool.fill_(float("nan"))
            pool[:blocks].copy_(source)
        self.block_table.fill_(-1)
        self.block_table[:, :columns].copy_(case.block_table[:, :columns])
        self.seq_lens.copy_(case.seq_lens_device)

    def attend(self) -> None:
        decode.decode_attention(
            self.query,
            self.k_pool,
            self.v_pool,
            self.block_table,
            self.seq_lens,
            scale=self.scale,
            plan=self.work,
            out=self.out,
            lse=self.lse,
        )


def _check_attention(kind: Kind, query_lens: list[int], prefix_lens: list[int], seed: int) -> str:
    """Compare one packed call with the reference; return what was found, or raise AssertionError."""
    heads = kind.heads
    batch = paged_batch(
        query_lens,
        prefix_lens,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=kind.block_size,
        dtype=kind.dtype,
        seed=seed,
        sliding_window=kind.sliding_window,
    )
    options: dict[str, Any] = {"scale": batch.scale, "sliding_window": kind.sliding_window, "softcap": kind.softcap}
    out = torch.full_like(batch.query, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), dtype=torch.float32, device=out.device)
    if all(query_len == 1 for query_len in query_lens):
        decode.decode_attention(*batch.decode_args(), **options, out=out, lse=lse)
        wanted = reference.decode_attention(*batch.double().decode_args(), **options)
    else:
        prefill.prefill_attention(*batch.prefill_args(), **options, out=out, lse=lse)
        wanted = reference.prefill_attention(*batch.double().prefill_args(), **options)
    assert_attention_close(out, lse, *wanted, kind.dtype)
    return f"off by {attention_error(out, wanted[0]):.1e}"


def _check_case(name: str, sequences: Sequence[Any], heads: Heads, exact: bool, seed: int) -> str:
    """Compare a decode step over shared blocks with float64."""
    case = build_case(name, sequences, heads=heads, phase="decode", block_size=16, seed=seed)
    out, _ = case.attend(case.work(exact=exact))
    error = attention_error(out, case.exact_rows(range(len(case.seq_lens))))
    assert error <= OUT_TOLERANCE[case.query.dtype], f"output is off by {error:.2e}"
    return f"off by {error:.1e}"


def _check_moves(kind: Kind, seed: int) -> str:
    """Compare store_kv, rope_store_kv and copy_blocks with the reference, bit for bit."""
    generator, device = torch.Generator().manual_seed(seed), kernel_device()
    heads, size = kind.heads, kind.block_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(kind.dtype).to(device)

    pool_shape = (7, heads.num_kv_heads, size, heads.head_dim)
    ours = [(draw(*pool_shape), draw(*pool_shape)) for _ in range(2)]
    wanted = [(k_pool.clone(), v_pool.clone()) for k_pool, v_pool in ours]
    query, key, value = (
        draw(count, 9, heads.head_dim).transpose(0, 1) for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    cos, sin = draw(9, heads.head_dim), draw(9, heads.head_dim)
    slots = torch.randperm(7 * size, generator=generator)[:12].to(device)
    slots[3] = -1
    rows = torch.randint(0, 9, (12,), generator=generator, dtype=torch.int32).to(device)
    src, dst = (torch.tensor(ids, device=device) for ids in ([0, 1], [5, 6]))
    count = torch.tensor([size, size // 2], dtype=torch.int32, device=device)
    rotated = []
    for module, pools in ((store, ours), (reference, wanted)):
        rotated.append(module.rope_store_kv(query, key, value, cos, sin, *pools[0], slots, rows))
        module.store_kv(*pools[1], key, value, slots[:9])
        module.copy_blocks(pools, src, dst, count)
    assert torch.equal(*rotated), "rotated queries differ"
    for pair, same in zip(ours, wanted, strict=True):
        assert torch.equal(pair[0], same[0]) and torch.equal(pair[1], same[1]), "pools differ"
    return "equal bits"


def _check_merge(kind: Kind, seed: int) -> str:
    """Compare merge_partials with the reference, rows of some and of only empty partials included."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn((37, kind.heads.num_heads, kind.heads.head_dim), generator=generator)
    lse = 5 * torch.randn(out.shape[:2], generator=generator)
    empty = torch.rand(lse.shape, generator=generator) < 0.3
    empty[:, 0] = True
    out, lse = out.masked_fill(empty[..., None], 0.0).to(kernel_device()), lse.masked_fill(empty, float("-inf")).to(kernel_device())
    got, wanted = merge_partials(out, lse), reference.merge_partials(out.double(), lse.double())
    assert_attention_close(got[0][None], got[1][None], wanted[0][None], wanted[1][None], torch.float32)
    return f"off by {attention_error(*(merged[0] for merged in (got, wanted))):.1e}"


def _guarded(name: str, check: Callable[[], str]) -> Outcome:
    """Run one check; whatever it raises is a failed check, and the next one runs."""
    try:
        return name, True, check()
    except Exception as error:
        return name, False, f"{type(error).__name__}: {error}"[:500]


def _report_all(report: Report, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        report.check(*outcome)
