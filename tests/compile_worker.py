"""Compile what the launchers launch for a GPU that is not there, and print what came out as JSON.

Run as `python tests/compile_worker.py sm_90` with TRITON_INTERPRET unset: interpreted functions cannot be compiled. The real
launchers run on meta tensors while JITFunction.run only takes notes, so constants and options are the launchers' own.
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
from radixkv.kernels.work import build_work

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


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget) -> Any:
    """Compile one recorded launch ahead of time."""
    named = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    named.update({name: value for name, value in kwargs.items() if name in kernel.arg_names})
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


def attention_launches(kernel: str, shape: str, dtype: torch.dtype, block_size: int, arch: str, features: dict[str, Any]) -> list[Launch]:
    """Return the launches of one attention call."""
    num_heads, num_kv_heads, head_dim = HEAD_SHAPES[shape]
    group = num_heads // num_kv_heads
    prefill.current_arch = decode.current_arch = lambda tensor: arch
    tile_q = configs.prefill_config(head_dim, group, dtype, block_size, arch).tile_q
    chunk = configs.decode_config(head_dim, group, dtype, block_size, arch).chunk
    work = build_work([[0]], [1], [1], phase=kernel, backend="triton", tile_q=tile_q, chunk=chunk, device="meta")

    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    pools = [empty(8, num_kv_heads, block_size, head_dim, dtype=dtype) for _ in range(2)]
    query, table, lens = empty(1, num_heads, head_dim, dtype=dtype), empty(1, 4, dtype=torch.int32), empty(1, dtype=torch.int32)
    if kernel == "prefill":
        borders = empty(2, dtype=torch.int32)
        return record(lambda: prefill.prefill_attention(query, *pools, table, borders, lens, scale=0.1, plan=work, **features))
    return record(lambda: decode.decode_attention(query, *pools, table, lens, scale=0.1, plan=work, **features))


def move_launches(dtype: torch.dtype, block_size: int, head_dim: int) -> list[Launch]:
    """Return the launches of store_kv, with and without source rows, of copy_blocks and of merge_partials."""
    pools = [torch.empty((8, 2, block_size, head_dim), dtype=dtype, device="meta") for _ in range(2)]
    rows = torch.empty((3, 2, head_dim), dtype=dtype, device="meta")
    ids = torch.empty(3, dtype=torch.int64, device="meta")
    counts = ids.int()
    part_out = torch.empty((3, 4, head_dim), dtype=torch.float32, device="meta")
    return [
        *record(lambda: store.store_kv(*pools, rows, rows, ids)),
        *record(lambda: store.store_kv(*pools, rows, rows, ids, counts)),
        *record(lambda: store.copy_blocks([tuple(pools)], ids, ids, counts)),
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


def main(target: str) -> list[dict[str, Any]]:
    """Compile every case for one target and return a row of figures for each kernel."""
    launches: list[tuple[dict[str, Any], Launch]] = []
    for shape, dtype, block_size, features in cases(target):
        about = {"shape": shape, "head_dim": HEAD_SHAPES[shape][2], "dtype": dtype_name(dtype), "block_size": block_size, **features}
        for kernel in ("prefill", "decode"):
            found = attention_launches(kernel, shape, dtype, block_size, ARCH[target], features)
            # The merge of partials, the second launch of decode, is among the moves below.
            launches.append((about, found[0]))
    for head_dim in configs.HEAD_DIMS:
        about = {"shape": "moves", "head_dim": head_dim, "dtype": "bfloat16", "block_size": 64}
        launches += [(about, launch) for launch in move_launches(torch.bfloat16, 64, head_dim)]
    rows = []
    for about, (kernel, args, kwargs) in launches:
        compiled = compile_launch(kernel, args, kwargs, TARGETS[target])
        row = {"kernel": kernel.fn.__name__, **about, "num_warps": kwargs["num_warps"], "num_stages": kwargs.get("NUM_STAGES")}
        row["shared_bytes"] = compiled.metadata.shared
        row["wgmma"] = compiled.asm["ptx"].count("wgmma.mma_async") if "ptx" in compiled.asm else 0
        if target == "sm_90":
            row.update(resource_usage(compiled.asm["cubin"]))
        rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
