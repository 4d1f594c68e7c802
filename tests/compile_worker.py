"""Compile what the launchers launch for a GPU that is not there, and print what came out as JSON.

Run as `python tests/compile_worker.py sm_90` (or `variants`) with TRITON_INTERPRET unset: interpreted functions cannot be
compiled. The real launchers run on meta tensors while JITFunction.run only takes notes, so constants and options are their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from radixkv.kernels import configs, decode, prefill, store
from radixkv.kernels.checks import dtype_name
from radixkv.kernels.work import Phase, build_work

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ARCH = {"sm_80": "cuda", "sm_86": "cuda_small", "sm_90": "cuda", "sm_100": "cuda", "gfx942": "hip"}
# Query heads, K/V heads, head_dim.
HEAD_SHAPES = {
    "qwen2.5-0.5b": (14, 2, 64),
    "qwen2.5-7b": (28, 4, 128),
    "deepseek-r1-distill-qwen-1.5b": (12, 2, 128),
    "smollm2-135m": (9, 3, 64),
    "d80": (8, 1, 80),
    "d96": (5, 5, 96),
    "d256": (16, 2, 256),
}
POINTER = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def record(launch: Callable[[], Any]) -> list[Launch]:
    """Run a launcher and return (kernel, arguments, keywords) of each launch, launching nothing."""
    launches: list[Launch] = []
    original = triton.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    triton.JITFunction.run = run
    try:
        launch()
    finally:
        triton.JITFunction.run = original
    return launches


def arguments_and_options(launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split one recorded launch into the kernel's arguments by name and Triton's launch options."""
    kernel, args, kwargs = launch
    arguments = dict(zip(kernel.arg_names, args, strict=False))
    arguments.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
    return arguments, {name: value for name, value in kwargs.items() if name not in kernel.arg_names}


def variant(launch: Launch) -> str:
    """Write down all that makes Triton compile anew: constants, options, dtypes, and what it specializes integers on."""
    arguments, options = arguments_and_options(launch)
    parts = [launch[0].fn.__name__, *(f"{name}={value}" for name, value in options.items())]
    for parameter in launch[0].params:
        value = arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            parts.append(f"{parameter.name}: {value.dtype}")
        elif parameter.is_constexpr or value is None:
            parts.append(f"{parameter.name}={value}")
        elif isinstance(value, int) and not parameter.do_not_specialize:
            parts.append(f"{parameter.name}: is one {value == 1}, multiple of sixteen {value % 16 == 0}")
    return " ".join(parts)


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """Compile one recorded launch ahead of time."""
    kernel = launch[0]
    named, options = arguments_and_options(launch)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, name in enumerate(kernel.arg_names):
        value = named[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTER[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name.isupper() or value is None:
            signature[name] = "constexpr"
            constants[name] = value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Read registers, stack and local memory per thread from a cubin with the tool in Triton's wheel; a spill takes stack."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}


def attention_launches(
    kernel: Phase, shape: str, dtype: torch.dtype, block_size: int, arch: str, features: dict[str, Any], num_seqs: int = 1
) -> list[Launch]:
    """Return the launches of one attention call over num_seqs sequences of one token."""
    num_heads, num_kv_heads, head_dim = HEAD_SHAPES[shape]
    group = num_heads // num_kv_heads
    prefill.current_arch = decode.current_arch = lambda tensor: arch
    tile_q = configs.prefill_config(head_dim, group, dtype, block_size, arch).tile_q
    chunk = configs.decode_config(head_dim, group, dtype, block_size, arch).chunk
    ones = [1] * num_seqs
    work = build_work([[0]] * num_seqs, ones, ones, phase=kernel, backend="triton", tile_q=tile_q, chunk=chunk, device="meta")

    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    k_pool, v_pool = (empty(8, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2))
    # As models hand it over: [heads, tokens, head_dim], so that a stride grows with the batch.
    query = empty(num_heads, num_seqs, head_dim, dtype=dtype).transpose(0, 1)
    table, lens, borders = empty(num_seqs, num_seqs + 3, dtype=torch.int32), empty(num_seqs, dtype=torch.int32), num_seqs + 1
    options = {"scale": 0.1, "plan": work, **features}
    if kernel == "prefill":
        cu_query_lens = empty(borders, dtype=torch.int32)
        return record(lambda: prefill.prefill_attention(query, k_pool, v_pool, table, cu_query_lens, lens, **options))
    return record(lambda: decode.decode_attention(query, k_pool, v_pool, table, lens, **options))


def move_launches(dtype: torch.dtype, block_size: int, head_dim: int, num_rows: int = 3) -> list[Launch]:
    """Return the launches of store_kv and rope_store_kv, with and without source rows, of copy_blocks and of merge_partials."""
    k_pool, v_pool = (torch.empty((8, 2, block_size, head_dim), dtype=dtype, device="meta") for _ in range(2))
    rows = torch.empty((2, num_rows, head_dim), dtype=dtype, device="meta").transpose(0, 1)
    query = torch.empty((14, num_rows, head_dim), dtype=dtype, device="meta").transpose(0, 1)
    angles = torch.empty((num_rows, head_dim), dtype=dtype, device="meta")
    ids = torch.empty(num_rows, dtype=torch.int64, device="meta")
    counts = ids.int()
    part_out = torch.empty((num_rows, 4, head_dim), dtype=torch.float32, device="meta")
    return [
        *record(lambda: store.store_kv(k_pool, v_pool, rows, rows, ids)),
        *record(lambda: store.store_kv(k_pool, v_pool, rows, rows, ids, counts)),
        *record(lambda: store.rope_store_kv(query, rows, rows, angles, angles, k_pool, v_pool, ids)),
        *record(lambda: store.rope_store_kv(query, rows, rows, angles, angles, k_pool, v_pool, ids, counts)),
        *record(lambda: store.copy_blocks([(k_pool, v_pool)], ids, ids, counts)),
        *record(lambda: decode.merge_partials(part_out, part_out[..., 0].contiguous())),
    ]


def cases(target: str) -> Iterator[tuple[str, torch.dtype, int, dict[str, Any]]]:
    """Yield (head shape, dtype, block size, features): all the table on sm_90, a row of each kind elsewhere."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for index, shape in enumerate(HEAD_SHAPES):
        yield shape, bf16, 64 if target == "sm_90" else configs.BLOCK_SIZES[index % 4], {}
    yield "qwen2.5-0.5b", fp16, 64, {"sliding_window": 7, "softcap": 30.0}
    yield "qwen2.5-7b", fp32, 16, {}
    if target != "sm_90":
        return
    for shape in ("qwen2.5-0.5b", "qwen2.5-7b"):
        for block_size in (16, 32, 128):
            yield shape, bf16, block_size, {}
        yield shape, bf16, 16, {"sliding_window": 7}
        yield shape, bf16, 64, {"softcap": 30.0}
        yield shape, fp16, 16, {}
        yield shape, fp16, 64, {}
        yield shape, fp32, 64, {}
    yield "qwen2.5-0.5b", fp32, 16, {}
    yield "qwen2.5-7b", bf16, 64, {"sliding_window": 7, "softcap": 30.0}
    yield "qwen2.5-7b", fp32, 64, {"sliding_window": 7, "softcap": 30.0}


def compile_all(target: str) -> list[dict[str, Any]]:
    """Compile every case for one target and return a row of figures for each kernel."""
    launches: list[tuple[dict[str, Any], Launch]] = []
    for shape, dtype, block_size, features in cases(target):
        about = {"shape": shape, "head_dim": HEAD_SHAPES[shape][2], "dtype": dtype_name(dtype), "block_size": block_size, **features}
        # The merge of partials, the second launch of decode, is among the moves below.
        launches.append((about, attention_launches("prefill", shape, dtype, block_size, ARCH[target], features)[0]))
        launches.append((about, attention_launches("decode", shape, dtype, block_size, ARCH[target], features)[0]))
    for head_dim in configs.HEAD_DIMS:
        about = {"shape": "moves", "head_dim": head_dim, "dtype": "bfloat16", "block_size": 64}
        launches += [(about, launch) for launch in move_launches(torch.bfloat16, 64, head_dim)]
    rows = []
    for about, launch in launches:
        compiled = compile_launch(launch, TARGETS[target])
        row = {"kernel": launch[0].fn.__name__, **about, "num_warps": launch[2]["num_warps"], "num_stages": launch[2].get("NUM_STAGES")}
        row["shared_bytes"] = compiled.metadata.shared
        row["wgmma"] = compiled.asm["ptx"].count("wgmma.mma_async") if "ptx" in compiled.asm else 0
        if target == "sm_90":
            row.update(resource_usage(compiled.asm["cubin"]))
        rows.append(row)
    return rows


def all_variants() -> list[str]:
    """Return the different compilations that batches of 1 to 40 sequences ask for, on one model's heads."""
    launches: list[Launch] = []
    for size in range(1, 41):
        launches += attention_launches("prefill", "qwen2.5-0.5b", torch.bfloat16, 64, "cuda", {"sliding_window": size}, size)
        launches += attention_launches("decode", "qwen2.5-0.5b", torch.bfloat16, 64, "cuda", {"sliding_window": size}, size)
        launches += move_launches(torch.bfloat16, 64, 64, size)
    return sorted({variant(launch) for launch in launches})


if __name__ == "__main__":
    print(json.dumps(all_variants() if sys.argv[1] == "variants" else compile_all(sys.argv[1])))
