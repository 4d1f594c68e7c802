"""Traces of requests, made from a seed or read from a file: what `bench/replay.py` replays."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

VOCABULARY = 32_000


class Request(NamedTuple):
    """One call of generate(): token ids of the prompt and of the answer, and when it came (in any unit; 0: in the order given)."""

    prompt: list[int]
    output: list[int]
    arrival: float = 0.0


Trace = list[Request]


def chat(num_requests: int, seed: int) -> Trace:
    """Users who talk in turns, several at once, under one of 8 system prompts; a turn's prompt is the whole talk so far.

    A talk has 1 to 20 turns, few of them many. 12 talks are open at a time; one that ends is followed by a new one.
    """
    rng = random.Random(seed)
    systems = [_tokens(rng, rng.randint(100, 900)) for _ in range(8)]
    weights = _zipf(8, 1.0)

    def begin() -> tuple[list[int], int]:
        return list(rng.choices(systems, cum_weights=weights)[0]), min(20, 1 + int(rng.expovariate(1 / 4)))

    talks = [begin() for _ in range(12)]
    trace = []
    for _ in range(num_requests):
        i = rng.randrange(len(talks))
        history, turns_left = talks[i]
        prompt = history + _tokens(rng, rng.randint(10, 120))
        trace.append(Request(prompt, _tokens(rng, rng.randint(20, 250))))
        talks[i] = (prompt + trace[-1].output, turns_left - 1) if turns_left > 1 else begin()
    return trace


def rag(num_requests: int, seed: int) -> Trace:
    """Questions, each over one of 200 documents of Zipf popularity (exponent 1) after one instruction; nobody asks a second turn."""
    rng = random.Random(seed)
    instruction = _tokens(rng, 60)
    documents = [_tokens(rng, rng.randint(300, 2500)) for _ in range(200)]
    weights = _zipf(len(documents), 1.0)
    return [
        Request(instruction + rng.choices(documents, cum_weights=weights)[0] + _tokens(rng, rng.randint(8, 60)), _tokens(rng, 80))
        for _ in range(num_requests)
    ]


def best_of_n(num_requests: int, seed: int) -> Trace:
    """8 answers to one problem after a few-shot preamble; the best, so far 3 times, is the beginning of 8 longer ones.

    Four problems are worked on at a time, so that their requests alternate.
    """
    rng = random.Random(seed)
    preamble = _tokens(rng, 700)

    def work():
        prompt = preamble + _tokens(rng, rng.randint(50, 300))
        for _ in range(3):
            answers = [_tokens(rng, rng.randint(50, 250)) for _ in range(8)]
            for answer in answers:
                yield Request(prompt, answer)
            prompt = prompt + rng.choice(answers)

    problems = [work() for _ in range(4)]
    trace: Trace = []
    while len(trace) < num_requests:
        i = rng.randrange(len(problems))
        request = next(problems[i], None)
        if request is None:
            problems[i] = work()
        else:
            trace.append(request)
    return trace


KINDS: dict[str, Callable[[int, int], Trace]] = {"chat": chat, "rag": rag, "best-of-n": best_of_n}


def read_trace(path: Path) -> Trace:
    """A recorded trace, one request per line of JSON: {"prompt": [ids], "output": [ids], "arrival": number, if known}."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return sorted((Request(r["prompt"], r["output"], r.get("arrival", 0.0)) for r in records), key=lambda request: request.arrival)


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def _zipf(num: int, exponent: float) -> list[float]:
    """Cumulative weights 1 / rank**exponent."""
    return list(accumulate(1 / rank**exponent for rank in range(1, num + 1)))
