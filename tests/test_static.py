"""The reader of machine code reads right, and the attention kernels' machine code for sm_90 is as fast as it must be."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

import pytest
import triton

from radixkv.bench import sass, static
from tests.compiled import ROOT, read_json

Row = dict[str, Any]
INF = float("inf")

# Least and most of each figure, for the kernels of many rows, prefill and extend, and of few, decode.
MANY_ROWS: dict[str, tuple[float, float]] = {
    "loop_spills": (0, 0),
    "wgmma_serialised": (False, False),
    "load_overlap": (0.99, 1),
    "in_flight_kb_per_sm": (64, INF),
    "ex2_per_score": (1, 1.1),
    "diagonal_ratio": (1, 1.35),
}
FEW_ROWS: dict[str, tuple[float, float]] = {
    "spills": (0, 0),
    "ctas_per_sm": (3, INF),
    "load_overlap": (0.99, 1),
    "in_flight_kb_per_sm": (96, INF),
    "barriers_per_trip": (0, 2),
}
# By (head_dim, block_size).
INSTRUCTIONS_PER_KB = {(64, 16): 76, (64, 64): 60, (128, 16): 47, (128, 64): 47}
FLOP_PER_SLOT = {(64, 16): 750, (64, 64): 790, (128, 16): 1150, (128, 64): 1300}

USAGE = " Function kernel:\n  REG:40 STACK:0 SHARED:0 LOCAL:0 TEXTURE:0\n"
# An outer loop over .L_x_1 .. .L_x_4; inside it a loop whose second half, .L_x_3, lies behind the end of the outer one, and a branch
# around it; at the end what every kernel ends with, an endless loop that nothing reaches.
NESTED = """
	.section	.text.kernel,"ax",@progbits
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   ISETP.GE.AND P0, PT, R2, R3, PT ;
        /*0020*/              @P0  BRA `(.L_x_4) ;
.L_x_2:
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0040*/                   BRA `(.L_x_3) ;
.L_x_5:
        /*0050*/                   STG.E desc[UR4][R2.64], R4 ;
.L_x_4:
        /*0060*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0070*/                   BRA P1, `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   FADD R5, R4, R5 ;
        /*00a0*/             @!P2  BRA `(.L_x_2) ;
        /*00b0*/                   BRA `(.L_x_5) ;
.L_x_6:
        /*00c0*/                   BRA `(.L_x_6);
        /*00d0*/                   NOP;
"""


def loop_of(*opcodes: str) -> sass.Loop:
    """Return a loop of instructions, each an opcode and, behind a space, its operands."""
    return sass.Loop(tuple(sass.Instruction(16 * index, "", *(text + " ").split(" ", 1)) for index, text in enumerate(opcodes)))


@lru_cache(maxsize=1)
def samples() -> dict[str, Row]:
    return read_json("tests/compiled_samples.py")


@lru_cache(maxsize=1)
def rows() -> list[Row]:
    return read_json("bench/static.py", "--json")


def test_loops_are_found_whatever_their_layout() -> None:
    program = sass.parse(NESTED, USAGE, 4, 0)
    assert len(program.instructions) == 14 and program.registers == 40
    assert sorted(sorted(loop.offsets) for loop in program._all_loops()) == [
        [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x90, 0xA0, 0xB0],
        [0x30, 0x40, 0x90, 0xA0],
    ]
    assert [sorted(loop.offsets) for loop in program.loops] == [[0x30, 0x40, 0x90, 0xA0]]


def test_no_kernel_in_the_output_is_an_error() -> None:
    with pytest.raises(ValueError, match="must hold a kernel, got 0 instructions"):
        sass.parse("", USAGE, 4, 0)
    with pytest.raises(ValueError, match="must hold a kernel, got 14 instructions"):
        sass.parse(NESTED, "", 4, 0)


@pytest.mark.parametrize(
    ("opcode", "load_bytes", "flops"),
    [
        pytest.param("LDG.E.128", 512, 0, id="plain load"),
        pytest.param("LDG.E.64.CONSTANT", 256, 0, id="plain load of 8 bytes"),
        pytest.param("LDGSTS.E.BYPASS.LTC128B.128", 512, 0, id="cp.async"),
        pytest.param("LDGSTS.E.LTC128B", 0, 0, id="cp.async of a block id"),
        pytest.param("LDS.128", 0, 0, id="shared memory"),
        pytest.param("HGMMA.64x128x16.F32.BF16", 0, 2 * 64 * 128 * 16 // 4, id="wgmma"),
        pytest.param("HMMA.16816.F32.BF16", 0, 2 * 16 * 8 * 16, id="mma"),
    ],
)
def test_work_of_one_instruction(opcode: str, load_bytes: int, flops: int) -> None:
    instruction = sass.Instruction(0, "", opcode, "")
    assert (instruction.load_bytes, instruction.flops) == (load_bytes, flops)


def test_loads_in_flight_are_those_between_commit_and_wait() -> None:
    load, commit, work = "LDGSTS.E.BYPASS.128", "LDGDEPBAR", "FADD"
    at_once = loop_of(load, commit, "DEPBAR.LE SB0, 0x0", work, work)
    assert at_once.load_overlap == 0 and at_once.in_flight_bytes == 512
    one_behind = loop_of("DEPBAR.LE SB0, 0x1", work, load, commit, work, work)
    assert one_behind.load_overlap == 1 and one_behind.in_flight_bytes == 2 * 512
    half = loop_of("DEPBAR.LE SB0, 0x0", work, load, commit, work, work)
    assert half.load_overlap == 2 / 4 and half.in_flight_bytes == 512
    only_ids = loop_of("DEPBAR.LE SB0, 0x1", load, commit, "DEPBAR.LE SB0, 0x0", work, "LDGSTS.E", commit, work)
    assert only_ids.load_overlap == 0


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "ctas"),
    [
        pytest.param(168, 4, 0, 3, id="registers for twelve warps"),
        pytest.param(169, 4, 0, 2, id="one register more: eight warps"),
        pytest.param(32, 4, 75 << 10, 3, id="shared memory, with 1 KB each for the system"),
        pytest.param(32, 4, 76 << 10, 2, id="shared memory for two"),
        pytest.param(32, 1, 0, 32, id="programs"),
        pytest.param(32, 8, 0, 8, id="warps"),
    ],
)
def test_programs_per_multiprocessor(registers: int, num_warps: int, shared_bytes: int, ctas: int) -> None:
    """Computed by hand from CUDA's occupancy calculator's rules for compute capability 9.0."""
    assert sass.Program((), {}, registers, num_warps, shared_bytes).ctas_per_sm == ctas


def test_a_pipelined_loop_is_read_as_written() -> None:
    """A [128, 64] x [64, 64] dot over eight warps, tiles of 64 x 64 in bfloat16."""
    for name, stages in (("pipelined", 3), ("deeper", 5)):
        sample = samples()[name]
        assert sample["loops"] == [{"flops": 2 * 128 * 64 * 64, "load_bytes": 64 * 64 * 2, "is_async": True}]
        assert sample["load_overlap"] == 1 and sample["spills"] == 0 and sample["wgmma_serialised"] is False
        assert sample["in_flight_kb_per_sm"] == (stages - 1) * 8 * sample["ctas_per_sm"]


def test_a_loop_that_waits_for_its_loads_shows() -> None:
    assert samples()["not pipelined"]["load_overlap"] == 0 and not samples()["not pipelined"]["loops"][0]["is_async"]
    # The address of a load is itself loaded: two stages are used up before anything overlaps.
    assert samples()["too shallow"]["load_overlap"] < 0.1
    assert samples()["deep enough"]["load_overlap"] >= 0.99


def test_spills_show() -> None:
    assert samples()["spilling"]["spills"] > samples()["spilling"]["loop_spills"] > 0
    assert samples()["sum"]["spills"] == samples()["sum"]["loop_spills"] == 0


def test_serialised_wgmma_shows() -> None:
    assert samples()["starved"]["wgmma_serialised"] is True
    assert samples()["one warp"]["wgmma_serialised"] is None and samples()["one warp"]["flop_per_slot"] > 0


def test_exponentials_are_counted_per_score() -> None:
    assert samples()["two dots"]["ex2_per_score"] == samples()["starved"]["ex2_per_score"] == 1
    assert samples()["pipelined"]["ex2_per_score"] == 0


def test_figures_that_do_not_apply_are_null() -> None:
    sample = samples()["sum"]
    assert sample["in_flight_kb_per_sm"] > 0 and sample["barriers_per_trip"] == 0
    assert [name for name in static.FIGURES if sample[name] is None] == list(static.FIGURES[5:6] + static.FIGURES[7:])


def test_masked_loops_are_held_against_the_steady_one() -> None:
    """The steady loop has the fewest instructions per operation, in trips of whatever length."""
    steady, masked = ["HMMA.16816"] * 4 + ["FADD"] * 4, ["HMMA.16816"] * 2 + ["FADD"] * 4
    lines: list[str] = []
    for label, body in (("a", masked), ("b", steady)):
        lines += [f".L_{label}:", *body, f"@P0 BRA `(.L_{label})"]
    lines.append("EXIT")
    listing = "\n".join(line if line.endswith(":") else f"  /*{16 * index:04x}*/  {line} ;" for index, line in enumerate(lines))
    row = static.figures(sass.parse(listing, USAGE, 4, 0), 64)
    assert row["flop_per_slot"] == round(4 * 4096 / 9, 1)
    assert row["diagonal_ratio"] == round((7 / 2) / (9 / 4), 2)


def test_interpreted_kernels_are_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "static.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "unset TRITON_INTERPRET" in done.stderr


def test_every_kernel_of_every_model_is_measured() -> None:
    got = {(row["kernel"], row["model"], row["block_size"], row["window"]) for row in rows()}
    wanted = {
        (kernel, model, block_size, window)
        for kernel in ("decode", "prefill", "extend", "merge")
        for model in static.MODELS
        for block_size in static.BLOCK_SIZES
        for window in (None, static.WINDOW)
    }
    assert got == wanted and len(rows()) == len(wanted)
    assert {row["triton"] for row in rows()} == {triton.__version__}
    assert all(set(static.FIGURES) <= set(row) for row in rows())


def test_the_table_has_a_line_per_row() -> None:
    lines = static.format_table(rows()).splitlines()
    assert len(lines) == len(rows()) + 2 and len({len(line) for line in lines}) == 1
    assert all(name in lines[0] for name in static.FIGURES)


def outside(row: Row, gates: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the figures that are missing or not between their bounds."""
    return {name: row[name] for name, (least, most) in gates.items() if row[name] is None or not least <= row[name] <= most}


def test_a_missing_figure_passes_no_gate() -> None:
    row = {"spills": None, "load_overlap": 0.98, "ctas_per_sm": 3}
    assert outside(row, {"spills": (0, 0), "load_overlap": (0.99, 1), "ctas_per_sm": (3, INF)}) == {"spills": None, "load_overlap": 0.98}


@pytest.mark.parametrize("window", [None, static.WINDOW])
@pytest.mark.parametrize("block_size", static.BLOCK_SIZES)
@pytest.mark.parametrize("model", static.MODELS)
@pytest.mark.parametrize("kernel", ["decode", "prefill", "extend", "merge"])
def test_machine_code_is_as_fast_as_it_must_be(kernel: str, model: str, block_size: int, window: int | None) -> None:
    case = (kernel, model, block_size, window)
    (row,) = (row for row in rows() if (row["kernel"], row["model"], row["block_size"], row["window"]) == case)
    size = (row["head_dim"], block_size)
    gates: dict[str, dict[str, tuple[float, float]]] = {
        "decode": {**FEW_ROWS, "instructions_per_kb": (0, INSTRUCTIONS_PER_KB[size])},
        "prefill": {**MANY_ROWS, "flop_per_slot": (FLOP_PER_SLOT[size], INF)},
        "extend": {**MANY_ROWS, "flop_per_slot": (FLOP_PER_SLOT[size], INF)},
        "merge": {"spills": (0, 0)},
    }
    assert not outside(row, gates[kernel])
