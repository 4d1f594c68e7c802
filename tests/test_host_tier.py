"""Evicted blocks go to host memory and come back on a hit: the same bits, and conservation in both tiers after every operation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import radixkv
from radixkv.attention import Backend
from radixkv.cache import PrefixCache
from radixkv.errors import OutOfBlocks
from radixkv.host_tier import HostTier
from radixkv.pool import BlockPool
from tests.models import prompt, tiny_qwen2

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 2, 16, 16
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * BLOCK_SIZE * 4


def make_cache(num_blocks: int, host_blocks: int, **options: Any) -> PrefixCache:
    pool = BlockPool(
        num_blocks,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return PrefixCache(pool, Backend("torch", num_heads=4, pool=pool), host_bytes=host_blocks * BLOCK_BYTES, **options)


def computed(ids: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V that name their whole prefix, so that no token's are those of another place."""
    marks = torch.tensor([hash(tuple(ids[: i + 1])) % 1_000_003 for i in range(len(ids))], dtype=torch.float32)
    rows = marks[:, None, None] + torch.arange(KV_HEADS * HEAD_DIM).view(1, KV_HEADS, HEAD_DIM) / 64
    return [rows + layer for layer in range(LAYERS)], [-rows - layer for layer in range(LAYERS)]


def store(cache: PrefixCache, ids: list[int]) -> None:
    cache.insert_computed(ids, *computed(ids))
    cache.check()


def assert_cached(cache: PrefixCache, ids: list[int], length: int) -> None:
    """The cache finds so many tokens, and what the pool holds of them is what was computed."""
    with cache.match_prefix(ids) as lease:
        assert lease.length == length
        for pools, wanted in zip((cache.pool.keys, cache.pool.values), computed(ids), strict=True):
            for pool, rows in zip(pools, wanted, strict=True):
                got = pool[lease.blocks].transpose(1, 2).flatten(0, 1)[:length]
                assert torch.equal(got, rows[:length])
    cache.check()


def ids(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=num_tokens)


def test_an_evicted_prefix_comes_back_with_the_same_bits() -> None:
    cache = make_cache(num_blocks=8, host_blocks=20)
    first, second = ids(100, 1), ids(120, 2)  # 7 and 8 blocks
    store(cache, first)
    store(cache, second)
    assert cache.tree.match_prefix(first, cache.full_namespace()).length == 0
    assert_cached(cache, first, 100)
    assert_cached(cache, second, 120)
    stats = cache.stats()
    assert stats.restored_tokens == 100 + 104 and stats.blocks_host == 15  # a block of the second was still in the pool


def test_only_what_is_missing_is_copied() -> None:
    """Leaves that share a beginning store it once, and bring back what the pool has lost of it."""
    cache = make_cache(num_blocks=12, host_blocks=40)
    tier = cache.tier
    assert tier is not None
    document = ids(64, 1)
    questions = [document + ids(40, seed) for seed in range(2, 8)]
    for question in questions:
        store(cache, question)
    assert cache.tree.match_prefix(questions[0], cache.full_namespace()).length == 64  # the document is what was used last
    before = tier.restored_tokens
    assert_cached(cache, questions[0], 104)
    assert tier.restored_tokens == before + 40
    assert tier.tree.num_blocks <= 4 + 6 * 3


def test_a_full_host_gives_up_what_was_used_longest_ago() -> None:
    cache = make_cache(num_blocks=4, host_blocks=6)
    prompts = [ids(48, seed) for seed in range(5)]
    for each in prompts:
        store(cache, each)
    assert_cached(cache, prompts[0], 0)
    assert_cached(cache, prompts[3], 48)
    assert_cached(cache, prompts[2], 0)  # gave way when bringing back the one before pushed out another
    assert_cached(cache, prompts[4], 48)


def test_of_a_prefix_longer_than_the_host_the_beginning_is_kept() -> None:
    cache = make_cache(num_blocks=8, host_blocks=3)
    long, other = ids(120, 1), ids(128, 2)
    store(cache, long)
    store(cache, other)
    assert_cached(cache, long, 48)


def test_a_partly_filled_tail_grows_in_both_tiers() -> None:
    cache = make_cache(num_blocks=4, host_blocks=16)
    chat, other = ids(60, 1), ids(64, 2)
    for length in (20, 27, 40, 60):
        store(cache, chat[:length])
        store(cache, other)  # evicts all of the chat
        assert_cached(cache, chat, length)
    assert cache.tier is not None and cache.tier.tree.num_tokens <= 60 + 64


def test_what_is_running_is_never_moved_and_nothing_is_lost_without_room() -> None:
    cache = make_cache(num_blocks=4, host_blocks=16)
    first, second = ids(60, 1), ids(64, 2)
    store(cache, first)
    store(cache, second)
    with cache.match_prefix(second) as lease:
        assert lease.length == 64
        assert_cached(cache, first, 0)  # every block of the pool is leased
        with pytest.raises(OutOfBlocks):
            store(cache, ids(20, 3))
        cache.check()
    assert_cached(cache, first, 60)


def test_clear_and_invalidate_empty_both_tiers() -> None:
    for drop in (PrefixCache.clear, PrefixCache.invalidate):
        cache = make_cache(num_blocks=4, host_blocks=16)
        store(cache, ids(60, 1))
        store(cache, ids(64, 2))
        drop(cache)
        assert cache.stats().blocks_host == 0
        assert_cached(cache, ids(60, 1), 0)


def test_an_exception_while_copying_loses_nothing_that_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(num_blocks=4, host_blocks=16)
    store(cache, ids(60, 1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HostTier, "_copy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store(cache, ids(64, 2))
    monkeypatch.undo()
    cache.check()
    store(cache, ids(64, 2))
    assert_cached(cache, ids(64, 2), 64)


@pytest.mark.parametrize("value", [-1, 100, 1.5, True], ids=str)
def test_a_budget_that_holds_no_block_is_refused(value: Any) -> None:
    model = tiny_qwen2(seed=3, num_layers=1)
    with pytest.raises(ValueError, match="host_bytes must be an int of at least one block"):
        radixkv.patch_model(model, num_blocks=8, host_bytes=value)
    assert not hasattr(model, "radixkv")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_generate_computes_nothing_that_the_host_has(backend: str) -> None:
    model, stock = tiny_qwen2(seed=3, num_layers=2), tiny_qwen2(seed=3, num_layers=2)
    radixkv.patch_model(model, num_blocks=6, block_size=16, backend=backend, host_bytes=1 << 20)
    documents = [prompt(70, seed=seed) for seed in (1, 2, 3)]
    computed_before = 0
    for number, document in enumerate([*documents, *documents]):
        rows = torch.cat([document, prompt(3, seed=50 + number)])[None]
        expected = stock.generate(rows, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(rows, max_new_tokens=4, do_sample=False), expected)
        model.radixkv.check()
        computed_now = model.radixkv.stats().computed_tokens
        assert computed_now - computed_before == (73 if number < 3 else 3) + 3
        computed_before = computed_now
    assert model.radixkv.stats().restored_tokens >= 3 * 70
