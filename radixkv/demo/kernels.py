"""Part 5 of the demo: the Triton kernels themselves, on a small model, with their launches counted."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

import radixkv
from radixkv.demo.documents import Prompt
from radixkv.demo.measure import compare_all, generate
from radixkv.demo.models import cut_model, share_weights
from radixkv.demo.parts import Pair, Report

NUM_LAYERS = 2
VOCAB_SIZE = 512
BLOCK_SIZE = 16
NUM_NEW = 8


def run_kernels(config: Any, dtype: torch.dtype, device: torch.device, report: Report) -> None:
    """Part 5: two prompts with a common beginning on a 2-layer model whose every attention runs in our Triton kernels.

    Args:
        config: Of the demo's model; the small model has its attention shape.
        dtype: Of weights and pool.
        device: A GPU, or the CPU for the interpreter.
        report: Changed in place.
    """
    if importlib.util.find_spec("triton") is None:
        tqdm.write("5 Triton kernels: not run, Triton is not installed (it has no build for this system)")
        return
    stock = cut_model(config, dtype, device, num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE)
    patched = radixkv.patch_model(share_weights(stock), num_blocks=32, block_size=BLOCK_SIZE, backend="triton")
    prompts = _random_prompts()
    pairs = []
    for prompt in tqdm(prompts, desc="5 Triton kernels"):
        stock_run = generate(stock, [prompt.tokens], NUM_NEW, min_new_tokens=NUM_NEW)
        patched_run = generate(patched, [prompt.tokens], NUM_NEW, min_new_tokens=NUM_NEW)
        differences = compare_all(stock, f"part 5, {prompt.question}", [prompt], stock_run, patched_run)
        pairs.append(Pair((prompt,), stock_run, patched_run, tuple(differences)))
    backend, launches = patched.radixkv.backend.name, patched.radixkv.backend.launches
    if backend != "triton":
        report.problems.append(f"part 5: the attention ran in the backend {backend!r}, not in Triton's kernels")
    where = "in the interpreter" if device.type == "cpu" else f"on {device.type}"
    counts = ", ".join(f"{name} {launches[name]}" for name in ("rope_store_kv", "prefill_attention", "decode_attention"))
    report.add(f"5 Triton kernels {where}, {NUM_LAYERS} layers", pairs, f"launches: {counts}")
    num_prefills = len(prompts)
    num_decodes = sum(pair.patched.num_forwards for pair in pairs) - num_prefills
    report.expect("part 5, launches of rope_store_kv", NUM_LAYERS * (num_prefills + num_decodes), launches["rope_store_kv"])
    report.expect("part 5, launches of prefill_attention", NUM_LAYERS * num_prefills, launches["prefill_attention"])
    report.expect("part 5, launches of decode_attention", NUM_LAYERS * num_decodes, launches["decode_attention"])
    report.expect("part 5, prompts that reused the other's beginning", len(prompts) - 1, sum(pair.is_hit for pair in pairs))


def _random_prompts() -> Sequence[Prompt]:
    numbers = random.Random(0)
    shared = [numbers.randrange(1, VOCAB_SIZE) for _ in range(40)]
    rows = [shared + [numbers.randrange(1, VOCAB_SIZE) for _ in range(8)] for _ in range(2)]
    return [Prompt(f"prompt {row + 1}", tuple(tokens), len(shared)) for row, tokens in enumerate(rows)]
