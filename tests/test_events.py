"""on_event(): what happened, to whom, in order; and that listeners cost nothing and break nothing. The numbers for Prometheus."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
import threading
from collections import Counter

import pytest
import torch

import radixkv
from radixkv import events, history
from radixkv.events import CacheEvent, Evicted, Hit, Stored
from radixkv.history import path_key
from radixkv.metrics import METRICS, render_metrics
from radixkv.stats import CacheStats
from radixkv.token_key import namespace_of
from tests.models import prompt, tiny_qwen2
from tests.small_cache import ask, keep, small_cache


class Mirror:
    """Which prefixes a cache holds, by its events alone, each copy counted."""

    def __init__(self) -> None:
        self.held: Counter[tuple] = Counter()
        self.last_step = 0

    def __call__(self, event: CacheEvent) -> None:
        assert event.step >= self.last_step
        self.last_step = event.step
        assert 0 < event.num_tokens <= len(event.tokens) == len(event.key) // 4
        if isinstance(event, Hit):
            return
        ends = range(len(event.key) - 4 * event.num_tokens + 4, len(event.key) + 1, 4)
        change = 1 if isinstance(event, Stored) else -1
        for end in ends:
            self.held[event.namespace, event.key[:end]] += change
            assert self.held[event.namespace, event.key[:end]] >= 0

    def assert_mirrors(self, cache: radixkv.PrefixCache) -> None:
        held: Counter[tuple] = Counter()
        for root in cache.tree.roots().values():
            nodes = list(root.children.values())
            for node in nodes:
                nodes += node.children.values()
                key = path_key(node)
                for end in range(node.start + 4, len(key) + 1, 4):
                    held[namespace_of(root.namespace_key), key[:end]] += 1
        assert +self.held == held


def collected(cache: radixkv.PrefixCache) -> list[CacheEvent]:
    found: list[CacheEvent] = []
    cache.on_event(found.append)
    return found


def test_stored_hit_and_evicted():
    cache = small_cache(num_blocks=4)
    found = collected(cache)
    assert ask(cache, range(20)) == 0
    assert ask(cache, range(40)) == 20
    ask(cache, range(100, 130))
    namespace = cache.full_namespace()
    kinds = [(type(event), event.num_tokens, event.tokens[0], len(event.tokens)) for event in found]
    assert kinds == [(Stored, 20, 0, 20), (Hit, 20, 0, 40), (Stored, 20, 0, 40), (Evicted, 8, 0, 40), (Stored, 30, 100, 30)]
    assert all(event.namespace == namespace for event in found)
    assert [event.step for event in found] == sorted({event.step for event in found})
    assert [event.reason for event in found if isinstance(event, Evicted)] == ["room"] and found[2].tokens == tuple(range(40))
    cache.clear()
    assert {(type(event), getattr(event, "reason", "")) for event in found[5:]} == {(Evicted, "clear")}
    keep(cache, range(5))
    cache.invalidate()
    assert [(type(event), getattr(event, "reason", "")) for event in found[-2:]] == [(Stored, ""), (Evicted, "weights")]
    assert found[-1].namespace == namespace != cache.full_namespace()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].step = 3  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(3))
def test_who_follows_the_events_knows_what_is_cached(seed):
    rng = random.Random(seed)
    cache = small_cache(num_blocks=12)
    mirror = Mirror()
    cache.on_event(mirror)
    leases: list[radixkv.Lease] = []
    for _ in range(300):
        tokens = [0] * rng.randrange(40) + [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        action = rng.random()
        if action < 0.75:
            ask(cache, tokens)
        elif action < 0.85 and len(leases) < 2:
            leases.append(cache.match_prefix(tokens[:20]))
        elif action < 0.97:
            while leases:
                leases.pop().release()
        elif action < 0.985:
            cache.clear()
        else:
            cache.invalidate()
        mirror.assert_mirrors(cache)
    cache.check()
    assert cache.stats().evicted_tokens > 1000


def test_another_pool_empties_the_mirror_and_the_counters_go_on():
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=20, block_size=16)
    mirror = Mirror()
    model.radixkv.on_event(mirror)
    ids = prompt(20, seed=1)[None]
    model.generate(ids, max_new_tokens=2, do_sample=False)
    mirror.assert_mirrors(model.radixkv)
    model.half()
    model.generate(ids, max_new_tokens=2, do_sample=False)
    mirror.assert_mirrors(model.radixkv)
    assert model.radixkv.stats().stored_tokens == 42 and mirror.last_step


def test_of_the_numbers_each_counts_its_own():
    cache = small_cache(num_blocks=4)
    ask(cache, range(20))
    ask(cache, range(40))
    ask(cache, range(100, 130))
    cache.match_prefix(range(3)).release()
    stats = cache.stats()
    assert (stats.requests, stats.lookups, stats.insertions, stats.stored_tokens, stats.tree_tokens) == (3, 4, 3, 70, 62)
    assert (stats.evicted_tokens, stats.evicted_blocks) == (8, 1)
    cache.reset_stats()
    zeros = dataclasses.asdict(cache.stats())
    assert all(not value for name, value in zeros.items() if name not in ("blocks_free", "blocks_cached", "tree_tokens"))
    keep(cache, range(200, 210))
    assert (cache.stats().insertions, cache.stats().stored_tokens, cache.stats().lookups) == (1, 10, 0)


def test_a_callback_runs_with_nothing_locked_and_may_use_the_cache():
    cache = small_cache()
    seen: list[int] = []

    def look(event: CacheEvent) -> None:
        found: list[CacheStats] = []
        other = threading.Thread(target=lambda: found.append(cache.stats()))
        other.start()
        other.join(timeout=20)
        assert found, "the lock is held while callbacks run"
        seen.append(event.num_tokens)
        if event.num_tokens < 30:
            keep(cache, range(500, 530))  # its own event comes after this one, not inside it
            assert seen[-1] == event.num_tokens

    cache.on_event(look)
    keep(cache, range(20))
    assert seen == [20, 30]
    assert cache.explain(range(500, 530)).reason == "all cached"


def test_an_event_inside_a_step_waits_for_its_end():
    cache = small_cache()
    found = collected(cache)
    batch = cache.admit([bytes(range(4)) * 4], [1])
    with cache.prompt_step(batch) as step:
        cache.tree.insert([9], [cache.allocate(1)[0]], cache.full_namespace())
        assert not found
        step.begin()
    assert [event.tokens for event in found] == [(9,)]
    cache.discard(batch)
    cache.check()


def test_a_callback_that_raises_is_logged_once_and_breaks_nothing(caplog):
    reference = tiny_qwen2(num_layers=1)
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=10, block_size=16)
    calls: list[CacheEvent] = []

    def fail(event: CacheEvent) -> None:
        calls.append(event)
        raise ZeroDivisionError("mine")

    model.radixkv.on_event(fail)
    after = collected(model.radixkv)
    with caplog.at_level(logging.ERROR, logger="radixkv"):
        for seed in (1, 1, 2, 3):
            ids = prompt(50, seed=seed)[None]
            expected = reference.generate(ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
            model.radixkv.check()
    assert len(caplog.records) == 1 and caplog.records[0].exc_info[0] is ZeroDivisionError
    assert len(calls) == len(after) > 4 and model.radixkv.stats().blocks_leased == 0
    model.radixkv.on_event(fail)
    with caplog.at_level(logging.ERROR, logger="radixkv"):
        model.radixkv.clear()
    assert len(caplog.records) == 2


def test_an_interrupt_in_a_callback_leaks_nothing():
    """Raised where admit() lets go of the lock, it left a batch that nobody knew of."""
    cache = small_cache(num_blocks=8)
    keep(cache, range(40))

    def interrupt(event: CacheEvent) -> None:
        raise KeyboardInterrupt

    stop = cache.on_event(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            ask(cache, range(50))
        cache.check()
        assert cache.stats().blocks_leased == 0
    stop()
    assert ask(cache, range(50)) == 40


def test_who_has_left_hears_nothing():
    cache = small_cache()
    first: list[CacheEvent] = []
    second: list[CacheEvent] = []
    stop_first, stop_second = cache.on_event(first.append), cache.on_event(second.append)
    keep(cache, range(3))
    stop_first()
    stop_first()
    keep(cache, range(5))
    assert (len(first), len(second)) == (1, 2)
    stop_second()
    keep(cache, range(9))
    assert (len(first), len(second)) == (1, 2) and not cache.events.pending
    with pytest.raises(TypeError, match="on_event: callback must be callable, got int"):
        cache.on_event(3)  # type: ignore[arg-type]


def test_with_nobody_listening_no_event_is_made(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an event was made")

    monkeypatch.setattr(history, "Stored", refuse)
    monkeypatch.setattr(history, "Evicted", refuse)
    monkeypatch.setattr("radixkv.requests.Hit", refuse)
    monkeypatch.setattr(events.EventLog, "tell", refuse)
    cache = small_cache(num_blocks=4)
    collected_stop = cache.on_event(print)
    collected_stop()
    for first in (0, 0, 100, 200):
        ask(cache, range(first, first + 40))
    cache.clear()
    with pytest.raises(AssertionError, match="an event was made"):
        cache.on_event(print)
        ask(cache, range(40))


def test_events_of_several_threads_come_in_order_and_one_at_a_time():
    cache = small_cache(num_blocks=40)
    mirror, busy = Mirror(), threading.Lock()

    def follow(event: CacheEvent) -> None:
        assert busy.acquire(blocking=False), "two callbacks at once"
        try:
            mirror(event)
        finally:
            busy.release()

    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                keep(cache, [rng.randrange(2) for _ in range(rng.randrange(1, 60))])
        except BaseException as error:
            errors.append(error)

    failed: list[BaseException] = []

    def followed(event: CacheEvent) -> None:
        try:
            follow(event)
        except BaseException as error:
            failed.append(error)

    cache.on_event(followed)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and not failed and not cache.events.pending
    mirror.assert_mirrors(cache)
    cache.check()


def test_metrics_have_the_names_and_kinds_that_prometheus_wants():
    cache = small_cache(num_blocks=4)
    ask(cache, range(40))
    ask(cache, range(41))
    metrics, stats = cache.metrics(), dataclasses.asdict(cache.stats())
    assert metrics.keys() == METRICS.keys()
    assert {re.sub(r"^radixkv_|_total$", "", name) for name in metrics} == stats.keys()
    for name, value in metrics.items():
        assert re.fullmatch(r"radixkv_[a-z_]+", name) and type(value) in (int, float)
        assert name.endswith("_total") == (METRICS[name].kind == "counter")
        assert value == stats[re.sub(r"^radixkv_|_total$", "", name)]
    assert metrics["radixkv_cached_tokens_total"] == 40


def test_metrics_in_the_text_format():
    text = render_metrics({"radixkv_hits_total": 3, "radixkv_blocks_free": 7}, {"model": 'a"b\\c\nd'})
    labels = '{model="a\\"b\\\\c\\nd"}'
    assert text == (
        "# HELP radixkv_hits_total Admitted prompts of which at least half was reused.\n"
        "# TYPE radixkv_hits_total counter\n"
        f"radixkv_hits_total{labels} 3\n"
        "# HELP radixkv_blocks_free Blocks that hold nothing.\n"
        "# TYPE radixkv_blocks_free gauge\n"
        f"radixkv_blocks_free{labels} 7\n"
    )
    assert render_metrics({"mine": 1.5}) == "# TYPE mine untyped\nmine 1.5\n"
    lines = render_metrics(small_cache().metrics()).splitlines()
    assert len(lines) == 3 * len(METRICS)
    assert all(re.fullmatch(r"# (HELP radixkv_\w+ .+|TYPE radixkv_\w+ (counter|gauge))|radixkv_\w+ \d+", line) for line in lines)
