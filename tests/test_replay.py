"""bench/replay.py on tiny traces: Belady's optimum is one, what is counted is right, and the default is what the replay says."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv
from radixkv.bench.replay import BELADY, NAMES, NEVER, Future, Replay
from radixkv.bench.traces import KINDS, Request, read_trace
from radixkv.cache import PrefixCache
from radixkv.token_key import token_key

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("kind", KINDS)
def test_no_policy_beats_belady(kind):
    for seed in range(2):
        prepared = Replay(kind, KINDS[kind](120, seed), 64)
        for share in (0.1, 0.25, 0.5, 1.0):
            rates = {name: prepared.run(name, share).hit_rate for name in NAMES}
            assert all(rates[BELADY] >= rate for rate in rates.values()), rates
            if share == 1.0:  # nothing is ever evicted
                assert len(set(rates.values())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_the_same_for_the_same_seed_only(kind):
    assert KINDS[kind](20, 3) == KINDS[kind](20, 3) != KINDS[kind](20, 4)


def test_belady_on_a_trace_that_one_can_count():
    """A B A C A B, prompts of a full block and one token, in a pool of five blocks.

    C needs two blocks and one is free, so that the last of B goes: A is needed first. Then A needs one for its last token: LRU
    gives up the rest of B, which Belady knows is needed next, and takes the last of C.
    """
    a, b, c = (list(range(first, first + 17)) for first in (0, 100, 200))
    prepared = Replay("letters", [Request(prompt, []) for prompt in (a, b, a, c, a, b)], 16)
    assert prepared.future.num_blocks == 6
    results = {name: prepared.run(name, 5 / 6) for name in NAMES}
    assert {(result.num_blocks, result.prompt_tokens) for result in results.values()} == {(5, 6 * 17)}
    assert (results["lru"].cached_tokens, results[BELADY].cached_tokens) == (2 * 16, 3 * 16)


def test_the_next_use_of_a_block():
    """Blocks of 4 tokens: a use has all of the block's tokens and all before it, in its prompt."""
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [9, 9, 9, 9, 5, 6], [1, 2, 3, 4, 5, 6, 7]]
    answers = [[8], [], [], [1, 2]]
    keys = [token_key(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
    future = Future(keys, list(map(len, prompts)), 4)
    assert future.next_use(0, 0, 16, now=0) == 1
    assert future.next_use(0, 0, 16, now=1) == 3
    assert future.next_use(0, 0, 16, now=3) == NEVER
    assert future.next_use(0, 1, 8, now=0) == 3  # 5, 6
    assert future.next_use(0, 1, 4, now=0) == 1  # 5
    assert future.next_use(0, 1, 12, now=0) == NEVER  # 5, 6, 8


def test_a_request_that_no_pool_of_that_size_can_hold_is_counted_and_costs_nothing():
    trace = [Request(list(range(20)), []), Request(list(range(100, 200)), []), Request(list(range(20)), [])]
    for name in NAMES:
        result = Replay("wide", trace, 16).run(name, 0.5)
        assert (result.refused, result.cached_tokens, result.evicted_tokens) == (1, 19, 0)


def test_a_recorded_trace_is_read_in_the_order_of_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": [1, 2], "output": [3], "arrival": 2.5}\n\n{"prompt": [4], "output": [], "arrival": 1}\n', encoding="utf-8")
    assert read_trace(path) == [Request([4], [], 1), Request([1, 2], [3], 2.5)]


def test_the_command_prints_all_side_by_side_and_writes_json(tmp_path):
    path = tmp_path / "results.json"
    command = [sys.executable, "bench/replay.py", "--requests", "30", "--json", str(path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f" {name}" in out for name in NAMES) and all(kind in out for kind in KINDS)
    results = json.loads(path.read_text(encoding="utf-8"))
    assert {(r["trace"], r["policy"]) for r in results} == {(kind, name) for kind in KINDS for name in NAMES}
    assert all(0 <= r["hit_rate"] <= 1 for r in results)


def test_the_default_is_what_the_replay_says():
    """Over all traces the default keeps as much as any policy, to a point, and on none of them much less than LRU."""
    default = inspect.signature(radixkv.patch_model).parameters["eviction"].default
    assert inspect.signature(PrefixCache).parameters["eviction"].default == default
    rates: dict[str, list[float]] = {name: [] for name in NAMES if name != BELADY}
    for kind, make in KINDS.items():
        prepared = Replay(kind, make(500, 7), 64)
        for share in (0.06, 0.12, 0.25):
            for name in rates:
                rates[name].append(prepared.run(name, share).hit_rate)
    means = {name: sum(of) / len(of) for name, of in rates.items()}
    assert means[default] >= max(means.values()) - 0.01
    assert means[default] >= means["lru"] + 0.01
    assert all(mine >= lru - 0.02 for mine, lru in zip(rates[default], rates["lru"], strict=True))
