"""Random operations on a whole cache: rows that run, leases, pins, both tiers, files, failing allocations.

After each of them everything is conserved in both tiers, and every token that is found has the K/V that was computed for it and its prefix.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from radixkv.errors import OutOfBlocks
from radixkv.pool import BlockPool
from radixkv.token_key import token_key
from tests.test_host_tier import BLOCK_SIZE, LAYERS, computed, ids, make_cache

WEIGHTS = {
    "generate": 8, "insert": 4, "look": 6, "hold": 2, "let_go": 2, "pin": 2, "unpin": 2, "fail": 2, "save": 0.3, "load": 0.3, "clear": 0.2,
    "invalidate": 0.1,
}  # fmt: skip


class CacheFuzz:
    """One cache and what is held of it."""

    def __init__(self, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any):
        self.random = random.Random(seed)
        self.cache = make_cache(num_blocks=14, **options)
        self.file, self.monkeypatch = folder / "cache", monkeypatch
        trunk = ids(40, seed)
        self.prompts = [trunk[: self.random.randrange(41)] + ids(self.random.randrange(1, 60), seed + each) for each in range(1, 10)]
        self.leases: list[Any] = []
        self.pins: list[Any] = []
        self.counts = dict.fromkeys([*WEIGHTS, "out of blocks", "restored"], 0)

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            (name,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self.counts[name] += 1
            try:
                getattr(self, name)()
            except OutOfBlocks:
                self.counts["out of blocks"] += 1
            self.cache.check()
            self.look()
        for held in (*self.leases, *self.pins):
            if not held.released:
                held.release()
        self.cache.clear()
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.num_blocks and self.cache.stats().blocks_host == 0

    def tokens(self) -> list[int]:
        chosen = self.random.choice(self.prompts)
        return chosen[: self.random.randrange(1, len(chosen) + 1)]

    def generate(self) -> None:
        """One or two rows, a few decode steps, and an end: stored, dropped, or an exception in the middle of a step."""
        cache, rows = self.cache, [self.tokens() for _ in range(self.random.randint(1, 2))]
        batch = cache.admit([bytes(token_key(row)) for row in rows], [1] * len(rows))
        stop_at = self.random.randrange(8)
        try:
            with cache.prompt_step(batch) as step:
                hits = [sequence.hit_len for sequence in batch.sequences]
                self.store(step, [(row, hit, len(row)) for row, hit in zip(rows, hits, strict=True)])
            for number in range(self.random.randrange(20)):
                new = [self.random.randrange(1000) for _ in rows]
                with cache.decode_step(batch, list(range(len(rows))), new) as step:
                    rows = [[*row, token] for row, token in zip(rows, new, strict=True)]
                    if number == stop_at:
                        raise KeyboardInterrupt
                    self.store(step, [(row, len(row) - 1, len(row)) for row in rows])
        except (KeyboardInterrupt, OutOfBlocks):
            pass
        (cache.store if self.random.random() < 0.8 else cache.discard)(batch)

    def store(self, step: Any, parts: list[tuple[list[int], int, int]]) -> None:
        step.begin()
        for layer in range(LAYERS):
            key, value = (
                torch.cat([computed(row)[side][layer][start:end] for row, start, end in parts]).transpose(0, 1)[None] for side in (0, 1)
            )
            step.store(layer, key, value)

    def insert(self) -> None:
        row = self.tokens()
        self.cache.insert_computed(row, *computed(row))

    def look(self) -> None:
        row = self.tokens()
        restored = self.cache.stats().restored_tokens
        with self.cache.match_prefix(row) as lease:
            for pools, wanted in zip((self.cache.pool.keys, self.cache.pool.values), computed(row), strict=True):
                for pool, rows in zip(pools, wanted, strict=True):
                    got = pool[lease.blocks].transpose(1, 2).flatten(0, 1)[: lease.length]
                    assert torch.equal(got, rows[: lease.length])
        self.counts["restored"] += self.cache.stats().restored_tokens > restored

    def hold(self) -> None:
        if len(self.leases) < 2:
            self.leases.append(self.cache.match_prefix(self.tokens()))

    def let_go(self) -> None:
        if self.leases:
            self.leases.pop(self.random.randrange(len(self.leases))).release()

    def pin(self) -> None:
        row = self.tokens()
        with self.cache.match_prefix(row) as lease:
            is_cached = lease.length > 0
        if is_cached and len(self.pins) < 2:
            self.pins.append(self.cache.pin(row))

    def unpin(self) -> None:
        if self.pins:
            self.pins.pop(self.random.randrange(len(self.pins))).release()

    def fail(self) -> None:
        """An allocation that fails somewhere in an operation loses nothing."""
        left, original = self.random.randrange(3), BlockPool.allocate

        def allocate(pool: BlockPool, num_blocks: int) -> list[int]:
            nonlocal left
            left -= 1
            if left < 0:
                raise MemoryError
            return original(pool, num_blocks)

        with self.monkeypatch.context() as patch:
            patch.setattr(BlockPool, "allocate", allocate)
            try:
                self.random.choice([self.generate, self.insert, self.look])()
            except MemoryError:
                for batch in list(self.cache._live):
                    self.cache.discard(batch)

    def save(self) -> None:
        self.cache.save(self.file)

    def load(self) -> None:
        if self.file.exists():
            self.cache.load(self.file)

    def clear(self) -> None:
        self.cache.clear()

    def invalidate(self) -> None:
        self.cache.invalidate()
        self.pins.clear()
        self.file.unlink(missing_ok=True)  # of other weights, as far as the cache knows


@pytest.mark.parametrize("eviction", ["slru", "lru", "cost"])
@pytest.mark.parametrize("host_blocks", [0, 18])
def test_a_long_run_of_a_cache(
    eviction: str, host_blocks: int, num_fuzz_operations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BLOCK_SIZE == 16
    fuzz = CacheFuzz(len(eviction) + host_blocks, tmp_path, monkeypatch, host_blocks=host_blocks, eviction=eviction)
    fuzz.run(num_fuzz_operations // 4)
    assert fuzz.counts["generate"] and fuzz.counts["pin"] and (fuzz.counts["restored"] > 0) == (host_blocks > 0)
