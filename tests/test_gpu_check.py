"""bench/gpu_check.py: all of it runs on a CPU by --dry-run, and its figures, failures and exit status are what they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from radixkv.bench import gpu_cases, gpu_report, gpu_timing
from radixkv.kernels import reference
from radixkv.testing import attention_error

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu_check.py"


def run_script(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the script and return its exit status, its JSON and what it printed."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "OUT")}
    command = [sys.executable, str(SCRIPT), *arguments]
    environment |= {"OUT": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = list(folder.glob("gpu_check_*.json"))
    assert len(found) == 1, done.stderr[-3000:]
    assert found[0].with_suffix(".txt").read_text(encoding="utf-8") == done.stdout
    return done.returncode, json.loads(found[0].read_text(encoding="utf-8")), done.stdout + done.stderr


def test_dry_run_passes_every_stage(tmp_path: Path) -> None:
    status, document, printed = run_script(tmp_path, "--dry-run", "--seed", "7")
    rows = document["rows"]
    assert status == 0, printed[-6000:]
    assert document["about"]["seed"] == 7 and document["about"]["dry_run"]
    checked = {row["stage"] for row in rows if row["kind"] == "check"}
    assert checked == {"kernels", "graph", "decode", "tree", "extension", "prefill", "model"}
    timed = {(row["stage"], row["what"]) for row in rows if row["kind"] == "time"}
    stages = {"decode", "tree", "extension", "prefill"}
    assert {(stage, what) for stage in stages for what in ("radixkv", "radixkv exact", "sdpa math")} <= timed
    # Compiled and paged on a GPU, the same masks in eager mode here.
    assert {(stage, "flex paged") for stage in stages - {"tree"}} <= timed
    generated = {row["what"] for row in rows if row["stage"] == "model" and row["kind"] == "time"}
    assert generated >= {"generate, unpatched", "radixkv no graph, cold", "radixkv no graph, warm"}
    # What is not installed is named, not dropped.
    assert {row["what"] for row in rows if row["kind"] == "missing"} >= {"flashinfer", "sglang triton", "vllm triton"}


def test_a_stage_that_breaks_is_reported_and_fails_the_run(tmp_path: Path) -> None:
    """Not a dry run, and no GPU."""
    status, document, printed = run_script(tmp_path, "--stages", "rates")
    assert status == 1
    assert [row["kind"] for row in document["rows"]] == ["broken"]
    assert "BROKEN rates: " in printed


def test_stages_fit_in_eight_minutes() -> None:
    from radixkv.bench.gpu_check import STAGES

    assert sum(seconds for _, _, seconds in STAGES.values()) <= 460


def test_percentages_ratios_and_goals(tmp_path: Path) -> None:
    rows_path = tmp_path / "rows.jsonl"
    timing = {"us": 100.0, "low_us": 99.0, "high_us": 101.0, "num_runs": 5, "graph": True}
    rates = gpu_report.Report(rows_path, "rates")
    rates.rate("copy GB/s", 4000.0)
    rates.rate("matrix TFLOP/s", 800.0)
    decode = gpu_report.Report(rows_path, "decode")
    decode.check("64 x 8k, block 64", True, "off by 1e-3")
    decode.time("64 x 8k, block 64", "radixkv", timing, num_bytes=380_000_000)
    decode.time("64 x 8k, block 64", "sdpa flash", {**timing, "us": 150.0}, num_bytes=380_000_000)
    decode.time("64 x 8k, block 64", "flex paged", {**timing, "us": 120.0}, num_bytes=380_000_000)
    prefill = gpu_report.Report(rows_path, "prefill")
    prefill.time("16k causal", "radixkv", timing, num_flop=40_000_000_000)
    with rows_path.open("a", encoding="utf-8") as file:
        file.write('{"stage": "prefill", "kind": "ti')  # killed while it wrote
    rows = gpu_report.complete(gpu_report.read_rows(rows_path))
    ours = next(row for row in rows if row["stage"] == "decode" and row.get("what") == "radixkv")
    assert (ours["gbps"], ours["percent_of_copy"]) == (3800.0, 95.0)
    assert (ours["best_peer"], ours["times_best_peer"]) == ("flex paged", 1.2)
    measured = dict(gpu_report.goals(rows))
    assert measured["decode >= 90 % of copy rate at 64 x 8k"] == "95.0 %, met"
    assert measured["prefill >= 60 % of matrix rate, causal 16k d128"] == "50.0 %, missed"
    assert measured["short extension >= 3 x SGLang's"] == "not measured"
    assert gpu_report.all_ok(rows)
    assert "3800" in gpu_report.table(rows) and "(flex paged)" in gpu_report.table(rows)
    for case in ("a", "b"):
        decode.missing(case, "flashinfer", "not installed")
    decode.check("another", False, "off by 1")
    rows = gpu_report.read_rows(rows_path)
    assert not gpu_report.all_ok(rows)
    printed = gpu_report.table(rows).splitlines()
    assert "not measured: flashinfer: not installed: decode a, decode b" in printed
    assert "FAILED decode: another: off by 1" in printed


def test_no_check_at_all_is_no_success() -> None:
    assert not gpu_report.all_ok([])


def test_bytes_and_operations_of_attention() -> None:
    # 3 keys, 2 K/V heads of 64 in 2 bytes, K and V.
    assert gpu_timing.kv_bytes(3, 2, 64, 2) == 2 * 3 * 2 * 64 * 2
    assert gpu_timing.row_bytes(5, 14, 64, 2) == 2 * 5 * 14 * 64 * 2
    assert gpu_timing.partial_bytes(4, 14, 64) == 2 * 4 * 14 * 65 * 4
    # Two new tokens on three see 4 and 5 keys, one on none sees 1.
    assert gpu_timing.attention_flop([2, 1], [5, 1], 3, 64) == 4 * (4 + 5 + 1) * 3 * 64


def test_timing_is_median_and_percentiles() -> None:
    timing = gpu_timing.Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 100.0], graph=True)
    assert (timing.low_us, timing.us, timing.high_us, timing.num_runs) == (2.0, 3.0, 5.0, 6)


def test_case_shares_blocks_and_is_what_the_reference_computes() -> None:
    """Sequences that begin alike name the same blocks, and what they do not hold is NaN."""
    heads = gpu_cases.Heads(6, 2, 64)
    case = gpu_cases.build_case("tree", gpu_cases.shared(3, 32, 21), heads=heads, phase="decode", block_size=16, dtype=torch.float32)
    assert case.seq_lens == [53] * 3 and case.num_unique == 32 + 3 * 21
    assert (case.table[:, :2] == case.table[0, :2]).all() and len(set(case.table[:, 2].tolist())) == 3
    assert int(case.k_pool.isnan().all(dim=(1, 3)).sum()) == 3 * 16 + 3 * (32 - 21)
    wanted, _ = reference.decode_attention(
        case.query.double(), case.k_pool.double(), case.v_pool.double(), case.block_table, case.seq_lens_device, scale=case.scale
    )
    assert attention_error(case.exact_rows([0, 2]), wanted[[0, 2]]) < 1e-12
    key = case.gather(case.k_pool)
    assert key.shape == (3, 2, 53, 64) and not key.isnan().any()
    assert torch.equal(key[0, :, :32], key[2, :, :32]) and not torch.equal(key[0], key[2])


def test_case_of_prompts_is_what_the_reference_computes() -> None:
    heads = gpu_cases.Heads(4, 2, 64)
    case = gpu_cases.build_case(
        "extension", gpu_cases.flat(2, 40), heads=heads, phase="prefill", query_lens=[5, 5], block_size=16, dtype=torch.float32
    )
    wanted, _ = reference.prefill_attention(
        case.query.double(),
        case.k_pool.double(),
        case.v_pool.double(),
        case.block_table,
        case.cu_query_lens,
        case.seq_lens_device,
        scale=case.scale,
    )
    assert attention_error(case.exact_rows(range(10)), wanted) < 1e-12
    assert case.flop == 2 * gpu_timing.attention_flop([5], [40], 4, 64)
