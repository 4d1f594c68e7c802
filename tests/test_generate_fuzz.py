"""Random requests against one small pool: every answer is the unpatched model's, and conservation holds after each."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import radixkv
from tests.models import left_pad, prompt, tiny_qwen2


class _Interrupt(LogitsProcessor):
    def __init__(self, steps: int):
        self.steps = steps

    def __call__(self, input_ids, scores):
        self.steps -= 1
        if self.steps < 0:
            raise InterruptedError
        return scores


def random_rows(choose: random.Random, bases: list[torch.Tensor]) -> list[torch.Tensor]:
    """A few prompts that share beginnings with each other and with earlier ones, cut anywhere."""
    rows = []
    for _ in range(choose.randint(1, 4)):
        base = choose.choice(bases)
        kept = base[: choose.randint(0, len(base))]
        rows.append(torch.cat([kept, prompt(choose.randint(1, 12), choose.randrange(6))]))
    return rows


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(seed):
    choose = random.Random(seed)
    reference = tiny_qwen2(num_layers=2)
    model = radixkv.patch_model(tiny_qwen2(num_layers=2), num_blocks=40, block_size=16)
    handle = model.radixkv
    bases = [prompt(length, seed=1000 * seed + length) for length in (70, 45, 90)]
    held: list = []  # outputs and leases that the user has not let go of
    num_failed = 0
    for _ in range(60):
        rows = random_rows(choose, bases)
        ids, mask = left_pad(rows)
        call = {"max_new_tokens": choose.randint(1, 8), "do_sample": False}
        action = choose.choice(["generate", "generate", "generate", "by hand", "interrupt", "lease", "drop", "clear", "eos"])
        try:
            if action in ("generate", "eos"):
                if action == "eos":
                    free = reference.generate(ids, attention_mask=mask, **call)
                    call |= {"eos_token_id": int(free[choose.randrange(len(rows)), -1]), "pad_token_id": 0}
                expected = reference.generate(ids, attention_mask=mask, **call)
                assert torch.equal(model.generate(ids, attention_mask=mask, **call), expected)
                bases[choose.randrange(3)] = torch.cat([rows[0], expected[0, ids.shape[1] :]])
            elif action == "by hand":
                lease = handle.match_prefix(rows[0])
                alone = rows[0][None]
                output = model.generate(alone, prefix_cache=lease, return_dict_in_generate=True, **call)
                assert torch.equal(output.sequences, reference.generate(alone, **call))
                if choose.random() < 0.5:
                    handle.insert(output)
                elif choose.random() < 0.5:
                    held.append(output)
            elif action == "interrupt":
                stop = LogitsProcessorList([_Interrupt(choose.randint(0, 3))])
                with pytest.raises(InterruptedError):
                    model.generate(ids, attention_mask=mask, logits_processor=stop, max_new_tokens=8, do_sample=False)
            elif action == "lease":
                held.append(handle.match_prefix(rows[0]))
            elif action == "drop" and held:
                held.pop(choose.randrange(len(held)))
            elif action == "clear":
                handle.clear()
        except radixkv.OutOfBlocks:
            num_failed += 1
            held.clear()
        handle.check()
    lease = output = None
    held.clear()
    gc.collect()
    handle.check()
    assert handle.stats().blocks_leased == 0
    assert handle.stats().token_hit_rate > 0.3
    assert num_failed < 20
