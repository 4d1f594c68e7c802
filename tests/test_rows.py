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
    "start": 3, "decode": 8, "extend": 6, "extend_alike": 3, "truncate": 4, "rearrange": 4, "fork": 2, "part": 2, "join": 2, "store": 2,
    "discard": 1, "invalidate": 0.1,
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
        self.counts = dict.fromkeys([*WEIGHTS, "out of blocks", "failed", "found", "shared"], 0)

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
        self.extend_rows(batch, chosen, new)

    def extend_alike(self) -> None:
        """Several rows with one beginning, of which each has another part, go on alike: what one of them computes the others take."""
        batch = self.any_batch()
        row = self.random.randrange(len(self.running[batch]))
        whole = list(self.running[batch][row])
        if not whole:
            return
        num_rows = self.random.randint(2, 4)
        self.cache.rearrange(batch, [row] * num_rows)
        self.running[batch] = [list(whole) for _ in range(num_rows)]
        lengths = [self.random.randrange(max(1, len(whole) - 40), len(whole) + 1) for _ in range(num_rows)]
        self.cache.truncate(batch, lengths)
        self.running[batch] = [whole[:length] for length in lengths]
        whole += [self.random.randrange(50) for _ in range(self.random.randrange(1, 40))]
        ends = [self.random.randrange(length + 1, len(whole) + 1) for length in lengths]
        tails = [[self.random.randrange(50) for _ in range(self.random.randrange(4))] for _ in lengths]
        new = [whole[length:end] + tail for length, end, tail in zip(lengths, ends, tails, strict=True)]
        self.extend_rows(batch, list(range(num_rows)), new)

    def extend_rows(self, batch: Batch, chosen: list[int], new: list[list[int]]) -> None:
        rows = self.running[batch]
        wanted = [self.random.randrange(len(tokens) + 1) for tokens in new]
        with self.cache.extend_step(batch, chosen, [key(tokens) for tokens in new], wanted, is_prompt=True) as step:
            self.may_fail()
            longer = [[*rows[row], *tokens] for row, tokens in zip(chosen, new, strict=True)]
            sequences = [batch.sequences[row] for row in chosen]
            self.counts["shared"] += sum(bool(sequence.shared_runs) for sequence in sequences)
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

    def part(self) -> None:
        batch = self.any_batch()
        rows = self.running[batch]
        taken = sorted(self.random.sample(range(len(rows)), self.random.randint(1, len(rows))))
        self.running[self.cache.part(batch, taken)] = [rows[row] for row in taken]
        if len(taken) == len(rows):
            self.cache.discard(batch)
            del self.running[batch]
        else:
            self.running[batch] = [tokens for row, tokens in enumerate(rows) if row not in taken]

    def join(self) -> None:
        batch, other = self.any_batch(), self.any_batch()
        if batch is not other and batch.options == other.options:
            self.cache.join(batch, other)
            self.running[batch] += self.running.pop(other)

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
    for name in ("extend", "truncate", "rearrange", "fork", "part", "join", "found", "shared", "failed"):
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


@pytest.mark.parametrize("which", [0, 1])
def test_a_lease_that_is_shortened_stays_on_its_own_blocks(which: int) -> None:
    """Two prefixes part inside of a block. A row that leases one of them and is cut before they part holds the block of that one."""
    trunk, ends = ids(BLOCK_SIZE + 1, 6), [ids(2 * BLOCK_SIZE, 7), ids(2 * BLOCK_SIZE, 8)]
    cache = make_cache(num_blocks=12, host_blocks=0)
    for end in ends:
        cache.insert_computed(trunk + end, *computed(trunk + end))
    row = trunk + ends[which]
    batch = cache.admit([key([*row, 1])], [1])
    with cache.prompt_step(batch) as step:
        write(step, [([*row, 1], len(row))])
    cache.truncate(batch, [len(trunk)])
    (sequence,) = batch.sequences
    with pytest.raises(OutOfBlocks):
        cache.allocate(11)
    assert sequence.lease is not None and sequence.lease.blocks == sequence.blocks
    cache.pool.release(cache.allocate(10))
    cache.check()
    for pool, wanted in zip(cache.pool.keys, computed(trunk)[0], strict=True):
        assert torch.equal(pool[sequence.blocks].transpose(1, 2).flatten(0, 1)[: len(trunk)], wanted)
    cache.discard(batch)


@pytest.mark.parametrize("num_more", [3, BLOCK_SIZE - 7, BLOCK_SIZE, 3 * BLOCK_SIZE])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a nearer one"])
def test_a_row_whose_fork_was_cut_and_stored_and_leased(num_more: int, beside: bool) -> None:
    """The block is in the tree once, with all that the row has of it."""
    start = ids(BLOCK_SIZE + 5, 9)
    row = start + ids(num_more, 10)
    cache, batch = started(row, num_blocks=20)
    fork = cache.fork(batch)
    cache.truncate(fork, [len(start)])
    cache.store(fork)
    if beside:
        other = [*row[: len(start) + 2], 999]
        cache.insert_computed(other, *computed(other))
    with cache.match_prefix(start) as lease:
        cache.store(batch)
        cache.check()
        assert lease.length == len(start)
        with cache.match_prefix(row) as found:
            assert found.length == len(row)
            assert torch.equal(
                cache.pool.keys[0][found.blocks].transpose(1, 2).flatten(0, 1)[: len(row)], computed(row)[0][0]
            )
    cache.clear()
    cache.check()
    assert cache.pool.num_free == 20


def test_a_row_that_found_more_and_failed_writes_to_a_block_of_its_own() -> None:
    """The step fails for want of room when the row lists a block of the tree already; its next token must not go there."""
    known = ids(11, 13)
    cache, batch = started(known[:7], num_blocks=5)
    cache.insert_computed(known, *computed(known))
    with pytest.raises(OutOfBlocks), cache.extend_step(batch, [0], [key(known[7:] + ids(5 * BLOCK_SIZE, 14))], [1], is_prompt=True):
        raise AssertionError("never begun")
    cache.check()
    row = [*known[:7], 999]
    with cache.decode_step(batch, [0], [999]) as step:
        write(step, [(row, 7)])
    (sequence,) = batch.sequences
    with cache.match_prefix(known) as lease:
        assert lease.length == 11
        for tokens, blocks in ((row, sequence.blocks), (known, lease.blocks)):
            held = cache.pool.keys[0][blocks].transpose(1, 2).flatten(0, 1)[: len(tokens)]
            assert torch.equal(held, computed(tokens)[0][0])
    cache.discard(batch)
    cache.check()


def test_a_row_that_changed_starts_its_followers_over() -> None:
    """A plan or a gathered copy that goes on with a row from step to step sees that the row jumped."""
    cache, batch = started(ids(40, 5), num_blocks=20)
    (sequence,) = batch.sequences
    assert isinstance(sequence, Sequence)
    before = sequence.jumps
    cache.truncate(batch, [33])
    assert sequence.jumps > before and not batch.carried
    cache.discard(batch)
