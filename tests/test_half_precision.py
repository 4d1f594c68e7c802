"""In half precision a patched model is as close to the unpatched one as that is to itself.

The unpatched model rounds differently when a prompt is computed whole and when its first part comes from a cache. That difference is the
noise; the patched model's logits, teacher-forced, may differ from the unpatched ones by 1.5 times as much and no more.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import radixkv
from tests.models import VOCAB_SIZE, assert_varied, left_pad, prompt, tiny_qwen2

STEPS = 12


class _Force(LogitsProcessor):
    """Makes generate() return given tokens [rows, steps], whatever the logits."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens, self.step = tokens, 0

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, float("-inf")).scatter(1, self.tokens[:, self.step : self.step + 1], 0.0)
        self.step += 1
        return forced


def forced_logits(model, ids, tokens, **call) -> torch.Tensor:
    """Logits float32 [steps, rows, vocabulary] along `tokens`."""
    output = model.generate(
        ids, logits_processor=LogitsProcessorList([_Force(tokens)]), max_new_tokens=tokens.shape[1], do_sample=False,
        output_logits=True, return_dict_in_generate=True, **call,
    )  # fmt: skip
    return torch.stack(output.logits).float()


# Shapes at which the unpatched model was seen to differ from itself, so that the bound is not 0.
@pytest.mark.parametrize(
    ("dtype", "num_layers", "heads", "seed"),
    [
        pytest.param(torch.bfloat16, 6, (12, 2, 128), 10, id="bf16"),
        pytest.param(torch.float16, 4, (8, 2, 64), 9, id="fp16"),
    ],
)
def test_teacher_forced_logits(dtype, num_layers, heads, seed):
    model = tiny_qwen2(seed=seed, num_layers=num_layers, heads=heads, dtype=dtype)
    document = prompt(150, seed=1)
    rows = range(6)
    prompts = torch.stack([torch.cat([document, prompt(9, seed=2 + i)]) for i in rows])
    tokens = torch.stack([prompt(STEPS, seed=50 + i) for i in rows])
    assert_varied(tokens)

    def one_by_one(**call) -> torch.Tensor:
        return torch.cat([forced_logits(model, prompts[i : i + 1], tokens[i : i + 1], **copy.deepcopy(call)) for i in rows], 1)

    whole, alone = forced_logits(model, prompts, tokens), one_by_one()
    prefix = DynamicCache()
    with torch.no_grad():
        model(document[None], past_key_values=prefix, use_cache=True)
    # All but the last token cached: what a prompt that is asked again finds. Products of one row round otherwise than those of several.
    almost = []
    for i in rows:
        known = DynamicCache()
        with torch.no_grad():
            model(prompts[i : i + 1, :-1], past_key_values=known, use_cache=True)
        almost.append(forced_logits(model, prompts[i : i + 1], tokens[i : i + 1], past_key_values=known))
    with_prefixes = one_by_one(past_key_values=prefix), torch.cat(almost, 1), alone
    noise = max((logits - whole).abs().max() for logits in with_prefixes)

    radixkv.patch_model(model, num_blocks=200, block_size=16)
    runs = {"one by one": one_by_one(), "again": one_by_one(), "warm batch": forced_logits(model, prompts, tokens)}
    model.radixkv.clear()
    runs["cold batch"] = forced_logits(model, prompts, tokens)
    assert model.radixkv.stats().token_hit_rate > 0.5
    top = whole.topk(2, -1).values
    clear = top[..., 0] - top[..., 1] > 2 * noise
    assert clear.float().mean() > 0.5
    for name, got in runs.items():
        assert (got - whole).abs().max() <= 1.5 * noise, name
        assert torch.equal(got.argmax(-1)[clear], whole.argmax(-1)[clear]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_huge_key_bias(dtype):
    """Qwen2's key biases reach norms of hundreds: scores must not overflow on the way to the softmax."""
    model = tiny_qwen2(seed=9, num_layers=2, dtype=dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.normal_(0, 200.0)
    ids, mask = left_pad([prompt(40, seed=3), prompt(22, seed=4)])
    radixkv.patch_model(model, num_blocks=40, block_size=16)
    for _ in range(2):
        logits = forced_logits(model, ids, torch.full((2, 4), VOCAB_SIZE - 1), attention_mask=mask)
        assert logits.isfinite().all()
