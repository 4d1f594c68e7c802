"""What the doctor tries out: the kernels compile, attention is right, and a patched model gives the tokens of the unpatched one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import radixkv
from radixkv.commands.findings import Finding
from radixkv.commands.machine import best_device
from radixkv.commands.packages import can_import

# Imported by the functions that need it: it may be what is broken.
if TYPE_CHECKING:
    import torch

COMPILE_SECONDS = 600
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
# Two prompts that share their first tokens.
SHARED_LEN, PROMPT_LENS = 24, (40, 33)
NUM_NEW = 8


def try_compiler(debug: bool) -> Iterator[Finding]:
    """Compile every kernel, in a process of its own; with debug that one's tracebacks go to stderr."""
    if not can_import("triton"):
        detail = "not tried: Triton is not installed, and on a CPU not needed"
        yield Finding("kernels", "compiler", "note", detail)
        return
    command = [sys.executable, "-m", "radixkv.commands.compile_kernels"]
    folders = [str(Path(radixkv.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if debug:
        sys.stderr.write(done.stderr)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else "it said nothing"
        yield Finding("kernels", "compiler", "failed", f"the compiling process ended with status {done.returncode}: {reason}")
        return
    yield _judge(json.loads(done.stdout))


def _judge(result: dict[str, Any]) -> Finding:
    where = "this GPU" if result["is_here"] else "there is no GPU here to run them on"
    kernels = result["kernels"]
    errors = [f"{name}: {kernel['error']}" for name, kernel in kernels.items() if kernel["error"]]
    if errors:
        detail = f"{len(errors)} of {len(kernels)} kernels do not compile for {result['target']} ({where}): {'; '.join(errors)}"
        return Finding("kernels", "compiler", "failed", detail)
    seconds = sum(kernel["seconds"] for kernel in kernels.values())
    return Finding("kernels", "compiler", "ok", f"{', '.join(kernels)} compile for {result['target']} ({where}), {seconds:.1f} s")


def try_attention() -> Iterator[Finding]:
    """Two prompts with a common beginning, and a token more of each, through the chosen backend, against the reference in float64."""
    import torch

    from radixkv.attention import Backend, choose_backend
    from radixkv.cache import PrefixCache
    from radixkv.pool import BlockPool
    from radixkv.testing import OUT_TOLERANCE
    from radixkv.token_key import token_key

    device = best_device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "block_size": 16}
    pool = BlockPool(16, dtype=dtype, device=device, **shape)
    backend = Backend(choose_backend("auto", device).name, num_heads=NUM_HEADS, pool=pool)
    cache = PrefixCache(pool, backend)
    proof = _AttentionProof(pool, torch.Generator().manual_seed(0))
    prompts = [[*range(SHARED_LEN), *range(1000 * (row + 1), 1000 * (row + 1) + n - SHARED_LEN)] for row, n in enumerate(PROMPT_LENS)]
    batch = cache.admit([bytes(token_key(prompt)) for prompt in prompts], [1] * len(prompts))
    try:
        with cache.prompt_step(batch) as step:
            prefill = proof.compare(step)
        with cache.decode_step(batch, [0, 1], [7, 8]) as step:
            decode = proof.compare(step)
    finally:
        cache.discard(batch)
    allowed = OUT_TOLERANCE[dtype]
    is_right = max(prefill, decode) <= allowed
    name = str(dtype).removeprefix("torch.")
    detail = (
        f"backend {backend.name} in {name} on {device}: prefill {prefill:.1e}, decode {decode:.1e} off the reference in float64, "
        f"{'within' if is_right else 'beyond'} the {allowed:.0e} that {name} allows"
    )
    yield Finding("kernels", "attention", "ok" if is_right else "failed", detail)


class _AttentionProof:
    """Random queries, keys and values through steps of a cache, and through the reference over a pool of its own."""

    def __init__(self, pool: Any, generator: torch.Generator) -> None:
        self._pool, self._generator = pool, generator
        self._keys, self._values = (pool.keys[0].double() for _ in range(2))

    def compare(self, step: Any) -> float:
        """Run one step; return how far its output is off, NaN included, as `attention_error` says."""
        import torch

        from radixkv.kernels import reference
        from radixkv.testing import attention_error

        step.begin()
        num_tokens = len(step.positions)
        query, key, value = (
            torch.randn(1, num_heads, num_tokens, HEAD_DIM, generator=self._generator).to(self._pool.device, self._pool.dtype)
            for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        step.store(0, key, value)
        options: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "sliding_window": None, "softcap": None}
        out = step.attend(0, query, **options)[0]
        rows, new_keys, new_values = (tensor[0].transpose(0, 1).double() for tensor in (query, key, value))
        plan = step.plan
        reference.store_kv(self._keys, self._values, new_keys, new_values, plan.slots, plan.source_rows)
        pools = rows, self._keys, self._values, plan.block_table
        if plan.phase == "prefill":
            expected, _ = reference.prefill_attention(*pools, plan.cu_query_lens, plan.seq_lens, **options)
        else:
            expected, _ = reference.decode_attention(*pools, plan.seq_lens, **options)
        error = attention_error(out, expected)
        return error if error == error else float("inf")


def try_model() -> Iterator[Finding]:
    """A small random Qwen2: its tokens unpatched, patched, and patched with the prompt in the cache."""
    import torch
    import transformers

    from radixkv.bench.models import random_qwen2

    transformers.logging.set_verbosity_error()
    device = best_device()
    with torch.random.fork_rng(devices=[]):
        model = random_qwen2(100, hidden=64, num_layers=2).to(device)
        ids = torch.randint(3, 100, (1, 40)).to(device)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_NEW, "do_sample": False}
    expected = model.generate(ids, **options).tolist()
    radixkv.patch_model(model, num_blocks=16, block_size=16)
    answers = {"computed": model.generate(ids, **options).tolist(), "reused": model.generate(ids, **options).tolist()}
    stats, graphs = model.radixkv.stats(), model.radixkv.graphs
    wrong = [name for name, answer in answers.items() if answer != expected]
    replays = "" if graphs is None else f", {graphs.num_replays} captured steps replayed"
    about = f"{NUM_NEW} tokens of a random Qwen2 on {device}{replays}"
    if wrong:
        detail = f"{about}: with the prompt {' and '.join(wrong)} they differ from the unpatched model's"
        yield Finding("model", "tokens", "failed", detail)
    elif stats.cached_tokens < ids.shape[1] - 1:
        yield Finding("model", "tokens", "failed", f"{about}: equal, but {stats.cached_tokens} of 40 prompt tokens were found again")
    else:
        detail = f"{about}: equal to the unpatched model's, and so once more with {stats.cached_tokens} of 40 prompt tokens reused"
        yield Finding("model", "tokens", "ok", detail)
