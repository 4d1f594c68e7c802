"""What ways of decoding compute, hold and store, beside the answers that they give."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from radixkv.integration.versions import held_cache
from tests.models import EOS, PAD, counted_tokens, left_pad, prompt, tiny_qwen2

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def test_beams_share_their_prompt_and_copy_only_where_they_part(patched):
    """8 beams of a 160-token prompt: its 10 blocks once, and for each beam at most the blocks of its own tokens."""
    ids = prompt(160, seed=4)[None]
    most = 0

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal most
            most = max(most, patched.radixkv.stats().blocks_leased)
            return scores

    with counted_tokens(patched) as rows:
        patched.generate(ids, num_beams=8, max_new_tokens=15, do_sample=False, logits_processor=LogitsProcessorList([Watch()]))
    assert rows[0] == 160 + 7, "the prompt once, and of each further beam its last token"
    assert most <= 10 + 8 * 2


def test_a_chunked_prompt_takes_what_is_cached_in_every_chunk(reference, patched):
    ids = prompt(100, seed=5)[None]
    expected = reference.generate(ids, **GREEDY)
    with counted_tokens(patched) as cold:
        assert torch.equal(patched.generate(ids, prefill_chunk_size=30, **GREEDY), expected)
    with counted_tokens(patched) as warm:
        assert torch.equal(patched.generate(ids, prefill_chunk_size=30, **GREEDY), expected)
    num_chunks = len(cold) - 19
    assert sum(cold[:num_chunks]) == 100
    assert warm[:num_chunks] == [1] * num_chunks, "of a cached chunk only the token whose logits are returned"


@pytest.mark.parametrize("chunk", [16, 30])
def test_rows_share_a_document_in_every_chunk(reference, patched, chunk):
    """Four questions of different lengths on one document: each chunk of it is computed once, and all rows hold its blocks together."""
    document = prompt(150, seed=6)
    ids, mask = left_pad([torch.cat([document, prompt(length, seed=20 + length)]) for length in (5, 9, 14, 7)])
    expected = reference.generate(ids, attention_mask=mask, **GREEDY)
    with counted_tokens(patched) as rows:
        got = patched.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(got.sequences, expected)
    num_chunks = -(-ids.shape[1] // chunk)
    # Beside the document and the questions, of each chunk a last token per row, and what its row with least has behind the others.
    assert sum(rows[:num_chunks]) <= 150 + (5 + 9 + 14 + 7) + num_chunks * (3 + 9)
    tables = [row.blocks[: 150 // 16] for row in held_cache(got).batch.sequences]
    assert all(table == tables[0] for table in tables)


def test_rejected_drafts_are_not_stored(patched):
    """What was drafted and rejected is in no prefix afterwards, and costs no block."""
    ids = prompt(40, seed=6)[None]
    output = patched.generate(ids, assistant_model=tiny_qwen2(9, num_layers=1), **GREEDY)
    assert patched.radixkv.match_prefix(output[0]).length >= len(output[0]) - 2
    assert patched.radixkv.stats().tree_tokens <= len(output[0])


def test_a_copy_of_the_model_generates_in_every_mode(patched):
    copied = copy.deepcopy(patched)
    ids = prompt(30, seed=17)[None]
    for mode in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3, "eos_token_id": EOS, "pad_token_id": PAD}):
        assert torch.equal(copied.generate(ids, **GREEDY, **mode), patched.generate(ids, **GREEDY, **mode))
    copied.radixkv.check()
