"""Thousands of generate() calls of every kind in a loop: neither blocks nor memory pile up."""

from __future__ import annotations

import copy
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import radixkv
from tests.models import EOS, left_pad, prompt, tiny_qwen2


class _Fails(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def resident_bytes() -> int:
    """Memory of this process, with what torch could give back given back."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def use(model: Any, rng: random.Random, trunks: list[torch.Tensor]) -> None:
    """One call, of a kind chosen at random, on a prompt that shares its beginning with others."""
    trunk = rng.choice(trunks)
    ids = torch.cat([trunk[: rng.randrange(1, len(trunk))], prompt(rng.randrange(1, 12), seed=rng.randrange(10**6))])[None]
    arguments: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 6), "do_sample": False, "pad_token_id": 0}
    kind = rng.randrange(9)
    if kind == 0:
        arguments |= {"num_beams": 3}
    elif kind == 1:
        arguments |= {"prompt_lookup_num_tokens": 3, "eos_token_id": EOS}
    elif kind == 2:
        arguments |= {"store": False}
    elif kind == 3:
        arguments |= {"namespace": (rng.randrange(1000),)}
    elif kind == 4:
        ids, arguments["attention_mask"] = left_pad([ids[0], trunk[:9]])
    elif kind == 5:
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, logits_processor=LogitsProcessorList([_Fails()]), **arguments)
        return
    elif kind == 6:
        cache = model.radixkv.new_cache()
        with torch.no_grad():
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=copy.deepcopy(cache))
        return
    elif kind == 7:
        model.radixkv.generate_many([ids[0].tolist(), trunk[:5].tolist()], 3, progress=False)
        return
    model.generate(ids, **arguments)


def test_many_calls_leave_no_more_than_few(num_soak_calls: int) -> None:
    model = radixkv.patch_model(tiny_qwen2(num_layers=1, heads=(2, 1, 16)), num_blocks=48, block_size=16)
    rng = random.Random(0)
    trunks = [prompt(60, seed=seed) for seed in range(6)]
    num_warm = num_soak_calls // 2
    for number in range(num_soak_calls):
        if number == num_warm:
            gc.collect()
            num_objects, memory = len(gc.get_objects()), resident_bytes()
        use(model, rng, trunks)
        if number % 50 == 0:
            model.radixkv.check()
    gc.collect()
    model.radixkv.check()
    stats = model.radixkv.stats()
    assert stats.blocks_leased == 0
    assert stats.blocks_free + stats.blocks_cached == 48
    # What is kept grows with what is cached, and with the history of what was evicted, which is bounded.
    assert len(gc.get_objects()) < 1.05 * num_objects + 3000
    assert resident_bytes() < memory + 24e6
