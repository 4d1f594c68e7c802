"""Saved prefixes: equal to the bit when loaded, all or none of them, and never another model's."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import random
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import radixkv
from radixkv import kv_file, persist
from radixkv.integration import handle as handle_module
from radixkv.integration.fingerprint import digest_weights
from radixkv.kv_file import PIECE_BYTES, FileReader, TensorSpec, build_header, open_verified, replacing
from radixkv.meter import PromptMeter
from radixkv.saved_facts import decode_namespace, encode_namespace
from radixkv.saved_nodes import SavedNodes
from tests.models import counted_tokens, prompt, tiny_qwen2
from tests.persisted import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, contents, make_cache, path_of, prefixes, store

ROOT = Path(__file__).resolve().parent.parent


def ids_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length)


def filled(**settings) -> radixkv.PrefixCache:
    """Two prompts that share 40 tokens, one that goes on from the first, one of its own, and one in another namespace."""
    cache = make_cache(**settings)
    first = ids_of(70, 1)
    store(cache, first)
    store(cache, [*first[:40], *ids_of(30, 2)])
    store(cache, [*first, *ids_of(21, 3)])
    store(cache, ids_of(33, 4))
    store(cache, first[:50], ("tenant", 1))
    return cache


def order_of_eviction(cache: radixkv.PrefixCache) -> list[tuple[tuple, list[int]]]:
    """The prefixes whose ends eviction takes, in its order; afterwards nothing is cached."""
    gone = []
    while (victim := cache.tree.queue.first()) is not None:
        namespace, ids = path_of(victim)
        gone.append((namespace, ids.tolist()))
        cache.pool.release(cache.tree.evict(len(victim.blocks)))
    return gone


def run_python(code: str, *arguments: object, **options) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


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


# Namespaces and fingerprints ----------------------------------------------------------------------------------------------------------

NAMESPACE = ("a", 1, True, 1.0, None, b"\x00", "", ("nested", (2.5, ())), float("inf"))


def test_namespaces_come_back_with_their_types(tmp_path):
    assert decode_namespace(json.loads(json.dumps(encode_namespace(NAMESPACE)))) == NAMESPACE
    cache, other = make_cache(), make_cache()
    namespaces = [(), (1,), (True,), (1.0,), ("1",), NAMESPACE]
    for i, namespace in enumerate(namespaces):
        store(cache, ids_of(20 + i, 1), namespace)
    cache.save(tmp_path / "prefixes")
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)
    assert [other.match_prefix(ids_of(40, 1), namespace).length for namespace in namespaces] == [20, 21, 22, 23, 24, 25]


def test_a_namespace_that_has_no_form_is_named(tmp_path):
    cache = make_cache()
    store(cache, ids_of(20, 1), ("a", frozenset({1})))
    with pytest.raises(ValueError, match=r"namespace .*frozenset.* cannot be saved: its elements must be str, int"):
        cache.save(tmp_path / "prefixes")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ['[["set", 1]]', '[["int", true]]', '[["int", "1"]]', '[["float", "x"]]', "[1]", '[["bytes", "zz"]]'])
def test_namespaces_that_were_not_encoded_here(text):
    with pytest.raises((ValueError, TypeError)):
        decode_namespace(json.loads(text))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float16}, 'dtype is "float32" in the file and "float16" here'),
        ({"num_layers": 3}, "num_layers is 2 in the file and 3 here"),
        ({"namespace": ("other",)}, r'namespace is \[\] in the file and \[\["str", "other"\]\] here'),
    ],
)
def test_another_pool_is_named(tmp_path, settings, message):
    filled().save(tmp_path / "prefixes")
    other = filled(**settings)
    before = contents(other)
    with pytest.raises(ValueError, match=f"prefixes was saved by another model.*nothing was loaded: {message}$"):
        other.load(tmp_path / "prefixes")
    assert contents(other) == before


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        ({"a": 1}, {"a": 2}, "a is 1 in the file and 2 here"),
        ({"a": 1}, {}, "a is 1 in the file and missing here"),
        ({}, {"a": 1}, "a is missing in the file and 1 here"),
        ({"a": 1}, {"a": True}, "a is 1 in the file and true here"),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, "a.b.c is 1 in the file and 2 here"),
        ({"a": {"b": None}}, {"a": {"b": 2}}, "a.b is null in the file and 2 here"),
        ({"a": {"b": 1}}, {"a": {"b": None}}, "a.b is 1 in the file and null here"),
        ({"a": 1, "b": 1}, {"a": 2, "b": 2}, "a is 1 in the file and 2 here; b is 1 in the file and 2 here"),
    ],
)
def test_every_difference_of_fingerprints_is_named(tmp_path, saved, present, message):
    cache = filled()
    cache.save(tmp_path / "prefixes", fingerprint=saved)
    with pytest.raises(ValueError, match=f"nothing was loaded: {message}$"):
        cache.load(tmp_path / "prefixes", fingerprint=present)


def test_fingerprints_that_fit(tmp_path):
    cache = filled()
    cache.save(tmp_path / "prefixes", fingerprint={"a": (1, {"b": None}), "c": 1})
    make_cache().load(tmp_path / "prefixes", fingerprint={"c": None, "a": [1, {"b": None}]})
    with pytest.raises(ValueError, match="fingerprint: field 'a' must hold only what JSON can"):
        cache.save(tmp_path / "prefixes", fingerprint={"a": {1, 2}})
    with pytest.raises(ValueError, match="fingerprint: dtype is taken by radixkv"):
        cache.save(tmp_path / "prefixes", fingerprint={"dtype": "x"})


# Damage -------------------------------------------------------------------------------------------------------------------------------


def refused(path: Path, cache: radixkv.PrefixCache) -> None:
    with pytest.raises(ValueError, match=r"load: .*damaged.* (is damaged|not a file that radixkv saved)"):
        cache.load(path)


def test_a_truncated_file_is_refused(tmp_path):
    cache, other = filled(), filled()
    cache.save(tmp_path / "prefixes")
    before, data = contents(other), (tmp_path / "prefixes").read_bytes()
    path = tmp_path / "damaged"
    lengths = {*range(0, 40), *range(0, len(data), 97), *range(len(data) - 40, len(data))}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        refused(path, other)
    for longer in (data + b"\0", data + b"\0" * 4, data + data, b"\0" + data):
        path.write_bytes(longer)
        refused(path, other)
    assert contents(other) == before


def test_a_flipped_bit_is_refused(tmp_path):
    cache, other = make_cache(num_blocks=700, num_layers=5), make_cache(num_blocks=700, num_layers=5)
    store(cache, ids_of(4000, 1))
    cache.save(tmp_path / "prefixes")
    path, data = tmp_path / "damaged", bytearray((tmp_path / "prefixes").read_bytes())
    path.write_bytes(data)
    assert len(data) > 2 * PIECE_BYTES
    rng = random.Random(0)
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    places = [*range(12), *rng.sample(range(header_bytes), 60), *rng.sample(range(len(data)), 120), *range(len(data) - 14, len(data))]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(bytes([data[place] ^ 1 << rng.randrange(8)]))
            file.flush()
            refused(path, other)
            file.seek(place)
            file.write(data[place : place + 1])
    assert contents(other) == set()
    other.load(path)
    assert contents(other) == contents(cache)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{}" * 500, b"\xff" * (PIECE_BYTES + 10)])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "damaged").write_bytes(content)
    refused(tmp_path / "damaged", make_cache())


def rewritten(path: Path, target: Path, change) -> None:
    """A file with good checksums whose tensors and metadata were changed before they were made."""
    with open_verified(path) as file:
        specs, metadata = list(file.specs.values()), dict(file.metadata)
        data = {spec.name: file.read(spec.name) for spec in specs}
    specs = change(specs, metadata, data) or specs
    with replacing(target) as writer:
        writer.write(build_header(specs, metadata))
        for spec in specs:
            writer.write(data[spec.name])
        writer.write_checksums()


def changed_nodes(column: int, value: int):
    def change(specs, metadata, data):
        nodes = np.frombuffer(data["nodes"], "<i8").reshape(-1, SavedNodes.NUM_COLUMNS).copy()
        nodes[-1, column] = value
        data["nodes"] = nodes.tobytes()

    return change


def changed_metadata(**values: str):
    return lambda specs, metadata, data: metadata.update(values)


def without_last_tensor(specs, metadata, data):
    return specs[:-1]


def negative_tokens(specs, metadata, data):
    data["tokens"] = b"\xff" * len(data["tokens"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_nodes(0, 10_000), "nodes are not those of a tree"),
        (changed_nodes(0, -2), "nodes are not those of a tree"),
        (changed_nodes(1, 10_000), "nodes are not those of a tree"),
        (changed_nodes(1, -1), "nodes are not those of a tree"),
        (changed_nodes(2, 77), "nodes are not those of a tree"),
        (changed_nodes(3, 2**62), "nodes are not those of a tree"),
        (negative_tokens, "nodes are not those of a tree"),
        (changed_metadata(version="1"), "version 1, this release reads radixkv-prefixes version 2"),
        (changed_metadata(format="other"), "is of format other version 2, this release reads"),
        (changed_metadata(namespaces="[]"), "nodes are not those of a tree"),
        (changed_metadata(namespaces="["), "not a file that radixkv saved"),
        (changed_metadata(namespaces="[" * 100_000), "not a file that radixkv saved"),
        (changed_metadata(fingerprint="[1]"), "not a file that radixkv saved"),
        (changed_metadata(computed_tokens_per_s='"fast"'), "its rate is no number"),
        (without_last_tensor, "its tensors are not those that its fingerprint says"),
    ],
)
def test_a_file_that_was_made_up_is_refused(tmp_path, change, message):
    cache, other = filled(), filled()
    cache.save(tmp_path / "prefixes")
    rewritten(tmp_path / "prefixes", tmp_path / "made-up", change)
    before = contents(other)
    with pytest.raises(ValueError, match=f"load: .*made-up.*{message}"):
        other.load(tmp_path / "made-up")
    assert contents(other) == before


def test_a_file_of_somebody_elses_safetensors_is_refused(tmp_path):
    specs = [TensorSpec("a", "F32", (2,))]
    header = build_header(specs, {}).replace(b'"shape":[2]', b'"shape":[3]')
    with replacing(tmp_path / "other") as file:
        file.write(header)
        file.write(b"\0" * 8)
        file.write_checksums()
    with pytest.raises(ValueError, match="other is not a file that radixkv saved: its header is not laid out as radixkv's"):
        make_cache().load(tmp_path / "other")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_an_error_in_the_middle_of_loading_leaves_the_cache_as_it_was(tmp_path, monkeypatch, error):
    cache, other = filled(), make_cache()
    store(other, ids_of(70, 1)[:55])
    cache.save(tmp_path / "prefixes")
    before, free = contents(other), other.pool.num_free
    real_read, calls = FileReader.read_into, 0

    def read_into(self, target, name, begin):
        nonlocal calls
        calls += 1
        if name == "values.1":
            raise error
        real_read(self, target, name, begin)

    monkeypatch.setattr(FileReader, "read_into", read_into)
    with pytest.raises(type(error)):
        other.load(tmp_path / "prefixes")
    assert calls > 3
    assert (contents(other), other.pool.num_free) == (before, free)
    monkeypatch.undo()
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)


def test_a_file_that_is_cut_after_it_was_verified_is_refused(tmp_path, monkeypatch):
    cache, other = filled(), make_cache()
    cache.save(tmp_path / "prefixes")
    real_plan = persist.plan_load

    def plan(*args):
        os.truncate(tmp_path / "prefixes", 3000)
        return real_plan(*args)

    monkeypatch.setattr(persist, "plan_load", plan)
    with pytest.raises(ValueError, match="prefixes became shorter while it was read"):
        other.load(tmp_path / "prefixes")
    assert contents(other) == set()
    assert other.pool.num_free == other.pool.num_blocks


# Writing ------------------------------------------------------------------------------------------------------------------------------


def test_killed_at_any_moment_the_old_file_still_loads(tmp_path):
    code = "import sys; from pathlib import Path; from tests.kill_worker import main; main(Path(sys.argv[1]))"
    assert int(run_python(code, tmp_path).split()[0]) >= 45


def test_an_error_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    cache, path = filled(), tmp_path / "prefixes"
    cache.save(path)
    before = path.read_bytes()
    store(cache, ids_of(300, 8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for name in ("fsync", "replace"):

        def fail(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kv_file.os, name, fail)
        with pytest.raises(OSError, match="No space left"):
            cache.save(path)
        monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    cache.check()


def test_leftovers_go_and_what_is_being_written_stays(tmp_path):
    path = tmp_path / "a[b]*.kv"
    dead = tmp_path / ".a[b]*.kv.0123456789abcdef.radixkv-tmp"
    others = [tmp_path / ".other.kv.0123456789abcdef.radixkv-tmp", tmp_path / "a[b]*.kv.bak"]
    for name in (dead, *others):
        name.write_bytes(b"x")
    with replacing(path) as first:
        assert not dead.exists()
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_links_and_permissions_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    cache = filled()
    cache.save(target)
    target.chmod(0o640)
    link.symlink_to(target)
    store(cache, ids_of(20, 40))
    cache.save(link)
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o640
    other = make_cache()
    other.load(link)
    assert prefixes(other) == prefixes(cache)


def test_paths_that_cannot_be(tmp_path):
    cache = filled()
    with pytest.raises(FileNotFoundError, match="missing"):
        cache.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"save: the folder .*nowhere does not exist"):
        cache.save(tmp_path / "nowhere" / "prefixes")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match="is not a regular file"):
        cache.load(tmp_path)
    with pytest.raises(TypeError):
        cache.save(None)  # type: ignore[arg-type]
    cache.save(str(tmp_path / "text"))
    assert cache.load(str(tmp_path / "text")).known_tokens == cache.tree.num_tokens
    cache.check()


def test_without_permission(tmp_path):
    """In a process that is nobody, because to root everything is permitted."""
    folder = tmp_path / "locked"
    folder.mkdir()
    filled().save(folder / "prefixes")
    (folder / "prefixes").chmod(0o600)
    code = (
        "import os, sys, radixkv.persist\n"
        "from tests.persisted import contents, make_cache, store\n"
        "cache = make_cache()\n"
        "store(cache, range(40))\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "else: os.chmod(sys.argv[1], 0o500); os.chmod(sys.argv[1] + '/prefixes', 0)\n"
        "for call in (cache.save, cache.load):\n"
        "    try: call(sys.argv[1] + '/prefixes')\n"
        "    except PermissionError as error: print(error)\n"
        "assert contents(cache) == {((), tuple(range(40)))}\n"
    )
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path(parent.root):
            parent.chmod(parent.stat().st_mode | 0o011)
    output = run_python(code, folder)
    folder.chmod(0o700)
    assert output.count("Permission denied") == 2
    assert [entry.name for entry in folder.iterdir()] == ["prefixes"]


def test_neither_side_holds_a_copy_of_the_pool(tmp_path):
    """96 MB of K/V go out and in with less than a quarter of that in memory at any time."""
    code = (
        "import resource, sys, torch\n"
        "from radixkv import BlockPool, PrefixCache\n"
        "from radixkv.attention import Backend\n"
        "torch.set_num_threads(1)\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "def make():\n"
        "    pool = BlockPool(512, num_layers=3, num_kv_heads=4, head_dim=64, block_size=32, dtype=torch.float32, device='cpu')\n"
        "    for tensor in [*pool.keys, *pool.values]: tensor.fill_(1)\n"
        "    return PrefixCache(pool, Backend('torch', num_heads=4, pool=pool))\n"
        "cache, other = make(), make()\n"
        "cache.tree.insert(range(512 * 32), cache.pool.allocate(512), cache.full_namespace())\n"
        "small = PrefixCache(make().pool, cache.backend)\n"
        "small.tree.insert(range(64), small.pool.allocate(2), small.full_namespace())\n"
        "small.save(sys.argv[1]); small.load(sys.argv[1])\n"
        "before = peak()\n"
        "size = cache.save(sys.argv[1]).num_bytes\n"
        "saved = peak()\n"
        "assert other.load(sys.argv[1]).loaded_tokens == 512 * 32\n"
        "print(size, saved - before, peak() - saved)\n"
    )
    size, saving, loading = map(int, run_python(code, tmp_path / "prefixes").split())
    assert size > 96 << 20
    assert saving < 24 and loading < 24


# Reports ------------------------------------------------------------------------------------------------------------------------------


def test_reports_say_whether_loading_was_worth_it(tmp_path, caplog):
    cache, fresh = filled(), make_cache()
    with caplog.at_level(logging.INFO, "radixkv"):
        saved = cache.save(tmp_path / "prefixes")
        report = fresh.load(tmp_path / "prefixes")
    assert [record.getMessage() for record in caplog.records] == [str(saved), str(report)]
    assert saved.seconds > 0 and f"saved {saved.num_tokens} tokens in 0.1 MB" in str(saved)
    assert (report.computed_tokens_per_s, report.beats_recomputing, report.rate_is_saved) == (None, None, False)
    assert "whether that beats recomputing is not known" in str(report)
    assert report.loaded_tokens_per_s == report.loaded_tokens / report.seconds
    assert report.bytes_per_s == report.num_bytes / report.seconds

    batch = cache.admit([ids_of(400, 77).astype("<i4").tobytes()], [1])
    with cache.prompt_step(batch) as step:
        step.begin()
    cache.discard(batch)
    rate = cache.meter.tokens_per_s()
    assert rate is not None and rate > 0
    cache.save(tmp_path / "prefixes")
    cache.clear()
    here, there = cache.load(tmp_path / "prefixes"), make_cache().load(tmp_path / "prefixes")
    assert (here.computed_tokens_per_s, here.rate_is_saved) == (rate, False)
    assert (there.computed_tokens_per_s, there.rate_is_saved) == (rate, True)
    assert here.beats_recomputing == (here.loaded_tokens_per_s > rate)
    assert ("which beats" if here.beats_recomputing else "which does not beat") in str(here)
    assert str(there).endswith("tokens/s, as measured where the file was saved")


def test_the_meter_keeps_the_best_rate_of_steps_that_ended(monkeypatch):
    times = iter([0.0, 2.0, 10.0, 11.0, 20.0, 30.0])
    monkeypatch.setattr("radixkv.meter.time.perf_counter", lambda: next(times))
    meter = PromptMeter(torch.device("cpu"))
    assert meter.tokens_per_s() is None
    for _ in range(2):
        with meter.measure(100):
            pass
    assert meter.tokens_per_s() == 100.0
    with pytest.raises(KeyError), meter.measure(10_000):
        raise KeyError
    assert meter.tokens_per_s() == 100.0


# Models -------------------------------------------------------------------------------------------------------------------------------


def patched(seed: int = 0, **settings):
    options = {"num_blocks": 200, "block_size": 16, **settings.pop("options", {})}
    return radixkv.patch_model(tiny_qwen2(seed, **settings), **options)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A document's prefix as a model left it in a file, two questions, and what the model answers them."""
    model, path = patched(), tmp_path_factory.mktemp("saved") / "prefixes"
    document = prompt(300, 0)
    questions = [torch.cat([document, prompt(11, seed)])[None] for seed in (1, 2)]
    model.generate(document[None], max_new_tokens=1, do_sample=False)
    model.radixkv.save(path)
    return path, questions, [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in questions]


@pytest.mark.parametrize("options", [{}, {"block_size": 64}], ids=["same blocks", "larger blocks"])
def test_after_loading_only_questions_are_computed(saved_model, options):
    path, questions, answers = saved_model
    model = patched(options=options)
    report = model.radixkv.load(path)
    assert report.loaded_tokens == 300 and report.beats_recomputing is not None
    for ids, answer in zip(questions, answers, strict=True):
        with counted_tokens(model) as rows:
            assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), answer)
        assert rows == [11] + [1] * 11
    model.radixkv.check()


def test_in_a_fresh_process_too(saved_model):
    path, questions, answers = saved_model
    code = (
        "import json, sys, torch, radixkv\n"
        "from tests.models import counted_tokens, tiny_qwen2\n"
        "torch.set_num_threads(1)\n"
        "model = radixkv.patch_model(tiny_qwen2(), num_blocks=200, block_size=32)\n"
        "model.radixkv.load(sys.argv[1])\n"
        "with counted_tokens(model) as rows:\n"
        "    output = model.generate(torch.tensor(json.loads(sys.argv[2])), max_new_tokens=12, do_sample=False)\n"
        "print(json.dumps([output.tolist(), rows]))\n"
    )
    output, rows = json.loads(run_python(code, path, json.dumps(questions[0].tolist())))
    assert output == answers[0].tolist()
    assert rows == [11] + [1] * 11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models(tmp_path, dtype):
    model, other = patched(dtype=dtype), patched(dtype=dtype)
    ids = prompt(90, 3)[None]
    first = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.radixkv.save(tmp_path / "prefixes")
    again = model.generate(ids, max_new_tokens=6, do_sample=False)
    other.radixkv.load(tmp_path / "prefixes")
    assert other.radixkv.match_prefix(first[0]).length == first.shape[1] - 1
    assert torch.equal(other.generate(ids, max_new_tokens=6, do_sample=False), again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, r'nothing was loaded: weights is "[0-9a-f]+\.\.\. in the file and "[0-9a-f]+\.\.\. here$'),
        ({"rms_norm_eps": 1e-5}, "nothing was loaded: config.rms_norm_eps is 1e-06 in the file and 1e-05 here$"),
        ({"hidden_act": "gelu"}, 'nothing was loaded: config.hidden_act is "silu" in the file and "gelu" here$'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope.theta is 10000.0 in the file and 7.0 here"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            'rope.type is "default" in the file and "linear" here',
        ),
        ({"dtype": torch.bfloat16}, 'dtype is "float32" in the file and "bfloat16" here'),
        ({"num_layers": 2}, "num_layers is 3 in the file and 2 here"),
        ({"heads": (4, 4, 32)}, "num_kv_heads is 2 in the file and 4 here"),
        ({"heads": (4, 2, 16)}, "head_dim is 32 in the file and 16 here"),
        ({"options": {"namespace": ("tenant",)}}, r'namespace is \[\] in the file and \[\["str", "tenant"\]\] here'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_every_difference_of_models_is_named(saved_model, settings, message):
    other = patched(**settings)
    with pytest.raises(ValueError, match=message):
        other.radixkv.load(saved_model[0])
    assert other.radixkv.stats().blocks_free == 200


def test_one_bit_of_any_one_parameter_is_another_model():
    model = tiny_qwen2(num_layers=1, heads=(2, 1, 16))
    rng, seen = random.Random(0), {digest_weights(model)}

    def require_new() -> None:
        digest = digest_weights(model)
        assert digest not in seen
        seen.add(digest)

    for _, parameter in model.named_parameters():
        words = parameter.detach().view(-1).view(torch.int32)
        for place in {0, len(words) - 1, rng.randrange(len(words))}:
            for bit in {0, 31, rng.randrange(31)}:
                kept = words[place].clone()
                words[place] ^= torch.tensor(1, dtype=torch.int32) << bit
                require_new()
                words[place] = kept
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    original = weight.clone()
    weight[0, :2].neg_()  # the highest bits of two words of a row
    require_new()
    weight.copy_(original[[1, 0, *range(2, len(original))]])
    require_new()
    weight.copy_(original)
    weight[0] = original[0].roll(1)
    require_new()
    weight.copy_(original)
    assert digest_weights(model) in seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 2048), (1, 2049), (1025, 3)], ids=str)
def test_digests_of_any_tensor(dtype, shape):
    """Names, shapes, types and buffers count; strides and where the memory begins do not."""

    def digest(tensor: torch.Tensor, name: str = "a", *, buffer: bool = True) -> str:
        module = torch.nn.Module()
        if buffer:
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        return digest_weights(module)

    data = torch.testing.make_tensor(shape, dtype=dtype, device="cpu", low=0, high=2)
    found = digest(data)
    assert digest(data.clone()) == digest(data, buffer=False) == found
    shifted = torch.empty(data.numel() + 1, dtype=dtype)[1:].view(shape).copy_(data)
    assert digest(shifted) == found
    if data.ndim == 2:
        assert digest(data.t().contiguous().t()) == found
    others = [digest(data, "b"), digest(data[None])]
    if data.numel():
        changed = data.clone()
        changed.view(-1)[-1] = not changed.view(-1)[-1] if dtype == torch.bool else changed.view(-1)[-1] + 1
        others.append(digest(changed))
    assert found not in others and len(set(others)) == len(others)


def test_weights_are_digested_once_per_version(tmp_path, monkeypatch):
    model = patched()
    model.generate(prompt(20, 0)[None], max_new_tokens=1)
    calls = []

    def counted(model: torch.nn.Module) -> str:
        calls.append(model)
        return digest_weights(model)

    monkeypatch.setattr(handle_module, "digest_weights", counted)
    model.radixkv.save(tmp_path / "prefixes")
    model.radixkv.load(tmp_path / "prefixes")
    assert len(calls) == 1
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1
    with pytest.raises(ValueError, match="weights is"):
        model.radixkv.load(tmp_path / "prefixes")
    assert len(calls) == 2
    assert model.radixkv.save(tmp_path / "prefixes").num_tokens == 0  # what was computed before is stale
    model.lm_head.weight.data[3, 3] += 1
    model.radixkv.invalidate()
    with pytest.raises(ValueError, match="weights is"):
        model.radixkv.load(tmp_path / "prefixes")
    assert len(calls) == 3


def test_stale_prefixes_that_are_leased_are_not_saved(tmp_path):
    model = patched()
    ids = prompt(40, 0)
    model.generate(ids[None], max_new_tokens=1)
    lease = model.radixkv.match_prefix(ids)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert model.radixkv.save(tmp_path / "prefixes").num_tokens == 0
    model.generate(ids[None], max_new_tokens=1)
    assert model.radixkv.save(tmp_path / "prefixes").num_tokens == 40
    lease.release()


def tokenizer(*words: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0], pad_token=words[0])


def test_the_tokenizer_counts_where_one_is_given(tmp_path):
    model, path = patched(), tmp_path / "prefixes"
    one, other = tokenizer("?", "a", "b"), tokenizer("?", "b", "a")
    model.generate(prompt(20, 0)[None], max_new_tokens=1)
    model.radixkv.save(path, tokenizer=one)
    one(["a b", "a"], padding=True)  # leaves its settings in the tokenizer
    model.radixkv.load(path, tokenizer=one)
    model.radixkv.load(path)
    with pytest.raises(ValueError, match='nothing was loaded: tokenizer is "'):
        model.radixkv.load(path, tokenizer=other)
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of transformers, got str"):
        model.radixkv.save(path, tokenizer="name")
    model.radixkv.save(path)
    with pytest.raises(ValueError, match="tokenizer is null in the file"):
        model.radixkv.load(path, tokenizer=one)


def test_facts_of_the_user_stand_beside_the_models(tmp_path):
    model, path = patched(), tmp_path / "prefixes"
    model.radixkv.save(path, fingerprint={"prompt format": 3})
    with pytest.raises(ValueError, match="prompt format is 3 in the file and 4 here"):
        model.radixkv.load(path, fingerprint={"prompt format": 4})
    with pytest.raises(ValueError, match="fingerprint: weights is taken by radixkv"):
        model.radixkv.save(path, fingerprint={"weights": "mine"})


def test_models_that_were_copied_moved_or_dropped(tmp_path):
    model, path = patched(), tmp_path / "prefixes"
    model.generate(prompt(20, 0)[None], max_new_tokens=1)
    model.radixkv.save(path)
    copied = copy.deepcopy(model)
    assert copied.radixkv.load(path).loaded_tokens == 20
    copied.to(torch.bfloat16)
    with pytest.raises(ValueError, match='dtype is "float32" in the file and "bfloat16" here'):
        copied.radixkv.load(path)
    handle = model.radixkv
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="the model of this cache is gone"):
        handle.save(path)


def test_generating_and_saving_in_two_threads(saved_model, tmp_path):
    path, questions, answers = saved_model
    model = patched()
    model.radixkv.load(path)
    done = threading.Event()
    reports = []

    def save() -> None:
        while not done.is_set():
            reports.append(model.radixkv.save(tmp_path / "prefixes"))
            patched_copy.radixkv.load(tmp_path / "prefixes")

    patched_copy = patched()
    saver = threading.Thread(target=save)
    saver.start()
    try:
        for _ in range(3):
            for ids, answer in zip(questions, answers, strict=True):
                assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), answer)
    finally:
        done.set()
        saver.join(60)
    assert len(reports) > 2
    model.radixkv.check()
    patched_copy.radixkv.check()
    for ids, answer in zip(questions, answers, strict=True):
        assert torch.equal(patched_copy.generate(ids, max_new_tokens=12, do_sample=False), answer)
