"""Pins: what is pinned stays, within a budget, through everything but `invalidate()`."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import radixkv
from radixkv import OutOfBlocks, PrefixCache
from radixkv.attention import Backend
from radixkv.pool import BlockPool
from tests.models import counted_tokens, prompt, tiny_qwen2

BLOCK = 16


def make_cache(num_blocks: int = 20, **options) -> PrefixCache:
    pool = BlockPool(num_blocks, num_layers=1, num_kv_heads=1, head_dim=16, block_size=BLOCK, dtype=torch.float32, device="cpu")
    return PrefixCache(pool, Backend("torch", num_heads=1, pool=pool), **options)


def tokens(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def store(cache: PrefixCache, token_ids: list[int], **options) -> None:
    rows = torch.zeros(len(token_ids), 1, 16)
    cache.insert_computed(token_ids, [rows], [rows], **options)
    cache.check()


def cached_len(cache: PrefixCache, token_ids: list[int]) -> int:
    with cache.match_prefix(token_ids) as lease:
        return lease.length


@pytest.fixture
def cache():
    cache = make_cache()
    yield cache
    cache.check()


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "slru", "priority", "cost"])
def test_pinned_blocks_are_never_evicted(eviction):
    cache = make_cache(eviction=eviction)
    store(cache, tokens(40))
    pin = cache.pin(tokens(40))
    assert (pin.length, len(pin.blocks), pin.released) == (40, 3, False)
    for first in range(1000, 5000, 100):
        store(cache, tokens(60, first))
    assert cached_len(cache, tokens(40)) == 40
    assert cache.stats().evicted_tokens > 1000
    pin.release()
    cache.pool.release(cache.tree.evict(20))
    assert cached_len(cache, tokens(40)) == 0
    cache.check()


def test_pins_are_in_the_statistics(cache):
    store(cache, tokens(48))
    store(cache, tokens(32) + tokens(16, 500))
    first, second = cache.pin(tokens(48)), cache.pin(tokens(32) + tokens(16, 500))
    stats = cache.stats()
    assert (stats.blocks_pinned, stats.blocks_leased, stats.blocks_cached) == (4, 4, 0)  # two blocks are under both
    assert stats.blocks_free + stats.blocks_cached + stats.blocks_leased == 20
    assert cache.pins == (first, second)
    cache.unpin(first)
    assert cache.stats().blocks_pinned == 3
    second.release()
    assert (cache.stats().blocks_pinned, cache.pins) == (0, ())
    assert cache.stats().blocks_cached == 4


def test_nothing_is_computed_and_only_what_is_cached_is_pinned(cache):
    store(cache, tokens(40))
    pin = cache.pin(tokens(40) + tokens(100, 900))
    assert pin.length == 40 and pin.tokens == b"".join(token.to_bytes(4, "little") for token in range(40))
    assert cache.stats().computed_tokens == 0
    assert f"length={40}" in repr(pin)


@pytest.mark.parametrize("given", [tuple, torch.tensor, lambda ids: torch.tensor(ids).numpy()], ids=["tuple", "torch", "numpy"])
def test_tokens_come_in_any_form(cache, given):
    store(cache, tokens(20))
    assert cache.pin(given(tokens(20))).length == 20


@pytest.mark.parametrize("token_ids", [tokens(5, 700), []], ids=["unknown", "none"])
def test_nothing_cached_is_an_error_that_says_what_to_do(cache, token_ids):
    store(cache, tokens(20))
    with pytest.raises(ValueError, match=rf"nothing of these {len(token_ids)} tokens is cached.*run generate\(\) on them or insert\(\)"):
        cache.pin(token_ids)
    assert (cache.pins, cache.stats().blocks_leased) == ((), 0)


def test_namespaces_are_apart(cache):
    store(cache, tokens(20))
    with pytest.raises(ValueError, match="cached in namespace \\('tenant',\\)"):
        cache.pin(tokens(20), namespace=("tenant",))
    with pytest.raises(ValueError, match="namespace must be a tuple"):
        cache.pin(tokens(20), namespace="tenant")


def test_the_budget_is_a_share_of_the_pool_and_the_error_has_the_figures():
    cache = make_cache(num_blocks=20, pin_budget=0.25)
    store(cache, tokens(48))
    store(cache, tokens(64, 100))
    held = cache.pin(tokens(48))
    with pytest.raises(OutOfBlocks, match=r"these 64 tokens need 4 more blocks, 3 are pinned, and pin_budget=0.25 allows 5 of 20.*unpin"):
        cache.pin(tokens(64, 100))
    assert (cache.stats().blocks_pinned, cache.stats().blocks_leased, cache.pins) == (3, 3, (held,))
    again = cache.pin(tokens(48))  # what is pinned already costs nothing more
    part = cache.pin(tokens(32, 100))
    assert cache.stats().blocks_pinned == 5
    held.release()
    assert cache.stats().blocks_pinned == 5
    again.release()
    assert cache.pin(tokens(48, 100)).length == 48
    part.release()
    assert cache.stats().blocks_pinned == 3
    cache.check()


def test_half_of_the_pool_may_be_pinned_by_default():
    cache = make_cache(num_blocks=8)
    store(cache, tokens(5 * BLOCK))
    with pytest.raises(OutOfBlocks, match="allows 4 of 8"):
        cache.pin(tokens(5 * BLOCK))
    assert cache.pin(tokens(4 * BLOCK)).length == 64


@pytest.mark.parametrize("budget", [-0.1, 1.5, "half", True, float("nan")])
def test_a_budget_is_a_share(budget):
    for make in (lambda: make_cache(pin_budget=budget), lambda: radixkv.patch_model(tiny_qwen2(), pin_budget=budget)):
        with pytest.raises(ValueError, match="pin_budget must be a share of the pool from 0 to 1"):
            make()


def test_no_budget_pins_nothing():
    cache = make_cache(pin_budget=0)
    store(cache, tokens(20))
    with pytest.raises(OutOfBlocks, match="pin_budget=0"):
        cache.pin(tokens(20))


def test_pins_survive_clear_and_not_invalidate(cache):
    store(cache, tokens(40))
    store(cache, tokens(40, 100))
    pin = cache.pin(tokens(40))
    cache.clear()
    assert (cached_len(cache, tokens(40)), cached_len(cache, tokens(40, 100))) == (40, 0)
    cache.invalidate()
    assert pin.released and cache.pins == ()
    stats = cache.stats()
    assert (stats.blocks_pinned, stats.blocks_leased, stats.blocks_free) == (0, 0, 20)
    pin.release()  # the user cannot know
    cache.unpin(pin)


def test_a_dropped_pin_holds_on_and_a_with_block_lets_go(cache):
    store(cache, tokens(40))
    cache.pin(tokens(40))
    gc.collect()
    assert cache.stats().blocks_pinned == 3
    cache.pins[0].release()
    with cache.pin(tokens(20)) as pin:
        assert cache.stats().blocks_pinned == 2
    assert pin.released and cache.stats().blocks_pinned == 0


def test_only_pins_of_this_cache_are_unpinned(cache):
    other = make_cache()
    store(other, tokens(20))
    for given in (other.pin(tokens(20)), tokens(20), None):
        with pytest.raises(ValueError, match=r"unpin: expected what pin\(\) of this cache returned"):
            cache.unpin(given)  # type: ignore[arg-type]
    assert len(other.pins) == 1


def test_a_pin_survives_splits_and_longer_prompts(cache):
    store(cache, tokens(90))
    pin = cache.pin(tokens(70))
    blocks = pin.blocks
    store(cache, tokens(35) + tokens(30, 500))
    store(cache, tokens(70) + tokens(30, 600))
    store(cache, tokens(120))
    cache.clear()
    with cache.match_prefix(tokens(70)) as lease:
        assert lease.length == 70 and tuple(lease.blocks) == blocks


def test_a_full_pool_says_how_much_of_it_is_pinned():
    cache = make_cache(num_blocks=8, pin_budget=1)
    store(cache, tokens(6 * BLOCK))
    pin = cache.pin(tokens(6 * BLOCK))
    with pytest.raises(OutOfBlocks, match=r"need 3 blocks of 16 tokens; 2 free, 0 evictable, 6 leased \(6 of them pinned\): unpin"):
        store(cache, tokens(3 * BLOCK, 500))
    assert cached_len(cache, tokens(6 * BLOCK)) == 6 * BLOCK
    pin.release()
    store(cache, tokens(3 * BLOCK, 500))


def test_pins_from_several_threads(cache):
    store(cache, tokens(100))

    def work() -> None:
        for length in range(1, 100):
            with cache.pin(tokens(length)) as pin:
                assert pin.length == length

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.stats().blocks_pinned == 0 and cache.tree.num_leases == 0


def test_a_prefix_in_host_memory_comes_back_to_be_pinned():
    cache = make_cache(num_blocks=8, host_bytes=1 << 20)
    store(cache, tokens(40))
    for first in range(1000, 1500, 100):
        store(cache, tokens(60, first))
    assert cache.tree.match_prefix(tokens(40), cache.full_namespace()).length == 0
    assert cache.pin(tokens(40)).length == 40
    assert cache.stats().restored_tokens == 40
    cache.check()


# Stale namespaces and priorities, as a cache has them


def test_blocks_of_old_weights_take_no_room_in_host_memory():
    cache = make_cache(num_blocks=4, host_bytes=1 << 20)
    store(cache, tokens(64))
    lease = cache.match_prefix(tokens(64))
    cache.invalidate()
    lease.release()
    store(cache, tokens(64, 100))
    assert (cached_len(cache, tokens(64, 100)), cache.stats().blocks_host) == (64, 0)
    store(cache, tokens(64, 200))
    assert cache.stats().blocks_host == 4


def test_what_runs_with_old_weights_is_the_first_to_go_when_it_is_done(cache):
    store(cache, tokens(32))
    lease = cache.match_prefix(tokens(32))
    old = lease.blocks
    cache.invalidate()
    store(cache, tokens(32, 100))
    lease.release()
    assert cache.stats().blocks_cached == 4
    assert cache.tree.evict(2) == old[::-1]
    cache.pool.release(old)
    assert cached_len(cache, tokens(32, 100)) == 32


def test_priorities_of_a_cache():
    cache = make_cache(num_blocks=8, eviction="priority")
    store(cache, tokens(32), priority=3)
    store(cache, tokens(32, 100))
    with cache.match_prefix(tokens(32, 100), priority=5):
        pass
    store(cache, tokens(32, 200))
    store(cache, tokens(64, 300), priority=9)
    assert [cached_len(cache, tokens(32, first)) for first in (0, 100, 200)] == [32, 32, 0]
    with pytest.raises(ValueError, match="eviction='priority'"):
        store(make_cache(), tokens(5), priority=1)


# On a model


def test_a_pinned_system_prompt_is_not_computed_again():
    reference = tiny_qwen2()
    patched = radixkv.patch_model(tiny_qwen2(), num_blocks=16, block_size=16, pin_budget=0.3, eviction="fifo")
    assert patched.radixkv.tree.queue.name == "fifo"
    greedy = {"max_new_tokens": 4, "do_sample": False}
    system = prompt(64, seed=1)
    patched.generate(system[None], **greedy)
    pin = patched.radixkv.pin(system)
    for seed in range(2, 8):
        patched.generate(prompt(100, seed)[None], **greedy)
    ids = torch.cat([system, prompt(20, seed=9)])[None]
    with counted_tokens(patched) as rows:
        output = patched.generate(ids, **greedy)
    assert rows[0] == 20
    assert torch.equal(output, reference.generate(ids, **greedy))
    patched.load_state_dict(tiny_qwen2(seed=7).state_dict())
    assert torch.equal(patched.generate(ids, **greedy), tiny_qwen2(seed=7).generate(ids, **greedy))
    assert pin.released
    patched.radixkv.check()


def test_a_model_that_is_cast_lets_go_of_its_pins():
    patched = radixkv.patch_model(tiny_qwen2(), num_blocks=16, block_size=16)
    ids = prompt(40, seed=1)
    patched.generate(ids[None], max_new_tokens=2)
    pin = patched.radixkv.pin(ids)
    patched.to(torch.bfloat16).generate(ids[None], max_new_tokens=2)
    assert pin.released and patched.radixkv.stats().blocks_pinned == 0
    patched.radixkv.check()


def test_the_lease_of_a_generate_gives_its_priority_to_what_it_stores():
    patched = radixkv.patch_model(tiny_qwen2(), num_blocks=12, block_size=16, eviction="priority")
    greedy = {"max_new_tokens": 4, "do_sample": False}
    first, second = prompt(60, seed=1), prompt(60, seed=2)
    with patched.radixkv.match_prefix(first, priority=2) as lease:
        output = patched.generate(first[None], prefix_cache=lease, return_dict_in_generate=True, **greedy)
        patched.radixkv.insert(output)
    patched.generate(second[None], **greedy)
    patched.generate(prompt(100, seed=3)[None], **greedy)
    assert cached_len(patched.radixkv, first.tolist()) == 60
    assert cached_len(patched.radixkv, second.tolist()) < 60
