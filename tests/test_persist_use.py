"""What a saved cache knows of the use of its prefixes: after loading, eviction goes on as it would have gone on."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import radixkv
from radixkv.load_plan import plan_load
from radixkv.node import Root
from radixkv.saved_nodes import SavedNodes
from radixkv.snapshot import Snapshot
from radixkv.token_key import token_key
from tests.calls import calls_of
from tests.persisted import contents, make_cache, path_of, prefixes, store

NAMES = ["lru", "lfu", "fifo", "slru", "priority", "cost"]
BLOCK = 16


def eviction_by_block(cache: radixkv.PrefixCache) -> list[tuple[tuple, list[int]]]:
    """The prefixes that end in the blocks that go, in their order; afterwards nothing is cached."""
    gone = []
    while (victim := cache.tree.first_to_go()) is not None:
        namespace, ids = path_of(victim)
        gone.append((namespace, ids.tolist()))
        cache.pool.release(cache.tree.evict(1))
    return gone


def used_cache(eviction: str, seed: int, num_blocks: int = 400) -> radixkv.PrefixCache:
    """Prompts that share beginnings, used unequally often, with priorities where the policy takes them."""
    rng = random.Random(seed)
    cache = make_cache(num_blocks=num_blocks, eviction=eviction)
    known: list[list[int]] = [[]]
    for _ in range(40):
        start = rng.choice(known)
        known.append(start[: rng.randint(0, len(start))] + [rng.randrange(1000) for _ in range(rng.randint(1, 60))])
        store(cache, known[-1])
        for _ in range(rng.choice([0, 0, 1, 5])):
            priority = rng.choice([None, -3, 0, 7]) if eviction == "priority" else None
            lease = cache.match_prefix(rng.choice(known), (), priority)
            lease.count_hit()
            lease.release()
    cache.check()
    return cache


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eviction", NAMES)
def test_eviction_goes_on_as_it_would_have(tmp_path, eviction, seed):
    """A cache came back with every prefix used once: under LFU and SLRU what was reused most went as early as what never was."""
    cache, other = used_cache(eviction, seed), make_cache(num_blocks=400, eviction=eviction)
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    hits = {str(path_of(node)): node.hits for node in cache.tree.nodes() if not isinstance(node, Root) and node.hits}
    assert {str(path_of(node)): node.hits for node in other.tree.nodes() if not isinstance(node, Root) and node.hits} == hits
    assert contents(other) == contents(cache)
    expected = eviction_by_block(cache)
    assert len(expected) > 60 and len(hits) > 5
    assert eviction_by_block(other) == expected


@pytest.mark.parametrize("eviction", ["lfu", "slru", "priority"])
def test_what_was_worth_most_stays_when_room_is_wanted_after_loading(tmp_path, eviction):
    """The same as a user sees it: an old prompt that was used often, or has a high priority, survives newer ones."""
    cache, other = make_cache(num_blocks=40, eviction=eviction), make_cache(num_blocks=40, eviction=eviction)
    valued = np.arange(64)
    store(cache, valued)
    store(cache, np.arange(1000, 1064))
    for _ in range(5):
        cache.match_prefix(valued, priority=9 if eviction == "priority" else None).release()
    for first in range(1100, 1600, 100):
        store(cache, np.arange(first, first + 64))
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    for first in range(5000, 6000, 100):
        store(other, np.arange(first, first + 64))
    assert other.match_prefix(valued).length == 64
    assert other.stats().evicted_tokens > 0


@pytest.mark.parametrize(("saved", "loaded"), [("slru", "lfu"), ("lfu", "priority"), ("cost", "lru"), ("lru", "slru"), ("fifo", "cost")])
def test_another_policy_takes_over_the_order_of_the_uses_only(tmp_path, saved, loaded):
    cache, other = used_cache(saved, 5), make_cache(num_blocks=400, eviction=loaded)
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)
    orders = []
    for each in (cache, other):
        leaves = [node for node in each.tree.nodes() if not isinstance(node, Root) and not node.children]
        orders.append([str(path_of(leaf)) for leaf in sorted(leaves, key=lambda leaf: leaf.stamp)])
    assert orders[0] == orders[1]
    other.check()
    assert len(eviction_by_block(other)) == len(eviction_by_block(cache))


def test_priorities_of_any_size_can_be_saved(tmp_path):
    cache, other = make_cache(eviction="priority"), make_cache(eviction="priority")
    for first, priority in ((0, 10**400), (100, -(10**400)), (200, 2**53 - 1), (300, 2**53 - 2)):
        store(cache, np.arange(first, first + BLOCK))
        cache.match_prefix(np.arange(first, first + BLOCK), priority=priority).release()
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert [ids[0] for _, ids in eviction_by_block(other)] == [100, 300, 200, 0]


def test_what_is_cached_already_keeps_what_is_known_of_it(tmp_path):
    cache, other = make_cache(eviction="lfu"), make_cache(eviction="lfu")
    both, more = np.arange(48), np.arange(500, 548)
    for ids, times in ((both, 1), (more, 3)):
        store(cache, ids)
        for _ in range(times):
            cache.match_prefix(ids).release()
    store(other, both)
    for _ in range(9):
        other.match_prefix(both).release()
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert [ids[0] for _, ids in eviction_by_block(other)] == [500] * 3 + [0] * 3


def test_pins_are_of_a_running_process_and_are_not_saved(tmp_path):
    """What a pin holds is saved like everything else; where it is loaded nobody holds it, and the budget is untouched."""
    cache, other = make_cache(), make_cache()
    store(cache, np.arange(40))
    pin = cache.pin(np.arange(40))
    store(cache, np.arange(500, 540))
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)
    assert other.pins == () and (other.stats().blocks_pinned, other.stats().blocks_leased) == (0, 0)
    assert not pin.released and cache.pins == (pin,)
    cache.load(tmp_path / "prefixes")
    assert cache.pins == (pin,) and cache.stats().blocks_pinned == 3
    assert other.pin(np.arange(40)).length == 40


# Deep trees ---------------------------------------------------------------------------------------------------------------------------


def deep_cache(depth: int, num_blocks: int | None = None) -> radixkv.PrefixCache:
    """A conversation each of whose turns was tried twice: `depth` nodes one below the other, each with a sibling."""
    cache = make_cache(num_blocks=2 * depth + 2 if num_blocks is None else num_blocks, num_layers=1)
    key = token_key(range(depth * BLOCK))
    blocks = cache.pool.allocate(depth)
    namespace = cache.full_namespace()
    cache.tree.insert(key, blocks, namespace)
    for i in range(1, depth):
        own = cache.pool.allocate(1)
        cache.tree.insert(key[: i * 4 * BLOCK] + token_key([i] * BLOCK), blocks[:i] + own, namespace)
    assert len(cache.tree.nodes()) == 2 * depth
    return cache


@pytest.mark.parametrize("room", [1.0, 0.3], ids=["all of it", "a part of it"])
def test_the_work_of_loading_grows_with_the_tokens_and_not_with_the_depth(tmp_path, room):
    """5,000 nodes, half of them one below the other, took 17 s: each prefix was built and looked up from its beginning."""
    calls = {}
    for depth in (150, 600):
        cache = deep_cache(depth)
        saving, report = calls_of(cache.save, tmp_path / "prefixes")
        other = make_cache(num_blocks=int(room * (2 * depth + 2)), num_layers=1)
        loading, loaded = calls_of(other.load, tmp_path / "prefixes")
        assert report.num_tokens == loaded.loaded_tokens + loaded.left_out_tokens == (2 * depth - 1) * BLOCK
        assert (loaded.left_out_tokens == 0) == (room == 1.0)
        again, known = calls_of(other.load, tmp_path / "prefixes")
        assert known.known_tokens == loaded.loaded_tokens
        other.check()
        calls[depth] = saving, loading, again
    for small, large in zip(calls[150], calls[600], strict=True):
        assert large <= 4.4 * small


def test_no_key_of_a_deep_tree_is_built_as_a_whole(monkeypatch):
    """The bytes of all keys that planning makes are a small multiple of the tokens'."""
    cache = deep_cache(400)
    nodes = Snapshot(cache).nodes()
    built = 0
    real_key = SavedNodes.key

    def key(*arguments: Any) -> bytes:
        nonlocal built
        made = real_key(*arguments)
        built += len(made)
        return made

    monkeypatch.setattr(SavedNodes, "key", key)
    plan = plan_load(nodes, [cache.full_namespace()[:1] + each for each in nodes.namespaces], make_cache(1000).tree, 1000)
    assert plan.num_loaded == nodes.num_tokens
    assert built <= 3 * len(nodes.tokens)


def test_a_deep_tree_in_host_memory_is_saved_in_linear_time_too(tmp_path):
    calls = {}
    for depth in (100, 400):
        pool = make_cache(num_blocks=2 * depth + 2, num_layers=1).pool
        cache = radixkv.PrefixCache(pool, make_cache(num_layers=1).backend, host_bytes=1 << 24)
        assert cache.tier is not None
        key, namespace = token_key(range(depth * BLOCK)), cache.full_namespace()
        blocks = cache.tier.pool.allocate(depth)
        cache.tier.tree.insert(key, blocks, namespace)
        for i in range(1, depth):
            own = cache.tier.pool.allocate(1)
            cache.tier.tree.insert(key[: i * 4 * BLOCK] + token_key([i] * BLOCK), blocks[:i] + own, namespace)
        half = cache.pool.allocate(depth // 2)
        cache.tree.insert(key[: depth // 2 * 4 * BLOCK], half, namespace)
        calls[depth], report = calls_of(cache.save, tmp_path / "prefixes")
        assert report.num_tokens == (2 * depth - 1) * BLOCK
        other = make_cache(num_blocks=2 * depth, num_layers=1)
        assert other.load(tmp_path / "prefixes").loaded_tokens == report.num_tokens
        assert other.match_prefix(range(depth * BLOCK)).length == depth * BLOCK
        other.check()
    assert calls[400] <= 4.4 * calls[100]
