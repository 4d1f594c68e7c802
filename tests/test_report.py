"""report(): what the file says is what the cache holds; bounded, changing nothing, and written whole or not at all."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv import kv_file
from radixkv.token_key import TOKEN_BYTES
from radixkv.tree_view import NodeRow
from tests.models import prompt, tiny_qwen2
from tests.small_cache import BLOCK, ask, keep, small_cache
from tests.test_explain import state_of


class Words:
    """Every id is a word of its own."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{id}" for id in ids)


def read(path: Path) -> dict[str, Any]:
    """The data of a report, as its own script reads it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def report(cache, tmp_path: Path, **options: Any) -> dict[str, Any]:
    return read(cache.report(tmp_path / "cache.html", **options))


def shape_of(data: dict[str, Any]) -> list[tuple]:
    """Each node's whole prefix length, tokens, blocks, hits, last use, and whether it is leased, in one order."""
    nodes = data["nodes"]
    names = ("start", "tokens", "blocks", "hits", "last_use", "leased")
    return sorted(row[1:] for row in zip(nodes["parent"], *(nodes[name] for name in names), strict=True) if row[0] >= 0)


def busy_cache():
    """Some talks in two namespaces, in a pool that is too small for them."""
    rng, cache = random.Random(5), small_cache(60)
    documents = [[rng.randrange(900) for _ in range(90)] for _ in range(4)]
    for _ in range(40):
        ask(cache, rng.choice(documents)[: rng.choice((40, 70, 90))] + [rng.randrange(900) for _ in range(rng.randrange(1, 30))])
    cache.tree.insert(documents[0], cache.allocate(6), ("tenant",))
    return cache, documents


def test_it_tells_of_the_tree_what_the_tree_tells_itself(tmp_path):
    cache, documents = busy_cache()
    lease = cache.match_prefix(documents[1])
    assert lease.length and cache.stats().evicted_tokens
    data = report(cache, tmp_path, tokenizer=Words())
    rows = [row for row in cache.tree(max_nodes=1000).rows if isinstance(row, NodeRow)]
    assert len(rows) > 8
    told = [(row.num_tokens, row.num_blocks, row.hits, row.last_use, int(row.leased)) for row in rows]
    assert sorted(row[1:] for row in shape_of(data)) == sorted(told)
    assert sum(row[-1] for row in shape_of(data)) > 0 and max(row[3] for row in shape_of(data)) > 1
    stats = cache.stats()
    assert {name: data["stats"][name] for name in ("requests", "hits", "blocks_free", "evicted_tokens", "tree_tokens")} == {
        "requests": stats.requests,
        "hits": stats.hits,
        "blocks_free": stats.blocks_free,
        "evicted_tokens": stats.evicted_tokens,
        "tree_tokens": stats.tree_tokens,
    }
    assert data["stats"]["tree_tokens"] == sum(data["nodes"]["tokens"])
    assert (data["cache"]["block_size"], data["cache"]["num_blocks"], data["cache"]["eviction"]) == (BLOCK, 60, "lru")
    names = [text for text, parent in zip(data["nodes"]["text"], data["nodes"]["parent"], strict=True) if parent < 0]
    assert names == ["(('weights', 0), ('cache', ()), ('call', ()))", "('tenant',)"]
    assert data["nodes"]["label"][:2] == ["weights 0", "('tenant',)"]
    lease.release()


def test_each_node_has_its_text_and_its_ids(tmp_path):
    cache = small_cache()
    keep(cache, range(40))
    keep(cache, [*range(32), *range(900, 930)])
    nodes = report(cache, tmp_path, tokenizer=Words())["nodes"]
    place = nodes["text"].index(" ".join(f"w{id}" for id in range(32)))
    assert nodes["ids"][place] == " ".join(map(str, range(24)))
    below = [text for text, parent in zip(nodes["text"], nodes["parent"], strict=True) if parent == place]
    assert sorted(below) == [" ".join(f"w{id}" for id in ids) for ids in (range(32, 40), range(900, 930))]
    assert report(cache, tmp_path)["nodes"]["text"][place] == " ".join(map(str, range(32)))


def test_a_long_edge_is_cut(tmp_path):
    cache = small_cache(400)
    keep(cache, range(5000))
    (text,) = report(cache, tmp_path, tokenizer=Words())["nodes"]["text"][1:]
    assert text.endswith("w4095…") and len(text.split()) == 4096


def test_more_nodes_than_asked_for_are_counted(tmp_path):
    cache, _ = busy_cache()
    whole, data = report(cache, tmp_path)["nodes"], report(cache, tmp_path, max_nodes=5)
    part = data["nodes"]
    assert len(part["parent"]) == 5 < len(whole["parent"]) and not any(whole["hidden_nodes"])
    assert (data["num_namespaces"], data["num_nodes"]) == (2, len(whole["parent"]) - 2)
    # Of the smaller namespace, a root and a node, nothing is shown.
    assert sum(part["hidden_nodes"]) == len(whole["parent"]) - 5 - 2
    assert sum(part["hidden_tokens"]) + sum(part["tokens"]) == sum(whole["tokens"]) - 90
    assert all(parent < place for place, parent in enumerate(part["parent"]))
    assert part["parent"].count(-1) == 1


def test_an_empty_cache(tmp_path):
    data = report(small_cache(), tmp_path)
    assert data["nodes"]["parent"] == data["log"] == data["given_up"] == data["runs"] == []


def test_it_changes_nothing(tmp_path):
    cache, documents = busy_cache()
    lease = cache.match_prefix(documents[2])
    before = state_of(cache.tree), cache.stats(), list(cache.request_log), cache.tree.tick()
    cache.report(tmp_path / "cache.html", tokenizer=Words())
    assert (state_of(cache.tree), cache.stats(), list(cache.request_log), cache.tree.tick() - 1) == before
    lease.release()
    cache.check()


def test_nothing_is_locked_while_text_is_made(tmp_path):
    """A tokenizer may take its time; other threads do not wait for it."""
    cache = small_cache()
    keep(cache, range(40))
    answered = []

    class Slow(Words):
        def decode(self, ids: list[int]) -> str:
            other = threading.Thread(target=lambda: answered.append(cache.stats().tree_tokens))
            other.start()
            other.join(timeout=60)
            assert not other.is_alive()
            return super().decode(ids)

    cache.report(tmp_path / "cache.html", tokenizer=Slow())
    assert answered and set(answered) == {40}


def test_of_a_patched_model_with_its_own_tokenizer(tmp_path):
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=20, block_size=16)
    ids = prompt(20, seed=1)
    model.generate(ids[None], max_new_tokens=3, do_sample=False)
    path = model.radixkv.report(str(tmp_path / "cache.html"))
    assert path == tmp_path / "cache.html" and not read(path)["has_text"]
    model.radixkv.tokenizer = Words()
    data = read(model.radixkv.report(path))
    assert data["has_text"] and data["nodes"]["text"][1].startswith(" ".join(f"w{id}" for id in ids.tolist()))
    assert data["nodes"]["tokens"] == [0, 22] and [entry[3:] for entry in data["log"]] == [[20, 0]]


def test_host_memory_is_told_of(tmp_path):
    cache = small_cache(8, host_bytes=1 << 16)
    keep(cache, range(100))
    keep(cache, range(200, 300))
    data, tier = report(cache, tmp_path), cache.tier
    assert tier is not None and tier.tree.num_blocks > 0
    assert (data["stats"]["blocks_host"], data["cache"]["host_blocks"]) == (tier.tree.num_blocks, tier.pool.num_blocks)


def test_bad_input_is_refused_in_words(tmp_path, monkeypatch):
    cache = small_cache()
    path = tmp_path / "cache.html"
    wrong: list[Any] = [0, -1, 2.0, True]
    for max_nodes in wrong:
        with pytest.raises(ValueError, match="report: max_nodes must be an int of at least 1"):
            cache.report(path, max_nodes=max_nodes)
    with pytest.raises(ValueError, match=r"report: tokenizer must have a decode\(ids\) method, got int"):
        cache.report(path, tokenizer=3)
    with pytest.raises(FileNotFoundError, match=r"report: the folder .*/no does not exist; create it first"):
        cache.report(tmp_path / "no" / "cache.html")
    with pytest.raises(IsADirectoryError, match=r"report: .* is a folder; name a file in it"):
        cache.report(tmp_path)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "a name that nobody gave")

    monkeypatch.setattr(kv_file, "_create_beside", refuse)
    with pytest.raises(PermissionError, match=r"report: .*/cache.html cannot be written: Permission denied; choose a folder that can"):
        cache.report(path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    cache = small_cache()
    path = cache.report(tmp_path / "cache.html")
    before = path.read_bytes()

    class Broken:
        def decode(self, ids: list[int]) -> str:
            raise OSError("gone")

    keep(cache, range(40))
    with pytest.raises(OSError, match="gone"):
        cache.report(path, tokenizer=Broken())

    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(kv_file.os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        cache.report(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_ten_thousand_nodes_within_bounds(tmp_path):
    """1.5 s and 2.7 MB where it was written, on one core that others used too."""
    cache = large_cache(10_000)
    started = time.perf_counter()
    path = cache.report(tmp_path / "cache.html", tokenizer=Words())
    assert time.perf_counter() - started < 20
    assert path.stat().st_size < 8_000_000
    nodes = read(path)["nodes"]
    assert len(nodes["parent"]) == 10_000 and sum(nodes["hidden_nodes"]) == len(cache.tree.nodes()) - 10_000


def large_cache(num_nodes: int):
    """A tree of at least so many nodes: documents that are left at every block."""
    rng, cache = random.Random(3), small_cache(num_nodes * 3)
    documents = [[rng.randrange(50_000) for _ in range(60 * BLOCK)] for _ in range(num_nodes // 100)]
    for document in documents:
        for turn in range(60):
            tokens = [*document[: turn * BLOCK], *(rng.randrange(50_000) for _ in range(20))]
            blocks = cache.allocate(-(-len(tokens) // BLOCK))
            inserted = cache.tree.insert(tokens, blocks, cache.full_namespace())
            cache.pool.release([*blocks[: inserted.first_adopted], *inserted.replaced])
    assert len(cache.tree.nodes()) >= num_nodes
    assert cache.tree.num_tokens * TOKEN_BYTES < 1 << 26
    return cache
