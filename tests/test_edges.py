"""Faults found by attack: each test says what went wrong before."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

import radixkv
from radixkv.errors import OutOfBlocks
from tests.models import counted_tokens, left_pad, prompt, tiny_qwen2
from tests.small_cache import ask, keep, small_cache

GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def patched():
    return radixkv.patch_model(tiny_qwen2(), num_blocks=100, block_size=16)


def test_two_patched_models_that_share_a_configuration_in_two_threads():
    """One thread's switch of the attention implementation was undone by the other in the middle of a forward, and its name grew."""
    config = tiny_qwen2().config
    models = [Qwen2ForCausalLM(config).eval() for _ in range(2)]
    for model in models:
        model.generation_config.eos_token_id = None
    ids = [prompt(30, seed)[None] for seed in range(8)]
    expected = [[model.generate(row, **GREEDY) for row in ids] for model in models]
    for model in models:
        radixkv.patch_model(model, num_blocks=40, block_size=16)
    wrong: list[int] = []

    def work(which: int) -> None:
        wrong.append(sum(not torch.equal(models[which].generate(ids[i], **GREEDY), expected[which][i]) for i in range(8)))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_refused(rope_type):
    """K of a short prompt were reused in a longer one that rotates them otherwise."""
    model = tiny_qwen2()
    model.config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(NotImplementedError, match=rope_type):
        radixkv.patch_model(model)


def test_weights_changed_before_the_first_generate(patched):
    """What was inserted before any generate() was served with later weights."""
    ids = prompt(50, seed=1)[None]
    cache = DynamicCache()
    with torch.no_grad():
        tiny_qwen2()(ids, past_key_values=cache, use_cache=True)
    patched.radixkv.insert(ids[0], cache)
    patched.load_state_dict(tiny_qwen2(seed=7).state_dict())
    assert torch.equal(patched.generate(ids, **GREEDY), tiny_qwen2(seed=7).generate(ids, **GREEDY))


def test_writes_through_data_need_a_word(patched):
    """A write through `.data` leaves no trace, so that the user must say it: `invalidate()` is the way."""
    ids = prompt(50, seed=2)[None]
    patched.generate(ids, **GREEDY)
    for parameter, other in zip(patched.parameters(), tiny_qwen2(seed=7).parameters(), strict=True):
        parameter.data.copy_(other.data)
    patched.radixkv.invalidate()
    assert torch.equal(patched.generate(ids, **GREEDY), tiny_qwen2(seed=7).generate(ids, **GREEDY))


def test_hooks_that_change_something_need_a_namespace(patched, reference):
    """Most hooks only look on, so that adding one makes nothing stale: one that steers the model has K/V of its own."""
    ids = prompt(50, seed=2)[None]
    plain = patched.generate(ids, **GREEDY)
    steered = []
    for model, options in ((patched, {"namespace": ("steered",)}), (reference, {})):
        hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: 1.7 * output)
        steered += [model.generate(ids, **GREEDY, **options) for _ in range(2)]
        hook.remove()
    assert all(torch.equal(tokens, steered[-1]) for tokens in steered) and not torch.equal(steered[-1], plain)
    assert torch.equal(patched.generate(ids, **GREEDY), plain)


def test_inserted_tensors_bring_no_graph(patched):
    """A cache computed without no_grad() made the pool require gradients and keep every graph."""
    ids = prompt(30, seed=3)[None]
    cache = DynamicCache()
    tiny_qwen2()(ids, past_key_values=cache, use_cache=True)
    patched.radixkv.insert(ids[0], cache)
    assert not any(tensor.requires_grad for pair in patched.radixkv.pool.pools for tensor in pair)


def test_hooks_on_the_model_see_padded_calls(patched):
    """A forward hook on the model got the packed logits, and changed those of the last row only."""
    ids, mask = left_pad([prompt(30, seed=4), prompt(18, seed=5)])
    reference = tiny_qwen2()
    free = reference.generate(ids, attention_mask=mask, **GREEDY)
    banned = free[:, ids.shape[1] :].unique()[::2]

    def ban(module, args, output):
        output.logits[:, -1, banned] = -1e9
        return output

    for model in (reference, patched):
        model.register_forward_hook(ban)
    expected = reference.generate(ids, attention_mask=mask, **GREEDY)
    assert not torch.equal(expected, free)
    for _ in range(2):
        assert torch.equal(patched.generate(ids, attention_mask=mask, **GREEDY), expected)


@pytest.mark.parametrize(
    "bad",
    [prompt(20, seed=6)[None] + 2**32, -prompt(20, seed=6)[None], prompt(20, seed=6)[None] + 0.7, prompt(20, seed=6)[None].to(torch.int16)],
    ids=["beyond int32", "negative", "float", "int16"],
)
def test_ids_that_are_none(patched, bad):
    """Ids were cut to 32 bits, or rounded, and answered."""
    with pytest.raises(ValueError, match="token ids must be|input_ids must be"):
        patched.generate(bad, attention_mask=torch.ones(bad.shape, dtype=torch.int64), pad_token_id=0, **GREEDY)
    patched.radixkv.check()


def test_window_and_a_mask_with_holes():
    """Stock counts a window in columns, holes included; positions without the holes let it reach further."""
    settings: dict = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
    reference = tiny_qwen2(seed=4, **settings)
    model = radixkv.patch_model(tiny_qwen2(seed=4, **settings), num_blocks=40, block_size=16)
    ids = prompt(50, seed=7)[None]
    mask = torch.ones_like(ids)
    mask[0, 30:36] = 0
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), reference.generate(ids, attention_mask=mask, **GREEDY))
    assert model.radixkv.stats().stock_calls == 1


def test_a_mask_with_holes(patched):
    ids, mask = left_pad([prompt(50, seed=8), prompt(40, seed=9)])
    mask[0, 20:29] = 0
    mask[1, 30] = 0
    expected = tiny_qwen2().generate(ids, attention_mask=mask, **GREEDY)
    for _ in range(2):
        assert torch.equal(patched.generate(ids, attention_mask=mask, **GREEDY), expected)
    assert patched.radixkv.stats().cached_tokens == 41 + 39 - 2


def test_autocast_takes_the_stock_path(patched):
    ids = prompt(30, seed=10)[None]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patched.generate(ids, **GREEDY), tiny_qwen2().generate(ids, **GREEDY))
    assert patched.radixkv.stats().stock_calls == 1


def test_a_failed_step_is_counted_as_computed(patched):
    def fail(*_):
        raise RuntimeError("layer failed")

    patched.model.layers[1].register_forward_pre_hook(fail)
    with counted_tokens(patched) as rows, pytest.raises(RuntimeError, match="layer failed"):
        patched.generate(prompt(30, seed=11)[None], **GREEDY)
    assert patched.radixkv.stats().computed_tokens == sum(rows) == 30


def test_arguments_that_were_taken_or_failed_obscurely(patched):
    ids = prompt(20, seed=12)
    handle = patched.radixkv
    for namespace in ("tenant", None, 3, ([1],)):
        with pytest.raises(ValueError, match="namespace must"):
            handle.match_prefix(ids, namespace=namespace)
    with pytest.raises(ValueError, match="namespace must hold hashable"):
        radixkv.patch_model(tiny_qwen2(), namespace=([1],))
    with pytest.raises(ValueError, match="num_blocks must be an int"):
        radixkv.patch_model(tiny_qwen2(), num_blocks=True)
    with pytest.raises(ValueError, match="the cache is empty"):
        handle.insert(ids, DynamicCache(config=patched.config))
    for cache in ([1], (torch.zeros(1), torch.zeros(1))):
        with pytest.raises(TypeError, match="cache must be a DynamicCache"):
            handle.insert(ids, cache)
    with pytest.raises(ValueError, match="logits_to_keep"):
        patched.generate(ids[None], logits_to_keep=-1, **GREEDY)
    handle.check()
    assert handle.stats().blocks_free == 100


def test_a_request_that_is_admitted_at_the_second_try_counts_once():
    """In a pool too tight to hold a partly matched block beside its copy the row starts over, and only what it then reuses is counted."""
    cache = small_cache(5)
    keep(cache, range(40))
    cache.reset_stats()
    assert ask(cache, range(70)) == 32
    stats = cache.stats()
    assert (stats.requests, stats.hits, stats.prompt_tokens, stats.cached_tokens, stats.computed_tokens) == (1, 0, 70, 32, 38)
    cache.check()


def test_a_request_that_finds_no_room_does_not_count():
    cache = small_cache(5)
    keep(cache, range(40))
    cache.reset_stats()
    with pytest.raises(OutOfBlocks):
        ask(cache, range(90))
    assert cache.stats().requests == cache.stats().prompt_tokens == 0
    cache.check()
    assert ask(cache, range(41)) == 40
