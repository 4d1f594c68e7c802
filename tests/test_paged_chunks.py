"""What generate() returned is passed in again, and the prompt comes in chunks: those that it holds are not computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import left_pad, prompt
from tests.paged import GREEDY, answer


@pytest.mark.parametrize("chunk", [1, 7, 16, 30, 1000])
@pytest.mark.parametrize("copies", [1, 2])
def test_the_next_turn_in_chunks(reference: Any, patched: Any, chunk: int, copies: int) -> None:
    """Chunks of what the cache holds are not computed; of the rest every token is, once."""
    ids, mask = left_pad([prompt(40, seed=2), prompt(33, seed=3), prompt(25, seed=4)])
    sequences, cache = answer(patched, ids, attention_mask=mask)
    ids = torch.cat([sequences, torch.stack([prompt(20, seed=90 + row) for row in range(3)])], 1)
    mask = torch.cat([mask, torch.ones(3, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    expected = reference.generate(ids, attention_mask=mask, **GREEDY).repeat_interleave(copies, 0)
    ways = {} if copies == 1 else {"do_sample": True, "top_k": 1, "num_return_sequences": copies}
    before = patched.radixkv.stats()
    got = patched.generate(ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=chunk, **{**GREEDY, **ways})
    assert torch.equal(got, expected)
    after = patched.radixkv.stats()
    # The last token of the turn before was never computed. A copy computes the last token of each chunk; 4.57 sends the prompt's alone.
    num_new = 3 * 21 + 3 * (copies - 1) * min(21, 21 // chunk + 3)
    assert after.computed_tokens - before.computed_tokens <= num_new + 3 * copies * 11
    assert after.stock_calls == before.stock_calls
    patched.radixkv.check()


@pytest.mark.parametrize("chunk", [1, 7, 40, 90])
def test_a_batch_that_is_padded_anew_in_chunks(reference: Any, patched: Any, chunk: int) -> None:
    """A row that says little gets more pads than before: whole chunks of it hold nothing."""
    rows = [prompt(20, seed=31), prompt(40, seed=32)]
    ids, mask = left_pad(rows)
    sequences, cache = answer(patched, ids, attention_mask=mask)
    rows = [torch.cat([row, got[ids.shape[1] :]]) for row, got in zip(rows, sequences, strict=True)]
    rows = [torch.cat([row, prompt(length, seed=33)]) for row, length in zip(rows, (2, 50), strict=True)]
    ids, mask = left_pad(rows)
    got = patched.generate(ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=chunk, **GREEDY)
    assert torch.equal(got, reference.generate(ids, attention_mask=mask, **GREEDY))
    patched.radixkv.check()


@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 16}])
def test_a_refused_call_leaves_it_with_its_rows(patched: Any, chunks: dict[str, int]) -> None:
    ids, cache = answer(patched, prompt(40, seed=9)[None])
    wrong = ids.clone()
    wrong[0, 3] += 1
    with pytest.raises(ValueError, match="row 0 does not begin with"):
        patched.generate(wrong, past_key_values=cache, num_beams=3, **chunks, **GREEDY)
    assert cache.num_rows == 1 and cache.get_seq_length() == 51


def test_an_empty_one_takes_chunks(reference: Any, patched: Any) -> None:
    ids = prompt(50, seed=5)[None]
    cache = patched.radixkv.new_cache()
    assert torch.equal(patched.generate(ids, past_key_values=cache, prefill_chunk_size=16, **GREEDY), reference.generate(ids, **GREEDY))
    assert cache.get_seq_length() == 61


def test_chunks_of_other_tokens_than_it_holds_are_refused(patched: Any) -> None:
    ids, cache = answer(patched, prompt(40, seed=9)[None])
    for wrong_at in (3, 45):
        wrong = ids.clone()
        wrong[0, wrong_at] += 1
        with pytest.raises(ValueError, match="row 0 does not begin with the 51 tokens that the cache holds"):
            patched.generate(wrong, past_key_values=cache, prefill_chunk_size=10, **GREEDY)
        patched.radixkv.check()
        assert cache.get_seq_length() == 51
    new_only = {"input_ids": ids[:, -3:], "attention_mask": torch.ones(1, 54, dtype=torch.int64)}
    with pytest.raises(ValueError, match="prefill_chunk_size counts from the first token on: pass the whole sequence"):
        patched.generate(**new_only, past_key_values=cache, prefill_chunk_size=10, **GREEDY)
