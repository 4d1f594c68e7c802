"""Search, use and store by hand: match_prefix, generate(prefix_cache=...), insert."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import DynamicCache

import radixkv
from tests.models import TRANSFORMERS_MAJOR, counted_tokens, left_pad, new_tokens, prompt, tiny_qwen2
from tests.paged import GREEDY, answer


@pytest.fixture
def patched():
    return radixkv.patch_model(tiny_qwen2(), num_blocks=200, block_size=16)


def test_the_three_lines(reference, patched):
    ids = prompt(70, seed=1)[None]
    expected = reference.generate(ids, **GREEDY)
    for computed in (70, 1):
        prefix = patched.radixkv.match_prefix(ids[0])
        with counted_tokens(patched) as rows:
            output = patched.generate(ids, prefix_cache=prefix, return_dict_in_generate=True, **GREEDY)
        assert rows[0] == computed
        assert torch.equal(output.sequences, expected)
        assert patched.radixkv.stats().blocks_leased > 0
        patched.radixkv.insert(output)
        patched.radixkv.check()
        assert patched.radixkv.stats().blocks_leased == 0
    with patched.radixkv.match_prefix(expected[0]) as lease:
        assert lease.length == 70 + 11
    patched.radixkv.insert(output)  # stored already: nothing happens
    patched.radixkv.check()


def test_exactly_this_prefix_and_nothing_stored(reference, patched):
    """The prefix chosen is used even where a longer one is known, and the tree stays as it was."""
    ids = prompt(70, seed=2)[None]
    patched.generate(ids, **GREEDY)
    cached = patched.radixkv.stats().blocks_cached
    with patched.radixkv.match_prefix(ids[0, :37]) as prefix, counted_tokens(patched) as rows:
        assert prefix.length == 37
        longer = torch.cat([ids, prompt(30, seed=3)[None]], 1)
        output = patched.generate(longer, prefix_cache=prefix, **GREEDY)
    assert rows[0] == 70 + 30 - 37
    assert torch.equal(output, reference.generate(longer, **GREEDY))
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_cached == cached
    with patched.radixkv.match_prefix(longer[0]) as lease:
        assert lease.length == 70


def test_batch_by_hand(reference, patched):
    document = prompt(50, seed=4)
    patched.generate(document[None], **GREEDY)
    ids, mask = left_pad([torch.cat([document, prompt(n, seed=5 + n)]) for n in (4, 9, 1)])
    prefix = patched.radixkv.match_prefix(document)
    with counted_tokens(patched) as rows:
        output = patched.generate(ids, attention_mask=mask, prefix_cache=prefix, return_dict_in_generate=True, **GREEDY)
    assert rows[0] == 4 + 9 + 1
    assert torch.equal(output.sequences, reference.generate(ids, attention_mask=mask, **GREEDY))
    patched.radixkv.insert(output)
    patched.radixkv.check()
    with counted_tokens(patched) as rows:
        patched.generate(ids, attention_mask=mask, **GREEDY)
    assert rows[0] == 3


def test_one_lease_for_many_questions(reference, patched):
    document = prompt(50, seed=6)
    patched.generate(document[None], **GREEDY)
    with patched.radixkv.match_prefix(document) as prefix:
        for n in range(3):
            ids = torch.cat([document, prompt(5, seed=n)])[None]
            output = patched.generate(ids, prefix_cache=prefix, return_dict_in_generate=True, **GREEDY)
            assert torch.equal(output.sequences, reference.generate(ids, **GREEDY))
            patched.radixkv.insert(output)
    assert patched.radixkv.stats().blocks_leased == 0
    patched.radixkv.check()


@pytest.mark.parametrize(("as_dict", "times"), [(True, 1000), (False, 100)])
def test_a_thousand_dropped_outputs(as_dict, times):
    """Outputs that nobody inserts give back their blocks and their lease, though the lease's own name still lives."""
    patched = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=40, block_size=16)
    ids = prompt(20, seed=7)[None]
    patched.generate(ids, max_new_tokens=1, do_sample=False)
    before = patched.radixkv.stats()
    for _ in range(times):
        prefix = patched.radixkv.match_prefix(ids[0])
        output = patched.generate(ids, prefix_cache=prefix, max_new_tokens=1, do_sample=False, return_dict_in_generate=as_dict)
    del output
    gc.collect()
    patched.radixkv.check()
    after = patched.radixkv.stats()
    assert after.blocks_leased == 0
    assert (after.blocks_free, after.blocks_cached) == (before.blocks_free, before.blocks_cached)


def test_leases_are_released_once(patched):
    ids = prompt(40, seed=8)[None]
    patched.generate(ids, **GREEDY)
    handle = patched.radixkv
    lease = handle.match_prefix(ids[0])
    assert handle.stats().blocks_leased == 3
    lease.release()
    assert handle.stats().blocks_leased == 0
    with pytest.raises(RuntimeError, match="released before"):
        lease.release()
    with pytest.raises(ValueError, match="already released"):
        patched.generate(ids, prefix_cache=lease, **GREEDY)
    with handle.match_prefix(ids[0]) as lease:
        pass
    assert lease.released
    with handle.match_prefix(prompt(5, seed=9)) as nothing:
        assert nothing.length == 0
        assert patched.generate(ids, prefix_cache=nothing, **GREEDY) is not None
    handle.check()


def test_leases_protect_what_they_hold(patched):
    ids = prompt(100, seed=10)[None]
    patched.generate(ids, **GREEDY)
    lease = patched.radixkv.match_prefix(ids[0])
    patched.radixkv.clear()
    with patched.radixkv.match_prefix(ids[0]) as again:
        assert again.length == 100
    lease.release()
    patched.radixkv.clear()
    assert patched.radixkv.stats().blocks_free == 200


def test_wrong_leases(patched):
    other = radixkv.patch_model(tiny_qwen2(), num_blocks=20, block_size=16)
    ids = prompt(40, seed=11)[None]
    for model in (patched, other):
        model.generate(ids, **GREEDY)
    handle = patched.radixkv
    cases = [
        (other.radixkv.match_prefix(ids[0]), "another model"),
        (handle.match_prefix(ids[0], namespace=("tenant", "b")), "namespace"),
        ([1, 2, 3], "must be a Lease"),
        (True, "must be a Lease"),
    ]
    for lease, message in cases:
        with pytest.raises(ValueError, match=message):
            patched.generate(ids, prefix_cache=lease, **GREEDY)
    with handle.match_prefix(ids[0]) as lease:
        with pytest.raises(ValueError, match="row 0 of input_ids does not begin"):
            patched.generate(prompt(40, seed=12)[None], prefix_cache=lease, **GREEDY)
        with pytest.raises(ValueError, match="use_cache=False"):
            patched.generate(ids, prefix_cache=lease, use_cache=False, **GREEDY)
        assert not lease.released
    for bad in ([-1, 2], [2**31], [1.5], ids):
        with pytest.raises(ValueError, match="token"):
            handle.match_prefix(bad)
    handle.check()
    assert handle.stats().blocks_leased == 0
    with handle.match_prefix(ids[0]) as lease:
        assert lease.length == 40


@pytest.mark.parametrize("chunk", [7, 16, 30, 200])
def test_a_prefix_and_a_prompt_in_chunks(reference, patched, chunk):
    """Each chunk takes its part of the prefix and of nothing else; what comes after the prefix is computed."""
    ids = prompt(100, seed=14)[None]
    expected = reference.generate(ids, **GREEDY)
    patched.generate(ids, **GREEDY)
    with counted_tokens(patched) as rows, patched.radixkv.match_prefix(ids[0, :45]) as prefix:
        assert torch.equal(patched.generate(ids, prefix_cache=prefix, prefill_chunk_size=chunk, **GREEDY), expected)
        assert patched.radixkv.pool.num_free > 0
    ends = [*range(chunk, 100, chunk), 100]
    if TRANSFORMERS_MAJOR < 5:  # there the last token is a chunk of its own
        ends = [*range(chunk, 99, chunk), 99, 100]
    wanted = [max(1, end - max(45, start)) for start, end in zip([0, *ends], ends, strict=False)]
    assert rows[: len(wanted)] == wanted
    assert sum(rows) == sum(wanted) + 11
    patched.radixkv.check()


@pytest.mark.parametrize("chunk", [1, 16, 41])
def test_a_prefix_that_a_prompt_in_chunks_departs_from(patched, chunk):
    """In chunks of one token nobody saw that."""
    ids = prompt(100, seed=15)[None]
    patched.generate(ids, **GREEDY)
    other = ids.clone()
    other[0, 40] += 1
    with patched.radixkv.match_prefix(ids[0]) as prefix:
        for wrong in (other, ids[:, :90], other[:, :60]):
            with pytest.raises(ValueError, match="of input_ids does not begin with the 100 tokens of the lease"):
                patched.generate(wrong, prefix_cache=prefix, prefill_chunk_size=chunk, **GREEDY)
            patched.radixkv.check()
        assert not prefix.released
    assert patched.radixkv.stats().blocks_leased == 0


def test_going_another_way_from_inside_a_prefix(reference, patched):
    """A search over a tree of answers cuts a cache off and goes on; inside the prefix that the cache was made with it could not go on."""
    ids = prompt(60, seed=16)[None]
    patched.generate(ids, **GREEDY)
    with patched.radixkv.match_prefix(ids[0]) as prefix:
        _, cache = answer(patched, ids, prefix_cache=prefix)
        cache.crop(10 - cache.get_seq_length())
        other = torch.cat([ids[:, :10], prompt(12, seed=17)[None]], 1)
        expected = reference.generate(other, **GREEDY)
        assert torch.equal(patched.generate(other, past_key_values=cache, **GREEDY), expected)
    del cache
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_leased == 0


def test_exception_with_a_prefix(patched):
    ids = prompt(40, seed=13)[None]
    patched.generate(ids, **GREEDY)
    prefix = patched.radixkv.match_prefix(ids[0])

    def fail(*_):
        raise RuntimeError("layer failed")

    hook = patched.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="layer failed"):
        patched.generate(ids, prefix_cache=prefix, **GREEDY)
    hook.remove()
    del prefix
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_leased == 0


@pytest.mark.parametrize("num_ids", [45, 46])
def test_insert_a_dynamic_cache(reference, patched, num_ids):
    """K/V that the stock model computed are served as our own; token ids may run one past the cache, as generate() returns them."""
    ids = prompt(45, seed=14)[None]
    cache = DynamicCache()
    reference(ids, past_key_values=cache, use_cache=True)
    token_ids = torch.cat([ids, prompt(1, seed=15)[None]], 1)[:, :num_ids]
    patched.radixkv.insert(token_ids[0], cache)
    patched.radixkv.check()
    assert patched.radixkv.stats().requests == 0
    question = torch.cat([ids, prompt(8, seed=16)[None]], 1)
    with counted_tokens(patched) as rows:
        got = patched.generate(question, **GREEDY)
    assert rows[0] == 8
    assert torch.equal(got, reference.generate(question, **GREEDY))


def test_insert_a_batch_of_dynamic_caches(reference, patched):
    ids = torch.stack([prompt(33, seed=17), prompt(33, seed=18)])
    cache = DynamicCache()
    reference(ids, past_key_values=cache, use_cache=True)
    patched.radixkv.insert(ids, cache)
    with counted_tokens(patched) as rows:
        got = patched.generate(ids, **GREEDY)
    assert rows[0] == 2
    assert torch.equal(new_tokens(got, ids), new_tokens(reference.generate(ids, **GREEDY), ids))
    patched.radixkv.check()


def test_insert_refuses_what_does_not_fit(reference, patched):
    ids = prompt(30, seed=19)[None]
    cache = DynamicCache()
    reference(ids, past_key_values=cache, use_cache=True)
    handle = patched.radixkv
    half = DynamicCache()
    tiny_qwen2(dtype=torch.float16)(ids, past_key_values=half, use_cache=True)
    shallow = DynamicCache()
    tiny_qwen2(num_layers=2)(ids, past_key_values=shallow, use_cache=True)
    for arguments, error, message in [
        ((ids[0, :20], cache), ValueError, "holds 30 tokens, token_ids only 20"),
        ((ids[0], half), ValueError, "must be torch.float32"),
        ((ids[0], shallow), ValueError, "expected 3 layers"),
        ((ids,), TypeError, "return_dict_in_generate"),
        ((reference.generate(ids, return_dict_in_generate=True, **GREEDY),), TypeError, "return_dict_in_generate"),
    ]:
        with pytest.raises(error, match=message):
            handle.insert(*arguments)
    other = radixkv.patch_model(tiny_qwen2(), num_blocks=20, block_size=16)
    with pytest.raises(ValueError, match="another model"):
        handle.insert(other.generate(ids, return_dict_in_generate=True, **GREEDY))
    handle.check()
    assert handle.stats().blocks_free == 200
