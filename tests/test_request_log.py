"""What a cache notes for a report: each request with what it reused, and each eviction with its time, both bounded."""

from __future__ import annotations

import time

import radixkv
from radixkv.history import NUM_RUNS, GivenUp
from radixkv.sequence import CallOptions
from radixkv.stats import NUM_REQUESTS, LoggedPrompt
from radixkv.token_key import token_key
from tests.models import prompt, tiny_qwen2
from tests.small_cache import ask, keep, small_cache
from tests.test_report import Words, report


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
