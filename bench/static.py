"""What the GPU's compiler made of the attention kernels, for sm_90 in bfloat16, read on a machine without a GPU.

    python bench/static.py          a table
    python bench/static.py --json   the same as a list of objects

The launchers' own configurations are compiled for three models, two block sizes, with a sliding window and without; code for
ragged ends and empty rows is in all of them. The steady loop of a kernel, that over whole tiles, is the one with the fewest
instructions per tensor operation; masked loops are held against it. A figure that does not apply is null:

    registers            per thread
    spills, loop_spills  instructions that move registers to memory and back, in all and in the loops
    ctas_per_sm          programs that a multiprocessor holds at a time, by registers, shared memory and warps
    in_flight_kb_per_sm  K and V asked for and not yet waited for, at most, all programs of a multiprocessor together, in 1,024 bytes
    instructions_per_kb  warp instructions per 1,024 bytes of K and V in the steady loop
    barriers_per_trip    of all threads of a program, in a trip of the steady loop
    load_overlap         share of the steady loop's instructions issued while a load of K or V is in flight
    flop_per_slot        tensor-core operations per instruction of a warp in the steady loop
    ex2_per_score        exponentials per score q . k in the steady loop
    diagonal_ratio       instructions of the heaviest masked loop per trip over those of the steady loop
    wgmma_serialised     whether any loop waits for each wgmma by itself
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import torch
import triton

from radixkv.bench import sass
from radixkv.bench.launches import HEAD_SHAPES, Launch, kernel_launches
from radixkv.progress import progress_bar

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")
BLOCK_SIZES = (16, 64)
WINDOW = 4096
FIGURES = (
    "registers",
    "spills",
    "loop_spills",
    "ctas_per_sm",
    "in_flight_kb_per_sm",
    "instructions_per_kb",
    "barriers_per_trip",
    "load_overlap",
    "flop_per_slot",
    "ex2_per_score",
    "diagonal_ratio",
    "wgmma_serialised",
)
Row = dict[str, Any]


def figures(program: sass.Program, head_dim: int) -> Row:
    """Return the figures of one compiled kernel; head_dim is that of its tiles, padding included."""
    loops = program.loops
    row: Row = dict.fromkeys(FIGURES)
    row.update(registers=program.registers, spills=program.spills, ctas_per_sm=program.ctas_per_sm)
    if not loops:
        return row
    steady = min(loops, key=lambda loop: loop.length / (loop.flops or loop.load_bytes))
    row.update(
        loop_spills=sum(loop.count("LDL") + loop.count("STL") for loop in loops),
        in_flight_kb_per_sm=round(steady.in_flight_bytes * program.num_warps * program.ctas_per_sm / 1024, 1),
        barriers_per_trip=steady.count("BAR"),
    )
    if not steady.flops:
        return row
    # A score is a dot product over head_dim, and so is its part in the output: two operations per element each.
    num_scores = steady.flops / (4 * head_dim)
    masked = [loop.length / loop.flops for loop in loops if loop is not steady]
    row.update(
        instructions_per_kb=round(steady.length / (steady.load_bytes / 1024), 1) if steady.load_bytes else None,
        load_overlap=round(steady.load_overlap, 3),
        flop_per_slot=round(steady.flops / steady.length, 1),
        ex2_per_score=round(steady.count("MUFU.EX2") * 32 / num_scores, 3),
        diagonal_ratio=round(max(masked) * steady.flops / steady.length, 2) if masked else None,
        wgmma_serialised=any(loop.is_serialised for loop in loops) if any(loop.count("HGMMA") for loop in loops) else None,
    )
    return row


def measure(launch: Launch, head_dim: int) -> Row:
    """Compile one launch for sm_90 and return its figures."""
    compiled = launch.compile()
    tile_d = triton.next_power_of_2(head_dim)
    return figures(sass.read(compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared), tile_d)


def measure_case(case: tuple[str, int, int | None]) -> list[Row]:
    """Return a row per kernel that one model's layers launch, for a block size and a sliding window or None."""
    model, block_size, window = case
    return [
        {
            "kernel": launch.module,
            "model": model,
            **dict(zip(("num_heads", "num_kv_heads", "head_dim"), HEAD_SHAPES[model], strict=True)),
            "block_size": block_size,
            "window": window,
            "triton": triton.__version__,
            **measure(launch, HEAD_SHAPES[model][2]),
        }
        for launch in kernel_launches(HEAD_SHAPES[model], torch.bfloat16, block_size, sliding_window=window)
    ]


def measure_all() -> list[Row]:
    """Measure every case, several at a time where there are cores for it."""
    cases = list(product(MODELS, BLOCK_SIZES, (None, WINDOW)))
    # Spawned, not forked: torch and LLVM may have started threads.
    workers = ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    rows: list[Row] = []
    with workers as pool, progress_bar("compile", len(cases), True, unit="case") as advance:
        for case_rows in pool.map(measure_case, cases):
            rows += case_rows
            advance(1)
    return sorted(rows, key=lambda row: (row["kernel"], row["head_dim"], row["num_heads"], row["block_size"], row["window"] or 0))


def format_table(rows: list[Row]) -> str:
    """Return rows as a table in Markdown."""
    titles = ["kernel", "model", "head_dim", "block_size", "window", *FIGURES]
    cells = [titles, *(["-" if row[title] is None else str(row[title]) for title in titles] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Figures of the attention kernels' machine code for sm_90; needs no GPU.")
    parser.add_argument("--json", action="store_true", help="print a list of objects in place of the table")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("interpreted kernels cannot be compiled: unset TRITON_INTERPRET")
    rows = measure_all()
    print(json.dumps(rows, indent=1) if arguments.json else f"Triton {triton.__version__}, sm_90, bfloat16\n{format_table(rows)}")


if __name__ == "__main__":
    main()
