"""Compile what the launchers launch for GPUs that are not there, and print what came out as JSON.

Run as `python tests/compile_worker.py sm_90` (or `variants`) with TRITON_INTERPRET unset: interpreted functions cannot be
compiled.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from radixkv.bench import sass
from radixkv.bench.launches import HEAD_SHAPES, SM_90, Launch, attention_launches, kernel_launches, move_launches
from radixkv.kernels import configs
from radixkv.kernels.checks import dtype_name
from radixkv.kernels.work import Phase

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": SM_90,
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARCH = {"sm_80": "cuda", "sm_86": "cuda_small", "sm_90": "cuda", "sm_100": "cuda", "gfx942": "hip"}


def spills(cubin: bytes, num_warps: int, shared_bytes: int) -> dict[str, int]:
    """Count the instructions that move registers to local memory or back, and those in the innermost loops among them."""
    usage = sass.run_tool("cuobjdump", "--dump-resource-usage", cubin)
    # A kernel that uses no stack has none, and need not be taken apart.
    if re.search(r"\bSTACK:0\b.*\bLOCAL:0\b", usage):
        return {"spills": 0, "loop_spills": 0}
    program = sass.read(cubin, num_warps, shared_bytes)
    return {"spills": program.spills, "loop_spills": sum(loop.count("LDL") + loop.count("STL") for loop in program.loops)}


def cases(target: str) -> Iterator[tuple[str, torch.dtype, int, dict[str, Any]]]:
    """Yield (head shape, dtype, block size, features): all the table on sm_90, a row of each kind elsewhere."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    # The shapes of real models differ by their group, which is the same code everywhere.
    shapes = [shape for shape in HEAD_SHAPES if target == "sm_90" or shape not in ("qwen2.5-1.5b", "smollm2-135m")]
    for index, shape in enumerate(shapes):
        yield shape, bf16, 64 if target == "sm_90" else configs.BLOCK_SIZES[index % 4], {}
    yield "qwen2.5-0.5b", fp16, 64, {"sliding_window": 4096, "softcap": 30.0}
    yield "qwen2.5-7b", fp32, 16, {}
    if target != "sm_90":
        return
    for shape in ("qwen2.5-0.5b", "qwen2.5-7b"):
        for block_size in (16, 32, 128):
            yield shape, bf16, block_size, {}
        yield shape, bf16, 16, {"sliding_window": 4096}
        yield shape, bf16, 64, {"softcap": 30.0}
        yield shape, fp16, 16, {}
        yield shape, fp16, 64, {}
        yield shape, fp32, 64, {}
    yield "qwen2.5-0.5b", fp32, 16, {}
    # Where a window changes the configuration.
    for block_size in (32, 64, 128):
        yield "qwen2.5-0.5b", bf16, block_size, {"sliding_window": 4096}
    yield "qwen2.5-0.5b", fp16, 16, {"sliding_window": 4096}
    yield "qwen2.5-7b", bf16, 64, {"sliding_window": 4096, "softcap": 30.0}
    yield "qwen2.5-7b", fp32, 64, {"sliding_window": 4096, "softcap": 30.0}


def compile_all(target: str) -> list[dict[str, Any]]:
    """Compile every case for one target and return a row of figures for each kernel."""
    launches: list[tuple[dict[str, Any], Launch]] = []
    for shape, dtype, block_size, features in cases(target):
        about = {"shape": shape, "head_dim": HEAD_SHAPES[shape][2], "dtype": dtype_name(dtype), "block_size": block_size, **features}
        launches += [(about, launch) for launch in kernel_launches(HEAD_SHAPES[shape], dtype, block_size, arch=ARCH[target], **features)]
    for head_dim in configs.HEAD_DIMS:
        about = {"shape": "moves", "head_dim": head_dim, "dtype": "bfloat16", "block_size": 64}
        launches += [(about, launch) for launch in move_launches(torch.bfloat16, 64, head_dim)]
    rows = []
    for about, launch in launches:
        compiled = launch.compile(TARGETS[target])
        row = {"kernel": launch.kernel.fn.__name__, **about, "num_warps": launch.options["num_warps"]}
        row["shared_bytes"] = compiled.metadata.shared
        row["wgmma"] = compiled.asm["ptx"].count("wgmma.mma_async") if "ptx" in compiled.asm else 0
        if target == "sm_90":
            row.update(spills(compiled.asm["cubin"], compiled.metadata.num_warps, compiled.metadata.shared))
        rows.append(row)
    return rows


def all_variants() -> list[str]:
    """Return the different compilations that 200 random steps of one model ask for: prompts, generation, and both at a time."""
    numbers = random.Random(0)
    launches: list[Launch] = []
    for _ in range(200):
        num_seqs = numbers.randint(1, 40)
        mixed: list[Phase] = [numbers.choice(("prefill", "decode")) for _ in range(num_seqs)]
        phases: Phase | list[Phase] = numbers.choice(("prefill", "decode", mixed))
        query_lens = [
            1 if phase == "decode" else numbers.choice((1, 2, 20, 300))
            for phase in ([phases] * num_seqs if isinstance(phases, str) else phases)
        ]
        seq_lens = [query_len + numbers.choice((0, 1, 15, 100, 9000)) for query_len in query_lens]
        window = numbers.choice((None, 1, 16, 1000))
        launches += attention_launches(
            phases,
            HEAD_SHAPES["qwen2.5-0.5b"],
            torch.bfloat16,
            64,
            query_lens=query_lens,
            seq_lens=seq_lens,
            sliding_window=window,
        )
        launches += move_launches(torch.bfloat16, 64, 64, num_seqs)
    return sorted({launch.variant() for launch in launches})


if __name__ == "__main__":
    print(json.dumps(all_variants() if sys.argv[1] == "variants" else compile_all(sys.argv[1])))
