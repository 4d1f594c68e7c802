"""generate() of a patched model returns the tokens of the unpatched one, in float32, and computes only what is new."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import radixkv
from tests.models import EOS, HEAD_SHAPES, assert_varied, counted_tokens, left_pad, new_tokens, prompt, tiny_qwen2

BLOCK = 16
GREEDY = {"max_new_tokens": 20, "do_sample": False}


def disturb(model, block: int) -> None:
    """Change one block's keys in every layer."""
    for keys in model.radixkv.pool.keys:
        keys[block] += 3.0


def assert_reads_cache(model, ids: torch.Tensor) -> None:
    """The logits of a cached prompt move when one of its cached blocks is disturbed; puts the block back."""
    call = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with model.radixkv.match_prefix(ids[0]) as lease:
        block = lease.blocks[len(lease.blocks) // 2]
    before = model.generate(ids, **call).logits[0]
    kept = [keys[block].clone() for keys in model.radixkv.pool.keys]
    disturb(model, block)
    after = model.generate(ids, **call).logits[0]
    for keys, keep in zip(model.radixkv.pool.keys, kept, strict=True):
        keys[block] = keep
    assert (after - before).abs().max() > 1e-2


def test_one_prompt_cold_then_again(reference, patched):
    ids = prompt(131, seed=1)[None]
    expected = reference.generate(ids, **GREEDY)
    assert_varied(new_tokens(expected, ids))
    for computed in (131 + 19, 1 + 19, 1 + 19):
        with counted_tokens(patched) as rows:
            assert torch.equal(patched.generate(ids, **GREEDY), expected)
        assert sum(rows) == computed
    stats = patched.radixkv.stats()
    assert (stats.requests, stats.hits, stats.misses) == (3, 2, 1)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.computed_tokens) == (393, 260, 190)
    assert_reads_cache(patched, ids)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 1, 2])
def test_full_hit_at_block_borders(reference, patched, length):
    """The last prompt token is computed again even when everything is cached, at its own position."""
    ids = prompt(length, seed=length)[None]
    expected = reference.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
    for _ in range(2):
        got = patched.generate(ids, **GREEDY, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(got.sequences, expected.sequences)
        for ours, theirs in zip(got.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    with counted_tokens(patched) as rows:
        patched.generate(ids, max_new_tokens=1, do_sample=False)
    assert rows == [1]


def test_next_turn_reuses_the_answer(reference, patched):
    """Of a conversation's first turn every stored token is reused, whatever the block size; only the last sampled one is not stored."""
    first = prompt(50, seed=2)[None]
    answer = patched.generate(first, **GREEDY)
    second = torch.cat([answer, prompt(9, seed=3)[None]], 1)
    with counted_tokens(patched) as rows:
        got = patched.generate(second, **GREEDY)
    assert torch.equal(got, reference.generate(second, **GREEDY))
    assert rows[0] == 1 + 9


def test_ragged_left_padded_batch(reference, patched):
    rows = [prompt(length, seed=length) for length in (70, 33, 5, 48, 1)]
    ids, mask = left_pad(rows)
    alone = [reference.generate(row[None], **GREEDY)[0, len(row) :] for row in rows]
    padded = new_tokens(reference.generate(ids, attention_mask=mask, **GREEDY), ids)
    assert_varied(padded)
    for _ in range(2):
        got = new_tokens(patched.generate(ids, attention_mask=mask, **GREEDY), ids)
        assert torch.equal(got, padded)
        assert torch.equal(got, torch.stack(alone))
    with counted_tokens(patched) as computed:
        patched.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
    assert computed == [len(rows)]
    assert_reads_cache(patched, rows[0][None])


def test_rows_of_mixed_hits(reference, patched):
    """Rows that are cached whole, in part and not at all, in one batch, some of them prefixes of others."""
    base = prompt(90, seed=11)
    patched.generate(base[None], **GREEDY)
    rows = [base, base[:40], torch.cat([base[:57], prompt(20, 12)]), prompt(25, 13), torch.cat([base, prompt(3, 14)]), base[:41]]
    ids, mask = left_pad(rows)
    expected = reference.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(patched.generate(ids, attention_mask=mask, **GREEDY), expected)
    patched.radixkv.check()
    assert torch.equal(patched.generate(ids, attention_mask=mask, **GREEDY), expected)


@pytest.mark.parametrize("block_size", [16, 64])
def test_batch_sharing_a_prefix_computes_it_once(reference, block_size):
    """8 prompts of 1,000 shared and 20 own tokens: 1,160 tokens run, though the shared part ends inside a block."""
    shared = prompt(1000, seed=20)
    own = [torch.cat([torch.tensor([100 + i]), prompt(19, seed=30 + i)]) for i in range(8)]
    ids = torch.stack([torch.cat([shared, tail]) for tail in own])
    model = radixkv.patch_model(tiny_qwen2(), num_blocks=4000 // block_size, block_size=block_size)
    with counted_tokens(model) as rows:
        model.generate(ids, max_new_tokens=1, do_sample=False)
    assert rows == [1160]
    stats = model.radixkv.stats()
    assert (stats.requests, stats.hits, stats.misses, stats.computed_tokens) == (8, 7, 1, 1160)
    model.radixkv.clear()
    expected = reference.generate(ids, **GREEDY)
    assert_varied(new_tokens(expected, ids))
    assert torch.equal(model.generate(ids, **GREEDY), expected)  # cold, shared inside the batch
    assert torch.equal(model.generate(ids, **GREEDY), expected)  # warm
    model.radixkv.check()


def test_batch_chain_of_prefixes(reference, patched):
    """Each row extends the one before by less than a block, in an order that is not sorted, cold."""
    base = prompt(80, seed=40)
    rows = [base[:length] for length in (41, 80, 37, 44, 60, 44)]
    ids, mask = left_pad(rows)
    with counted_tokens(patched) as computed:
        got = patched.generate(ids, attention_mask=mask, **GREEDY)
    assert computed[0] == 80 + 1  # every token once, and the last one of the repeated row for its logits
    assert torch.equal(got, reference.generate(ids, attention_mask=mask, **GREEDY))


def test_identical_rows_in_one_batch(reference, patched):
    ids = prompt(70, seed=50)[None].repeat(5, 1)
    with counted_tokens(patched) as computed:
        got = patched.generate(ids, **GREEDY)
    assert computed[0] == 70 + 4
    assert torch.equal(got, reference.generate(ids, **GREEDY))


@pytest.mark.parametrize("num_return_sequences", [1, 4])
def test_sampling_with_a_fixed_seed(reference, patched, num_return_sequences):
    """The cache takes no random numbers: the same seed gives the same tokens, cold and warm."""
    ids = prompt(45, seed=60)[None]
    call = {"max_new_tokens": 20, "do_sample": True, "top_k": 50, "temperature": 0.8, "num_return_sequences": num_return_sequences}
    torch.manual_seed(5)
    expected = reference.generate(ids, **call)
    assert_varied(new_tokens(expected, ids))
    for _ in range(2):
        torch.manual_seed(5)
        assert torch.equal(patched.generate(ids, **call), expected)


def test_rows_that_end_early_are_not_computed_further(reference, patched):
    """A row that met the end of sequence costs nothing more, and the pads behind it are neither computed nor stored."""
    rows = [prompt(length, seed=70 + length) for length in (30, 21, 12)]
    ids, mask = left_pad(rows)
    free = new_tokens(reference.generate(ids, attention_mask=mask, **GREEDY), ids)
    eos = int(free[1, 3])
    call = {**GREEDY, "eos_token_id": eos, "pad_token_id": EOS}
    expected = reference.generate(ids, attention_mask=mask, **call)
    ends = [(row == eos).nonzero() for row in new_tokens(expected, ids)]
    lengths = [int(end[0]) + 1 if len(end) else expected.shape[1] - ids.shape[1] for end in ends]
    assert min(lengths) < max(lengths)
    with counted_tokens(patched) as computed:
        got = patched.generate(ids, attention_mask=mask, **call)
    assert torch.equal(got, expected)
    assert sum(computed) == sum(map(len, rows)) + sum(length - 1 for length in lengths)
    cached = torch.cat([rows[1], new_tokens(expected, ids)[1]])
    with patched.radixkv.match_prefix(cached) as lease:
        assert lease.length == len(rows[1]) + lengths[1] - 1


def test_scores_of_finished_rows_are_the_models_own(reference, patched):
    ids, mask = left_pad([prompt(30, seed=81), prompt(14, seed=82)])
    free = new_tokens(reference.generate(ids, attention_mask=mask, **GREEDY), ids)
    call = {**GREEDY, "eos_token_id": int(free[0, 2]), "pad_token_id": EOS, "output_logits": True, "return_dict_in_generate": True}
    expected = reference.generate(ids, attention_mask=mask, **call)
    got = patched.generate(ids, attention_mask=mask, **call)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_pad_token_that_occurs_in_the_prompt(reference, patched):
    """Pads are what the mask says, never a token id."""
    rows = [torch.cat([prompt(20, 83), torch.tensor([EOS, EOS]), prompt(9, 84)]), torch.cat([torch.tensor([EOS]), prompt(10, 85)])]
    longest = max(map(len, rows))
    ids = torch.full((2, longest), EOS)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    call = {**GREEDY, "pad_token_id": EOS, "eos_token_id": EOS}
    expected = reference.generate(ids, attention_mask=mask, **call)
    for _ in range(2):
        assert torch.equal(patched.generate(ids, attention_mask=mask, **call), expected)


@pytest.mark.parametrize("name", HEAD_SHAPES)
def test_head_shapes_of_real_models(name):
    model = tiny_qwen2(seed=3, num_layers=2, heads=HEAD_SHAPES[name])
    ids, mask = left_pad([prompt(40, seed=90), prompt(23, seed=91)])
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert_varied(new_tokens(expected, ids))
    radixkv.patch_model(model, num_blocks=40, block_size=16)
    for _ in range(2):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    assert model.radixkv.stats().cached_tokens == 61


def test_exact_configuration_of_the_distilled_1_5b():
    """DeepSeek-R1-Distill-Qwen-1.5B as published, cut to 2 layers, random weights."""
    model = tiny_qwen2(
        num_layers=2, heads=HEAD_SHAPES["DeepSeek-R1-Distill-Qwen-1.5B"], intermediate_size=8960, vocab_size=151936,
        max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, use_sliding_window=False,
        max_window_layers=21, bos_token_id=151643, eos_token_id=151643,
    )  # fmt: skip
    ids = prompt(70, seed=92)[None]
    expected = model.generate(ids, **GREEDY)
    assert_varied(new_tokens(expected, ids))
    radixkv.patch_model(model, num_blocks=8)
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("window", [7, 16, 33])
def test_sliding_window_layers(window):
    settings = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = tiny_qwen2(seed=4, **settings)
    ids, mask = left_pad([prompt(60, seed=93), prompt(31, seed=94)])
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert_varied(new_tokens(expected, ids))
    alone = model.generate(ids[:1], **GREEDY)
    short = model.generate(ids[:1, :5], **GREEDY)  # shorter than every window at first, longer at the end
    radixkv.patch_model(model, num_blocks=40, block_size=16)
    for _ in range(2):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
        assert torch.equal(model.generate(ids[:1], **GREEDY), alone)
        assert torch.equal(model.generate(ids[:1, :5], **GREEDY), short)


class _Raise(LogitsProcessor):
    def __init__(self, step: int):
        self.steps_left = step

    def __call__(self, input_ids, scores):
        self.steps_left -= 1
        if self.steps_left < 0:
            raise KeyboardInterrupt("stop here")
        return scores


@pytest.mark.parametrize("step", [0, 1, 5])
def test_exception_in_the_middle(reference, patched, step):
    """Whatever way out is taken, no block stays held, and what was computed is not lost."""
    ids, mask = left_pad([prompt(40, seed=95), prompt(33, seed=96)])
    with pytest.raises(KeyboardInterrupt):
        patched.generate(ids, attention_mask=mask, logits_processor=LogitsProcessorList([_Raise(step)]), **GREEDY)
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_leased == 0
    with counted_tokens(patched) as rows:
        got = patched.generate(ids, attention_mask=mask, **GREEDY)
    assert rows[0] == 2
    assert torch.equal(got, reference.generate(ids, attention_mask=mask, **GREEDY))


def test_exception_in_a_forward(reference, patched):
    """A step that fails in a layer stores nothing of itself: what it wrote is never served."""
    ids = prompt(40, seed=97)[None]

    def fail(*_):
        raise RuntimeError("layer failed")

    hook = patched.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="layer failed"):
        patched.generate(ids, **GREEDY)
    hook.remove()
    patched.radixkv.check()
    stats = patched.radixkv.stats()
    assert (stats.blocks_leased, stats.blocks_cached) == (0, 0)
    assert torch.equal(patched.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))


def test_poisoned_pool(reference, patched):
    """What lies in blocks that are free, or behind the live slots of a block, never reaches an output."""
    for tensors in (patched.radixkv.pool.keys, patched.radixkv.pool.values):
        for tensor in tensors:
            tensor.fill_(float("nan"))
    rows = [prompt(70, seed=98), prompt(37, seed=99), torch.cat([prompt(70, seed=98)[:50], prompt(5, seed=100)])]
    ids, mask = left_pad(rows)
    expected = reference.generate(ids, attention_mask=mask, **GREEDY)
    for _ in range(2):
        assert torch.equal(patched.generate(ids, attention_mask=mask, **GREEDY), expected)


def test_eviction_in_a_small_pool(reference):
    """Prompts that do not fit together drive each other out, block by block, and all come out right."""
    model = radixkv.patch_model(tiny_qwen2(), num_blocks=9, block_size=16)
    prompts = [prompt(60, seed=200 + i)[None] for i in range(4)]
    for ids in prompts + prompts:
        assert torch.equal(model.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))
        model.radixkv.check()
    assert model.radixkv.stats().evicted_tokens > 0
