"""Saved prefixes are equal to the bit when they are loaded, into whatever is there already."""

from __future__ import annotations

import json
import random
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open

import radixkv
from radixkv.kv_file import PIECE_BYTES, TensorSpec, build_header, open_verified, replacing
from tests.persisted import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    contents,
    filled,
    ids_of,
    make_cache,
    order_of_eviction,
    prefixes,
    store,
)


# Round trips --------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("saved", "loaded"), [(16, 16), (64, 16), (16, 64), (32, 128)])
def test_round_trip_is_equal_to_the_bit(tmp_path, dtype, saved, loaded):
    cache, other = filled(block_size=saved, dtype=dtype), make_cache(block_size=loaded, dtype=dtype)
    report = cache.save(tmp_path / "prefixes")
    assert report.num_bytes == (tmp_path / "prefixes").stat().st_size
    assert report.num_tokens == cache.tree.num_tokens
    assert report.num_nodes == len(contents(cache))
    loading = other.load(tmp_path / "prefixes")
    assert (loading.loaded_tokens, loading.known_tokens, loading.left_out_tokens) == (report.num_tokens, 0, 0)
    assert prefixes(other) == prefixes(cache)
    if saved == loaded:
        assert other.stats().blocks_cached == cache.stats().blocks_cached


def test_shared_prefixes_are_in_the_file_once(tmp_path):
    cache = make_cache(num_blocks=200)
    shared = ids_of(320, 0)
    for seed in range(1, 9):
        store(cache, [*shared, *ids_of(5, seed)])
    assert cache.save(tmp_path / "prefixes").num_tokens == 320 + 8 * 5


def test_order_of_use_is_kept(tmp_path):
    cache, other = filled(), make_cache()
    store(cache, ids_of(70, 1)[:48])  # what is inside a prefix may be used later than the prefix
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    order = order_of_eviction(cache)
    assert len(order) >= 5
    assert order_of_eviction(other) == order


@pytest.mark.parametrize("policy", ["lfu", "fifo", "slru", "priority", "cost"])
def test_under_any_eviction_policy(tmp_path, policy):
    cache, other = filled(eviction=policy), make_cache(eviction=policy)
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)
    store(other, ids_of(60 * 16, 70))
    contents(other)


def test_any_reader_of_safetensors_opens_the_file(tmp_path):
    cache = make_cache()
    ids = ids_of(20, 1)
    store(cache, ids)
    cache.save(tmp_path / "prefixes", fingerprint={"weights": "w"})
    with safe_open(tmp_path / "prefixes", "pt") as file:
        assert file.metadata()["format"] == "radixkv-prefixes"
        assert json.loads(file.metadata()["fingerprint"])["weights"] == "w"
        assert file.get_tensor("tokens").tolist() == ids.tolist()
        (node,) = [node for node in cache.tree.nodes() if node.edge]
        for layer in range(NUM_LAYERS):
            for name, pool in ((f"keys.{layer}", cache.pool.keys[layer]), (f"values.{layer}", cache.pool.values[layer])):
                tensor = file.get_tensor(name)
                assert tensor.shape == (20, NUM_KV_HEADS, HEAD_DIM)
                assert torch.equal(tensor, pool[torch.tensor(node.blocks)].transpose(1, 2).reshape(-1, NUM_KV_HEADS, HEAD_DIM)[:20])


def test_an_empty_cache_makes_an_empty_file(tmp_path):
    assert make_cache().save(tmp_path / "prefixes").num_tokens == 0
    other = filled()
    before = contents(other)
    assert other.load(tmp_path / "prefixes").loaded_tokens == 0
    assert contents(other) == before


@pytest.mark.parametrize("num_layers", [1, 60])
def test_files_of_several_pieces(tmp_path, num_layers):
    """Their checksums take room in the header, whose length decides how many there are."""
    cache, other = make_cache(num_blocks=300, num_layers=num_layers), make_cache(num_blocks=300, num_layers=num_layers)
    store(cache, ids_of(4500, 0))
    cache.save(tmp_path / "prefixes")
    assert (tmp_path / "prefixes").stat().st_size > PIECE_BYTES // 2
    other.load(tmp_path / "prefixes")
    assert contents(other) == contents(cache)


@pytest.mark.parametrize("rest", [-65, -1, 0, 1, 63])
@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_files_that_end_around_a_border_of_pieces(tmp_path, num_pieces, rest):
    size = num_pieces * PIECE_BYTES + rest
    size -= len(build_header([TensorSpec("data", "U8", (size,))], {}))
    data = np.random.default_rng(0).bytes(size)
    specs = [TensorSpec("data", "U8", (size,))]
    with replacing(tmp_path / "file") as file:
        file.write(build_header(specs, {}))
        file.write(data)
        file.write_checksums()
    with open_verified(tmp_path / "file") as reader:
        assert reader.read("data") == data
    with safe_open(tmp_path / "file", "pt") as other:
        assert other.get_tensor("data").numpy().tobytes() == data


@pytest.mark.parametrize("seed", range(12))
def test_random_caches_into_random_pools(tmp_path, seed):
    """Everything that is loaded has the right K/V, nothing cached is lost, and the counts add up; then all of it fits and is there."""
    rng = random.Random(seed)
    sizes = [16, 32, 64]
    vocabulary = rng.choice([2, 50])

    def some_prefix(known: list[list[int]]) -> list[int]:
        start = rng.choice(known)
        return start[: rng.randint(0, len(start))] + [rng.randrange(vocabulary) for _ in range(rng.randint(1, 60))]

    known: list[list[int]] = [[]]
    namespaces = [(), ("a",), ("a", 1), ("a", True)]
    cache, other = make_cache(400, rng.choice(sizes)), make_cache(rng.randint(8, 120), rng.choice(sizes))
    leases = []
    for target in (cache, other):
        for _ in range(rng.randint(3, 25)):
            known.append(some_prefix(known))
            try:
                store(target, known[-1], rng.choice(namespaces))
            except radixkv.OutOfBlocks:
                assert target is other
            if rng.random() < 0.3:
                leases.append(target.match_prefix(rng.choice(known), rng.choice(namespaces)))
            if leases and rng.random() < 0.3:
                leases.pop(rng.randrange(len(leases))).release()
    report = cache.save(tmp_path / "prefixes")
    before, free = prefixes(other), other.pool.num_free
    loading = other.load(tmp_path / "prefixes")
    after = prefixes(other)
    assert before <= after <= before | prefixes(cache)
    assert loading.loaded_tokens + loading.known_tokens + loading.left_out_tokens == report.num_tokens
    assert other.pool.num_free <= free
    if loading.left_out_tokens:
        assert after != before | prefixes(cache)
    again = other.load(tmp_path / "prefixes")
    assert prefixes(other) >= after
    assert again.known_tokens >= loading.known_tokens + loading.loaded_tokens
    large = make_cache(2000, other.pool.block_size)
    for namespace, ids in sorted(before, key=lambda entry: -len(entry[1]))[:3]:
        store(large, list(ids), namespace)
    mine = prefixes(large)
    assert large.load(tmp_path / "prefixes").left_out_tokens == 0
    assert prefixes(large) == mine | prefixes(cache)


# Into what is there already -----------------------------------------------------------------------------------------------------------
def test_loading_merges_with_what_is_cached(tmp_path):
    cache, other = filled(), make_cache()
    first = ids_of(70, 1)
    store(other, first[:55])  # ends inside a block that the file has more of
    store(other, ids_of(20, 9))
    mine = prefixes(other)
    cache.save(tmp_path / "prefixes")
    report = other.load(tmp_path / "prefixes")
    assert prefixes(other) == mine | prefixes(cache)
    assert report.left_out_tokens == 0
    assert report.known_tokens >= 55
    again = other.load(tmp_path / "prefixes")
    assert again.loaded_tokens == again.left_out_tokens == 0
    assert again.known_tokens == cache.tree.num_tokens


def test_a_small_pool_takes_what_was_used_last_and_evicts_nothing(tmp_path):
    cache = make_cache(num_blocks=100)
    prompts = [ids_of(64, seed) for seed in range(10)]
    for ids in prompts:
        store(cache, ids)
    store(cache, prompts[3])
    cache.save(tmp_path / "prefixes")
    other = make_cache(num_blocks=14)
    mine = ids_of(40, 99)
    store(other, mine)  # 3 of 14 blocks
    report = other.load(tmp_path / "prefixes")
    assert (report.loaded_tokens, report.left_out_tokens) == (11 * 16, 640 - 11 * 16)
    assert other.pool.num_free == 0
    assert other.stats().evicted_tokens == 0
    lengths = [other.match_prefix(ids).length for ids in [mine, prompts[3], prompts[9], prompts[8], prompts[7]]]
    assert lengths == [40, 64, 64, 48, 0]
    contents(other)


def test_a_full_pool_takes_nothing(tmp_path):
    cache, other = filled(), make_cache(num_blocks=3)
    store(other, ids_of(48, 50))
    cache.save(tmp_path / "prefixes")
    before = contents(other)
    report = other.load(tmp_path / "prefixes")
    assert (report.loaded_tokens, report.known_tokens) == (0, 0)
    assert report.beats_recomputing is None
    assert contents(other) == before


def test_leases_and_running_rows_are_neither_in_the_way_nor_changed(tmp_path):
    cache, other = filled(), make_cache()
    for target in (cache, other):
        first = ids_of(70, 1)
        store(target, first[:60])
        lease = target.match_prefix(first[:60])
        running = target.admit([ids_of(50, 7).astype("<i4").tobytes()], [1], counted=False)
        held = [(block, target.pool.keys[0][block].clone()) for block in lease.blocks + running.sequences[0].blocks]
        if target is cache:
            expected = prefixes(cache)
            cache.save(tmp_path / "prefixes")
        else:
            other.load(tmp_path / "prefixes")
            assert prefixes(other) >= expected
        for block, keys in held:
            assert torch.equal(target.pool.keys[0][block].view(torch.int32), keys.view(torch.int32))
        assert target.match_prefix(ids_of(50, 7)).length == 0  # what is running is not cached yet
        target.discard(running)
        lease.release()
        target.check()


def test_saving_waits_for_the_step_of_another_thread(tmp_path):
    cache = filled()
    batch = cache.admit([ids_of(20, 30).astype("<i4").tobytes()], [1], counted=False)
    saver = threading.Thread(target=cache.save, args=[tmp_path / "prefixes"])
    with cache.prompt_step(batch) as step:
        step.begin()
        saver.start()
        saver.join(0.2)
        assert saver.is_alive() and not (tmp_path / "prefixes").exists()
    cache.discard(batch)
    saver.join(30)
    other = make_cache()
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)


def test_what_lies_in_host_memory_is_saved_too(tmp_path):
    """Once with the beginning in the pool, once without: no token is in the file twice."""
    pool = make_cache(num_blocks=6).pool
    cache = radixkv.PrefixCache(pool, make_cache().backend, host_bytes=1 << 20)
    first, second = ids_of(70, 1), ids_of(90, 2)
    store(cache, first)
    store(cache, second)
    assert cache.match_prefix(second).length == 90
    report = cache.save(tmp_path / "prefixes")
    other = make_cache()
    other.load(tmp_path / "prefixes")
    assert {((), tuple(first[:64])), ((), tuple(second))} <= prefixes(other)
    assert report.num_tokens == other.tree.num_tokens <= 160
