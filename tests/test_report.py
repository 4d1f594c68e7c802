"""report(): what the file says is what the cache holds, a prompt stays text in it, and a real browser shows it without a complaint."""

from __future__ import annotations

import html.parser
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
from radixkv.history import NUM_RUNS, GivenUp
from radixkv.report import embed_json
from radixkv.sequence import CallOptions
from radixkv.stats import NUM_REQUESTS, LoggedPrompt
from radixkv.token_key import TOKEN_BYTES, token_key
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


def test_every_request_is_noted(tmp_path):
    cache, before = small_cache(), time.time()
    assert [ask(cache, [*range(40), 7]), ask(cache, [*range(40), 8]), ask(cache, range(500, 520))] == [0, 40, 0]
    log = [LoggedPrompt(*entry) for entry in report(cache, tmp_path)["log"]]
    assert [(entry.num_requests, entry.num_tokens, entry.num_reused) for entry in log] == [(1, 41, 0), (1, 41, 40), (1, 20, 0)]
    assert [entry.step for entry in log] == sorted({entry.step for entry in log})
    assert before <= log[0].time_s <= log[1].time_s <= log[2].time_s <= time.time()
    cache.reset_stats()
    assert len(report(cache, tmp_path)["log"]) == 3


def test_what_came_with_store_false_leaves_no_trace_in_the_log():
    cache = small_cache()
    keep(cache, range(40))
    assert not cache.request_log  # nobody asked
    cache.discard(cache.admit([bytes(token_key(range(41)))], [1], options=CallOptions(store=False)))
    assert not cache.request_log and cache.stats().requests == 1
    cache.discard(cache.admit([bytes(token_key(range(41)))], [1], options=CallOptions()))
    assert [entry[2:] for entry in cache.request_log] == [(1, 41, 40)]


def test_the_log_is_bounded():
    cache = small_cache()
    for _ in range(NUM_REQUESTS // 32 + 1):
        cache.discard(cache.admit([bytes(token_key([1, 2, 3]))] * 32, [1] * 32))
    assert len(cache.request_log) == NUM_REQUESTS


def test_pieces_of_a_prompt_add_up():
    """With prefill_chunk_size a prompt comes in pieces, one request all the same."""
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=40, block_size=16)
    ids = prompt(50, seed=1)[None]
    for _ in range(2):
        model.generate(ids, max_new_tokens=2, do_sample=False, prefill_chunk_size=20)
    cache = model.radixkv
    sums = [sum(column) for column in list(zip(*cache.request_log, strict=True))[2:]]
    stats = cache.stats()
    assert sums == [stats.requests, stats.prompt_tokens, stats.cached_tokens] and sums[:2] == [2, 100] and sums[2] >= 40
    assert len(cache.request_log) == 6


def test_what_was_given_up_is_noted_with_its_time(tmp_path):
    cache, before = small_cache(8), time.time()
    keep(cache, range(100))
    keep(cache, range(200, 300))
    keep(cache, range(300, 310))
    cache.clear()
    data = report(cache, tmp_path, tokenizer=Words())
    given_up = [GivenUp(*entry) for entry in data["given_up"]]
    evicted = [entry for entry in given_up if entry.reason == "room"]
    assert sum(entry.num_tokens for entry in evicted) == cache.stats().evicted_tokens > 0
    assert sum(entry.num_blocks for entry in evicted) == cache.stats().evicted_blocks
    assert given_up[-1].reason == "clear" and before <= given_up[0].time_s <= given_up[-1].time_s <= time.time()
    assert data["runs"] == []  # of what was evicted before everything was dropped nothing is known

    keep(cache, range(100))
    keep(cache, range(200, 300))
    data = report(cache, tmp_path, tokenizer=Words())
    assert sum(run["tokens"] for run in data["runs"]) == data["given_up"][-1][3] > 0
    assert data["runs"][0]["step"] == data["given_up"][-1][0]
    assert data["runs"][0]["text"].startswith(f"w{data['runs'][0]['start']} ") and data["runs"][0]["namespace"] == "weights 0"


def test_what_was_given_up_is_bounded_and_outlives_the_pool():
    cache = small_cache(4)
    for i in range(NUM_RUNS + 50):
        keep(cache, range(100 * i, 100 * i + 40))
    assert len(cache.tree.history.given_up) == NUM_RUNS
    last = cache.tree.history.given_up[-1]
    cache.replace_pool(cache.pool, cache.backend)
    assert [entry[2] for entry in list(cache.tree.history.given_up)[-2:]] == ["room", "pool"] and last in cache.tree.history.given_up


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


NASTY = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 2'>",
    "<!--<script>",
    "]]>\u2028\u2029\x00\x1b[2J\r\u202e",
    "\"'`&quot;&amp;&lt;",
    "{{7*7}}%%data%%%%script%%\\u003cb\\u003e",
    "javascript:window.ran = 3",
    "line one\nline two\ttab",
]


class Speller:
    """The id n is the n-th nasty text."""

    def decode(self, ids: list[int]) -> str:
        return "".join(NASTY[id % len(NASTY)] for id in ids)


def nasty_cache():
    """One prefix for each nasty text, below a namespace of the same kind, and one that was evicted."""
    cache = small_cache(namespace=(NASTY[0], NASTY[1]))
    keep(cache, [100 * len(NASTY) + 1])
    cache.pool.release(cache.tree.evict(1))
    for i in range(len(NASTY)):
        keep(cache, [i])
        ask(cache, [i, 50])
    return cache


class Parser(html.parser.HTMLParser):
    """The tags of a page with their attributes, and what its scripts hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.scripts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style") and self.scripts:
            self.scripts[-1] += data


def test_what_a_prompt_says_is_text_to_every_parser(tmp_path):
    cache = nasty_cache()
    path = cache.report(tmp_path / "cache.html", tokenizer=Speller())
    plain = small_cache().report(tmp_path / "plain.html")
    tags = Parser(path.read_text(encoding="utf-8")).found
    # The same page as one of an empty cache: nothing of the prompts became a tag, an attribute, a script or a part of one.
    assert tags == Parser(plain.read_text(encoding="utf-8")).found
    block = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None and block[1].isascii() and not set("<>&\n") & set(block[1])
    texts = read(path)["nodes"]["text"]
    for text in (NASTY[0], NASTY[1], NASTY[4], r"]]>\u2028\u2029\x00\x1b[2J\r\u202e", "line one\nline two\\ttab"):
        assert any(told.startswith(text) for told in texts), text


def test_json_in_a_page_comes_back_as_it_was():
    value = {"text": [*NASTY, "".join(map(chr, range(300)))]}
    assert json.loads(embed_json(value)) == value
    assert not set("<>&\u2028\u2029") & set(embed_json(value))


def test_nothing_comes_from_elsewhere(tmp_path):
    text = small_cache().report(tmp_path / "cache.html").read_text(encoding="utf-8")
    assert not re.search(r"(?i)\b(https?|ftp|wss?):|//[a-z0-9-]+\.[a-z]", text)
    assert not re.search(r"(?i)@import|\burl\(|\b(src|href|action|srcset|poster|formaction)\s*=", text)
    assert not re.search(r"\bfetch\(|XMLHttp|WebSocket|EventSource|sendBeacon|\bimport\s*\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    policies = [dict(attributes)["content"] for tag, attributes in Parser(text).found if attributes.get("http-equiv")]
    (policy,) = policies
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"\*|https?:|data:|'self'", policy)


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
