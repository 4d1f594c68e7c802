"""The stages of a GPU check that measure: rates of the card, and attention of ours against its peers on the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from radixkv.bench.gpu_cases import Case, Heads, Parts, build_case, flat, shared
from radixkv.bench.gpu_peers import NotAtHand, peers
from radixkv.bench.gpu_report import OURS, Report
from radixkv.bench.gpu_timing import Deadline, copy_gbps, matrix_tflops, partial_bytes, time_function
from radixkv.kernels.work import Work
from radixkv.testing import OUT_TOLERANCE, attention_error

QWEN_7B, QWEN_05B, DRY_HEADS = Heads(28, 4, 128), Heads(14, 2, 64), Heads(6, 2, 64)
# A peer may differ from us by what each may be off, and half of that for rounding more often than we do.
_PEER_FACTOR = 2.5


def measure_rates(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Copy bandwidth and bf16 matrix rate of this card, the measures of all that follows."""
    report.rate("copy GB/s", copy_gbps(1 << 20 if dry else 4 << 30))
    report.rate("matrix TFLOP/s", matrix_tflops(64 if dry else 8192, torch.bfloat16))


def measure_decode(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Flat decode, the goal's case first; two block sizes and the smaller model there."""
    if dry:
        _compare(report, deadline, "decode", "3 x 128, block 16", flat(3, 128), DRY_HEADS, 16, seed)
        return
    _compare(report, deadline, "decode", "64 x 8k, block 64", flat(64, 8192), QWEN_7B, 64, seed)
    for batch, length in ((1, 8192), (8, 8192), (64, 1024), (1, 32768), (8, 32768), (64, 32768), (1, 1024), (8, 1024)):
        # flex_attention compiles for each shape.
        _compare(
            report, deadline, "decode", f"{batch} x {length // 1024}k, block 64", flat(batch, length), QWEN_7B, 64, seed, without="flex"
        )
    _compare(report, deadline, "decode", "64 x 8k, block 16", flat(64, 8192), QWEN_7B, 16, seed, without="flex")
    _compare(report, deadline, "decode", "64 x 8k, d64, block 64", flat(64, 8192), QWEN_05B, 64, seed, without="flex")


def measure_tree(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Decode of sequences that begin alike, against the same sequences with private copies, and against the exact plan."""
    num_seqs, shared_len, own_len = (3, 96, 32) if dry else (64, 8192, 256)
    heads, block_size = (DRY_HEADS, 16) if dry else (QWEN_7B, 64)
    size = f"{num_seqs} x (8k shared + {own_len})"
    private = f"{num_seqs} x (8k + {own_len}) private"
    _compare(report, deadline, "decode", size, shared(num_seqs, shared_len, own_len), heads, block_size, seed, without="flex")
    _compare(report, deadline, "decode", private, flat(num_seqs, shared_len + own_len), heads, block_size, seed, without="all")


def measure_prefill(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Prompts, all new and half cached."""
    length, heads, block_size = (48, DRY_HEADS, 16) if dry else (16384, QWEN_7B, 64)
    _compare(report, deadline, "prefill", "16k causal", flat(1, length), heads, block_size, seed, query_len=length)
    _compare(report, deadline, "prefill", "8k on 8k cached", flat(1, length), heads, block_size, seed, query_len=length // 2)
    if not dry:
        _compare(report, deadline, "prefill", "16k causal, block 16", flat(1, length), heads, 16, seed, query_len=length, without="all")
        _compare(report, deadline, "prefill", "16k causal, d64", flat(1, length), QWEN_05B, 64, seed, query_len=length, without="flex")


def measure_extension(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """A few new tokens on a long cached prefix."""
    length, heads, block_size = (80, DRY_HEADS, 16) if dry else (8192, QWEN_7B, 64)
    _compare(report, deadline, "prefill", "20 on 8k", flat(1, length + 20), heads, block_size, seed, query_len=20)
    if not dry:
        _compare(report, deadline, "prefill", "8 x 20 on 8k", flat(8, length + 20), heads, 64, seed, query_len=20, without="flex")
        _compare(report, deadline, "prefill", "64 on 32k", flat(1, 32768 + 64), heads, 64, seed, query_len=64, without="flex")
        _compare(report, deadline, "prefill", "20 on 8k, block 16", flat(1, length + 20), heads, 16, seed, query_len=20, without="all")


def _compare(
    report: Report,
    deadline: Deadline,
    phase: Any,
    name: str,
    sequences: Sequence[Parts],
    heads: Heads,
    block_size: int,
    seed: int,
    *,
    query_len: int = 1,
    without: str = "",
) -> None:
    """Check and time ours with the default and the exact plan, then every peer; `without` leaves out one kind of peer, or "all"."""
    if deadline.left < 0:
        report.missing(name, OURS, "the stage's time is over")
        return
    case = build_case(name, sequences, heads=heads, phase=phase, query_lens=[query_len] * len(sequences), block_size=block_size, seed=seed)
    try:
        ours = _measure_ours(report, case, exact=False)
        _measure_ours(report, case, exact=True)
    except Exception as error:
        report.check(f"{name}, {OURS}", False, f"{type(error).__name__}: {error}"[:500])
        return
    for what, make_ready in peers(case).items():
        if without == "all" or (without and what.startswith(without)):
            continue
        if deadline.left < (30 if what.startswith("flex") else 0):
            report.missing(name, what, "the stage's time is over")
            continue
        try:
            run = make_ready()
            difference = attention_error(run(), ours)
            if not difference <= _PEER_FACTOR * OUT_TOLERANCE[case.query.dtype]:
                report.missing(name, what, f"its result differs from ours by {difference:.1e}")
                continue
            report.time(name, what, asdict(time_function(run, flush=True)), **_figures(case), difference=difference)
        except NotAtHand as reason:
            report.missing(name, what, str(reason))
        except Exception as error:
            report.missing(name, what, f"{type(error).__name__}: {error}"[:300])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measure_ours(report: Report, case: Case, *, exact: bool) -> torch.Tensor:
    """Check ours against float64 on some rows, and time it; return its output."""
    what = f"{OURS} exact" if exact else OURS
    work = case.work(exact=exact)
    out = torch.full_like(case.query, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"), dtype=torch.float32, device=out.device)
    case.attend(work, out, lse)
    num_tokens = out.shape[0]
    tokens = sorted({0, 1 % num_tokens, num_tokens // 3, num_tokens // 2, num_tokens - 1})
    error = attention_error(out[tokens], case.exact_rows(tokens))
    complete = not bool(out.isnan().any()) and not bool(lse.isnan().any())
    ok = complete and error <= OUT_TOLERANCE[case.query.dtype]
    if report.check(f"{case.name}, {what}", ok, f"off by {error:.1e}{'' if complete else ', NaN in the output'}"):
        timing = time_function(lambda: case.attend(work, out, lse), flush=True)
        report.time(case.name, what, asdict(timing), **_figures(case), **_plan_figures(case, work))
    return out


def _figures(case: Case) -> dict[str, Any]:
    return {"num_bytes": case.unique_bytes} if case.phase == "decode" else {"num_flop": case.flop}


def _plan_figures(case: Case, work: Work) -> dict[str, Any]:
    """What the plan costs beside the K/V itself."""
    moved = partial_bytes(work.num_partials, case.heads.num_heads, case.heads.head_dim)
    return {"num_partials": work.num_partials, "partial_bytes": moved, "note": f"{moved / 1e6:.1f} MB of partials"}
