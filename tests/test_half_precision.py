"""In half precision a patched model is as close to the unpatched one as that is to itself.

The unpatched model rounds differently when a prompt is computed whole, alone, in chunks, and when its first part comes from a cache.
That difference is the noise. Teacher-forced, the patched model's logits may differ from the unpatched ones by twice as much and no more,
and its greedy token only where the unpatched model prefers its own by no more than twice the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import radixkv
from radixkv.integration.versions import cache_argument
from tests.families import USABLE, tiny_model
from tests.forced import forced_logits
from tests.models import VOCAB_SIZE, left_pad, prompt, tiny_qwen2

# Two rows share a document that is longer than any window; one is shorter.
ROWS = [*(torch.cat([prompt(60, seed=1), prompt(length, seed=20 + length)]) for length in (9, 4)), prompt(33, seed=5)]
TOKENS = torch.stack([prompt(8, seed=50 + row) for row in range(len(ROWS))])


def batch(model: Any, **arguments: Any) -> torch.Tensor:
    """Logits float32 [steps, rows, vocabulary] of all rows at once."""
    ids, mask = left_pad(ROWS)
    return forced_logits(model, {"input_ids": ids, "attention_mask": mask}, TOKENS, **arguments)


def alone(model: Any, **arguments: Any) -> torch.Tensor:
    """The same, row by row."""
    return torch.cat([forced_logits(model, {"input_ids": row[None]}, TOKENS[i : i + 1], **arguments) for i, row in enumerate(ROWS)], 1)


def behind_a_cache(model: Any, prefix_len: Callable[[int], int]) -> torch.Tensor:
    """The same, with the beginning of each row in a cache of transformers' own."""
    logits = []
    for i, row in enumerate(ROWS):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(row[None, : prefix_len(len(row))], use_cache=True, **{cache_argument(type(model)): cache})
        known = {cache_argument(type(model)): cache}
        logits.append(forced_logits(model, {"input_ids": row[None]}, TOKENS[i : i + 1], **known))
    return torch.cat(logits, 1)


def own_loop(model: Any) -> torch.Tensor:
    """The same, in a loop of one's own over radixkv's cache."""
    logits = []
    for row, tokens in zip(ROWS, TOKENS, strict=True):
        cache = model.radixkv.new_cache()
        with torch.no_grad():
            steps = [model(ids[None], logits_to_keep=1, past_key_values=cache).logits[0] for ids in (row, *tokens[:-1].split(1))]
        logits.append(torch.cat(steps).float())
    return torch.stack(logits, 1)


def runs_of(patched: Any) -> dict[str, torch.Tensor]:
    """Logits of a patched model in its ways of decoding, by name; what is warm finds all that it needs."""
    runs = {"cold batch": batch(patched), "warm batch": batch(patched)}
    runs["warm beams"] = batch(patched, num_beams=3)
    runs["warm, several sequences"] = batch(patched, do_sample=True, num_return_sequences=2)
    patched.radixkv.clear()
    runs |= {"cold chunks": batch(patched, prefill_chunk_size=7), "warm chunks": batch(patched, prefill_chunk_size=7)}
    patched.radixkv.clear()
    runs |= {"one by one": alone(patched), "again": alone(patched), "warm loop": own_loop(patched)}
    # Forced too, so that all it drafts is verified, several tokens at once.
    runs["warm, drafted"] = alone(patched, assistant_model=tiny_qwen2(7, num_layers=1))
    return runs


# Every family on small heads, and Qwen2 with the heads of real models.
MODELS = [
    *(pytest.param(torch.bfloat16, partial(tiny_model, family), id=f"bf16-{family}") for family in USABLE),
    pytest.param(torch.float16, partial(tiny_model, "Qwen2"), id="fp16-Qwen2"),
    pytest.param(torch.bfloat16, partial(tiny_qwen2, 10, num_layers=3, heads=(12, 2, 128)), id="bf16-12-2-d128"),
    pytest.param(torch.float16, partial(tiny_qwen2, 9, num_layers=4, heads=(8, 2, 64)), id="fp16-8-2-d64"),
]


@pytest.mark.parametrize(("dtype", "make_model"), MODELS)
def test_teacher_forced_logits(dtype: torch.dtype, make_model: Callable[[], Any]) -> None:
    model = make_model().to(dtype)
    whole = batch(model)
    others = (
        alone(model),
        alone(model, prefill_chunk_size=7),
        behind_a_cache(model, lambda length: length - 1),
        behind_a_cache(model, lambda length: length // 2),
    )
    noise = max((logits - whole).abs().max() for logits in others)
    if noise == 0:
        # Attention that multiplies and rounds row by row, as that which caps its scores, rounds alike however its prompt is cut. What is
        # left to go by is how far rounding takes it from the same weights in float32.
        noise = (batch(model.float()) - whole).abs().max()
        model.to(dtype)
    radixkv.patch_model(model, num_blocks=200, block_size=16)
    top = whole.topk(2, -1).values
    assert (top[..., 0] - top[..., 1] > 2 * noise).float().mean() > 0.4, "the reference is sure of too little to prove anything"
    for name, got in runs_of(model).items():
        assert (got - whole).abs().max() <= 2 * noise, name
        margin = top[..., 0] - whole.gather(-1, got.argmax(-1, keepdim=True))[..., 0]
        # Noise and margins come in the steps of the dtype, so that the two may be equal.
        assert bool((margin <= 2 * noise).all()), name
    stats = model.radixkv.stats()
    assert stats.stock_calls == 0 and stats.token_hit_rate > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_huge_key_bias(dtype):
    """Qwen2's key biases reach norms of hundreds: scores must not overflow on the way to the softmax."""
    model = tiny_qwen2(seed=9, num_layers=2, dtype=dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.normal_(0, 200.0)
    ids, mask = left_pad([prompt(40, seed=3), prompt(22, seed=4)])
    radixkv.patch_model(model, num_blocks=40, block_size=16)
    for _ in range(2):
        logits = forced_logits(model, {"input_ids": ids, "attention_mask": mask}, torch.full((2, 4), VOCAB_SIZE - 1))
        assert logits.isfinite().all()
