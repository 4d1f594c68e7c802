"""Compile every kernel as its launcher would launch it: for the GPU that is here, or for sm_90 where there is none.

`python -m radixkv.commands.compile_kernels` prints a JSON object. It is a process of its own, because Triton decides once whether its
kernels are compiled or interpreted, and because a compiler that crashes takes its process with it. What was compiled before is not used.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

# A model's heads, and the block size that patch_model takes by default.
MODEL, BLOCK_SIZE = "qwen2.5-0.5b", 64


def compile_kernels() -> dict[str, Any]:
    """Compile, and return the target's name, whether that GPU is here, and of each kernel the seconds or the error."""
    import torch
    import triton

    from radixkv.bench.launches import HEAD_SHAPES, SM_90, kernel_launches, move_launches
    from radixkv.kernels.compile_cache import use_writable_cache
    from radixkv.kernels.tiles import current_arch

    use_writable_cache()
    is_here = torch.cuda.is_available()
    target = triton.runtime.driver.active.get_current_target() if is_here else SM_90
    arch = current_arch(torch.empty(0, device="cuda")) if is_here else "cuda"
    heads = HEAD_SHAPES[MODEL]
    launches = kernel_launches(heads, torch.bfloat16, BLOCK_SIZE, arch=arch) + move_launches(torch.bfloat16, BLOCK_SIZE, heads[2])
    kernels: dict[str, dict[str, Any]] = {}
    for launch in launches:
        name = launch.kernel.fn.__name__.strip("_").removesuffix("_kernel")
        if name in kernels:  # another specialization of it
            continue
        begin = time.perf_counter()
        try:
            launch.compile(target)
            error = None
        except Exception as failure:
            traceback.print_exc(file=sys.stderr)
            error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        kernels[name] = {"seconds": time.perf_counter() - begin, "error": error}
    name = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)
    return {"target": name, "is_here": is_here, "kernels": kernels}


if __name__ == "__main__":
    # Read when Triton is imported.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    print(json.dumps(compile_kernels()))
