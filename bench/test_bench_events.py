"""What listening costs the cache when nobody listens: its lock beside a plain one, and the counters of an insertion.

Host times of one thread, no GPU involved.
"""

from __future__ import annotations

import threading
import timeit

from radixkv.events import EventLock, EventLog
from radixkv.history import History
from radixkv.tree import RadixTree, token_key

NUM_CALLS = 20_000
LIMIT_US = 0.2


def _lock_once(lock) -> None:
    with lock:
        pass


def _fastest_us(function, *arguments) -> float:
    return min(timeit.repeat(lambda: function(*arguments), number=NUM_CALLS, repeat=15)) / NUM_CALLS * 1e6


def test_lock_with_nobody_listening(benchmark):
    log = EventLog()
    lock = EventLock(log)
    extra_us = _fastest_us(_lock_once, lock) - _fastest_us(_lock_once, threading.RLock())
    benchmark.extra_info["us above a plain lock"] = extra_us
    benchmark(_lock_once, lock)
    assert extra_us <= LIMIT_US


def test_insertion_with_nobody_listening(benchmark):
    tree, history, key = RadixTree(16), History(), token_key(range(512))
    cost_us = _fastest_us(history.store, tree, key, 64, ()) - _fastest_us(lambda *_: None, tree, key, 64, ())
    benchmark.extra_info["us"] = cost_us
    benchmark(history.store, tree, key, 64, ())
    assert history.stored_tokens and cost_us <= LIMIT_US
