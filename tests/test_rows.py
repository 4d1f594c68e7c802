"""Rows that run: several tokens at once, cuts, forks and rearrangements, in any order, with failures in the middle of steps.

K/V of a token depends on the token and all before it, so that a block that two rows write to, or that is written while another row reads
it, shows in what the rows hold.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from radixkv.errors import OutOfBlocks
from radixkv.sequence import Batch, CallOptions, Sequence
from radixkv.token_key import token_key
from tests.test_host_tier import BLOCK_SIZE, LAYERS, computed, ids, make_cache

WEIGHTS = {
    "start": 3, "decode": 8, "extend": 6, "truncate": 4, "rearrange": 4, "fork": 2, "store": 2, "discard": 1, "invalidate": 0.1,
}  # fmt: skip


def key(row: list[int]) -> bytes:
    return bytes(token_key(row))


def write(step: Any, parts: list[tuple[list[int], int]]) -> None:
    """Store the K/V of each row's tokens from a position on."""
    step.begin()
    for layer in range(LAYERS):
        k, v = (torch.cat([computed(row)[side][layer][start:] for row, start in parts]).transpose(0, 1)[None] for side in (0, 1))
        step.store(layer, k, v)


class RowsFuzz:
    """Batches that run over one cache, and the tokens that each of their rows must hold."""

    def __init__(self, seed: int, **options: Any):
        self.random = random.Random(seed)
        self.cache = make_cache(**options)
        trunk = ids(70, seed)
        self.prompts = [trunk[: self.random.randrange(71)] + ids(self.random.randrange(1, 30), seed + each) for each in range(1, 7)]
        self.running: dict[Batch, list[list[int]]] = {}
        self.counts = dict.fromkeys([*WEIGHTS, "out of blocks", "failed", "found"], 0)

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            (name,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            try:
                getattr(self, name)()
                self.counts[name] += 1
            except OutOfBlocks:
                self.counts["out of blocks"] += 1
            except KeyboardInterrupt:
                self.counts["failed"] += 1
            self.cache.check()
            self.look()
        for batch in list(self.running):
            self.cache.store(batch)
        self.cache.clear()
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks

    def look(self) -> None:
        """Every row holds its tokens and their K/V; so does the tree."""
        for batch, rows in self.running.items():
            for sequence, row in zip(batch.sequences, rows, strict=True):
                assert bytes(sequence.key) == key(row) and sequence.num_stored == len(row)
                self.compare(sequence.blocks, row, len(row))
        row = self.random.choice(self.prompts)
        with self.cache.match_prefix(row) as lease:
            self.compare(lease.blocks, row, lease.length)

    def compare(self, blocks: list[int], row: list[int], length: int) -> None:
        if not row:
            return
        for pools, wanted in zip((self.cache.pool.keys, self.cache.pool.values), computed(row), strict=True):
            for pool, rows in zip(pools, wanted, strict=True):
                assert torch.equal(pool[blocks].transpose(1, 2).flatten(0, 1)[:length], rows[:length])

    def any_batch(self) -> Batch:
        if not self.running:
            self.start()
        return self.random.choice(list(self.running))

    def may_fail(self) -> None:
        if self.random.random() < 0.1:
            raise KeyboardInterrupt

    def start(self) -> None:
        if len(self.running) >= 3:
            self.store()
        rows = [list(self.random.choice(self.prompts)) for _ in range(self.random.randint(1, 3))]
        if len(rows) > 1 and self.random.random() < 0.2:
            rows[0] = []  # a chunk of pads
        options = CallOptions(reuse=self.random.random() < 0.8)
        batch = self.cache.admit([key(row) for row in rows], [1] * len(rows), options=options)
        try:
            with self.cache.prompt_step(batch) as step:
                self.may_fail()
                write(step, [(row, sequence.hit_len) for row, sequence in zip(rows, batch.sequences, strict=True)])
        except BaseException:
            self.cache.discard(batch)
            raise
        self.running[batch] = rows

    def decode(self) -> None:
        batch = self.any_batch()
        rows = self.running[batch]
        chosen = sorted(self.random.sample(range(len(rows)), self.random.randint(1, len(rows))))
        new = [self.random.randrange(50) for _ in chosen]
        with self.cache.decode_step(batch, chosen, new) as step:
            self.may_fail()
            write(step, [([*rows[row], token], len(rows[row])) for row, token in zip(chosen, new, strict=True)])
        for row, token in zip(chosen, new, strict=True):
            rows[row] = [*rows[row], token]

    def extend(self) -> None:
        batch = self.any_batch()
        rows = self.running[batch]
        chosen = sorted(self.random.sample(range(len(rows)), self.random.randint(1, len(rows))))
        new = []
        for row in chosen:
            # What another prompt goes on with, so that it may be found in the tree; or anything.
            longer = [each for each in self.prompts if each[: len(rows[row])] == rows[row] and len(each) > len(rows[row])]
            if longer and self.random.random() < 0.7:
                full = self.random.choice(longer)
                new.append(full[len(rows[row]) : self.random.randrange(len(rows[row]), len(full)) + 1])
            else:
                new.append([self.random.randrange(50) for _ in range(self.random.randrange(1, 40))])
        wanted = [self.random.randrange(len(tokens) + 1) for tokens in new]
        with self.cache.extend_step(batch, chosen, [key(tokens) for tokens in new], wanted, is_prompt=True) as step:
            self.may_fail()
            longer = [[*rows[row], *tokens] for row, tokens in zip(chosen, new, strict=True)]
            sequences = [batch.sequences[row] for row in chosen]
            self.counts["found"] += sum(sequence.hit_len > len(rows[row]) for row, sequence in zip(chosen, sequences, strict=True))
            for tokens, kept, sequence in zip(longer, wanted, sequences, strict=True):
                assert sequence.hit_len <= len(tokens) - max(1, kept), "logits are wanted of a token that is not computed"
            write(step, [(tokens, sequence.hit_len) for tokens, sequence in zip(longer, sequences, strict=True)])
        for row, tokens in zip(chosen, new, strict=True):
            rows[row] = [*rows[row], *tokens]

    def truncate(self) -> None:
        batch = self.any_batch()
        rows = self.running[batch]
        lengths = [self.random.choice([len(row), self.random.randrange(len(row) + 1), max(0, len(row) - 3)]) for row in rows]
        self.cache.truncate(batch, lengths)
        self.running[batch] = [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def rearrange(self) -> None:
        batch = self.any_batch()
        rows = self.running[batch]
        order = [self.random.randrange(len(rows)) for _ in range(self.random.randint(1, 4))]
        self.cache.rearrange(batch, order)
        self.running[batch] = [list(rows[row]) for row in order]

    def fork(self) -> None:
        batch = self.any_batch()
        self.running[self.cache.fork(batch)] = [list(row) for row in self.running[batch]]

    def store(self) -> None:
        batch = self.any_batch()
        self.cache.store(batch)
        for row in self.running.pop(batch):
            assert self.cache.match_prefix(row).length == len(row)

    def discard(self) -> None:
        batch = self.any_batch()
        self.cache.discard(batch)
        del self.running[batch]

    def invalidate(self) -> None:
        self.cache.invalidate()
        for batch in list(self.running):
            assert self.cache.is_stale(batch)
            self.cache.discard(batch)
        self.running.clear()


@pytest.mark.parametrize(("num_blocks", "host_blocks"), [(400, 0), (30, 0), (30, 20)], ids=["roomy", "tight", "tight with a host tier"])
def test_a_long_run_of_rows(num_blocks: int, host_blocks: int, num_fuzz_operations: int) -> None:
    fuzz = RowsFuzz(num_blocks + host_blocks, num_blocks=num_blocks, host_blocks=host_blocks)
    fuzz.run(num_fuzz_operations)
    for name in ("extend", "truncate", "rearrange", "fork", "found", "failed"):
        assert fuzz.counts[name], f"no {name} in this run"
    assert (fuzz.counts["out of blocks"] > 0) == (num_blocks < 400)


def started(row: list[int], **options: Any) -> tuple[Any, Batch]:
    """A cache in which one row of these tokens runs."""
    cache = make_cache(host_blocks=0, **options)
    batch = cache.admit([key(row)], [1])
    with cache.prompt_step(batch) as step:
        write(step, [(row, 0)])
    return cache, batch


def test_a_fork_takes_no_block_until_it_writes() -> None:
    cache, batch = started(ids(BLOCK_SIZE + 5, 1), num_blocks=20)
    free = cache.pool.num_free
    forks = [cache.fork(batch) for _ in range(4)]
    cache.rearrange(batch, [0, 0, 0])
    assert cache.pool.num_free == free
    for fork in forks:
        cache.discard(fork)
    cache.discard(batch)
    cache.check()
    assert cache.pool.num_free == 20


def test_the_last_row_that_leaves_a_block_keeps_it() -> None:
    """Of n rows that go on from one partly filled block, n - 1 copy it."""
    row = ids(BLOCK_SIZE + 5, 2)
    cache, batch = started(row, num_blocks=20)
    cache.rearrange(batch, [0] * 5)
    free, copies = cache.pool.num_free, cache.backend.launches["copy_blocks"]
    with cache.decode_step(batch, list(range(5)), list(range(5))) as step:
        write(step, [([*row, token], len(row)) for token in range(5)])
    assert free - cache.pool.num_free == 4
    assert cache.backend.launches["copy_blocks"] == copies + 1, "one launch for all rows"
    cache.discard(batch)
    cache.check()


def test_no_room_for_a_copy_loses_nothing() -> None:
    row = ids(3 * BLOCK_SIZE + 5, 3)
    cache, batch = started(row, num_blocks=4)
    cache.rearrange(batch, [0, 0])
    with pytest.raises(OutOfBlocks), cache.decode_step(batch, [0, 1], [1, 2]):
        raise AssertionError("never begun")
    cache.check()
    assert [bytes(sequence.key) for sequence in batch.sequences] == [key(row)] * 2
    cache.rearrange(batch, [1])
    with cache.decode_step(batch, [0], [7]) as step:
        write(step, [([*row, 7], len(row))])
    cache.store(batch)
    cache.check()
    assert cache.match_prefix([*row, 7]).length == len(row) + 1


def test_a_failing_fork_lets_go_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, batch = started(ids(40, 4), num_blocks=20)
    free = cache.pool.num_free
    retain, calls = type(cache.pool).retain, 0

    def failing(pool: Any, blocks: list[int]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError
        retain(pool, blocks)

    monkeypatch.setattr(type(cache.pool), "retain", failing)
    with pytest.raises(MemoryError):
        cache.rearrange(batch, [0, 0, 0, 0])
    monkeypatch.undo()
    cache.check()
    assert cache.pool.num_free == free and len(batch.sequences) == 1
    cache.discard(batch)


def test_a_row_that_changed_starts_its_followers_over() -> None:
    """A plan or a gathered copy that goes on with a row from step to step sees that the row jumped."""
    cache, batch = started(ids(40, 5), num_blocks=20)
    (sequence,) = batch.sequences
    assert isinstance(sequence, Sequence)
    before = sequence.jumps
    cache.truncate(batch, [33])
    assert sequence.jumps > before and not batch.carried
    cache.discard(batch)
