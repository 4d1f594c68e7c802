"""Rows that are extended together, with the same tokens: one of them computes these, and all hold them in the same blocks."""

from __future__ import annotations

import pytest
import torch

from radixkv.sequence import CallOptions
from tests.test_host_tier import BLOCK_SIZE, computed, ids, make_cache
from tests.test_rows import key, write


def test_rows_that_go_on_alike_compute_that_once() -> None:
    """Also where they have different parts of it already; afterwards they hold all its full blocks together."""
    whole = ids(6 * BLOCK_SIZE, 11)
    begins, ends = [20, 40, 25], [6 * BLOCK_SIZE, 5 * BLOCK_SIZE, 6 * BLOCK_SIZE]
    cache = make_cache(num_blocks=60, host_blocks=0)
    batch = cache.admit([key(whole[:begin]) for begin in begins], [1] * 3, options=CallOptions(store=False))
    with cache.prompt_step(batch) as step:
        write(step, [(whole[:begin], sequence.hit_len) for begin, sequence in zip(begins, batch.sequences, strict=True)])
    rows = [[*whole[:end], row] for row, end in enumerate(ends)]
    new = [key(row[begin:]) for row, begin in zip(rows, begins, strict=True)]
    computed_before = cache.stats().computed_tokens
    with cache.extend_step(batch, [0, 1, 2], new, [1] * 3, is_prompt=True) as step:
        write(step, [(row, sequence.hit_len) for row, sequence in zip(rows, batch.sequences, strict=True)])
    # The first row has least and computes all; the others compute their last token.
    assert cache.stats().computed_tokens - computed_before == 6 * BLOCK_SIZE - 20 + 3
    cache.check()
    tables = [sequence.blocks for sequence in batch.sequences]
    assert tables[0][:6] == tables[2][:6] and tables[0][:5] == tables[1][:5]
    for row, table in zip(rows, tables, strict=True):
        for side, pools in enumerate((cache.pool.keys, cache.pool.values)):
            assert torch.equal(pools[1][table].transpose(1, 2).flatten(0, 1)[: len(row)], computed(row)[side][1])
    cache.discard(batch)
    cache.check()


def test_rows_that_go_on_alike_and_fail_are_as_they_were() -> None:
    whole = ids(4 * BLOCK_SIZE, 12)
    cache = make_cache(num_blocks=40, host_blocks=0)
    batch = cache.admit([key(whole[:begin]) for begin in (20, 29)], [1] * 2, options=CallOptions(store=False))
    with cache.prompt_step(batch) as step:
        write(step, [(whole[:begin], sequence.hit_len) for begin, sequence in zip((20, 29), batch.sequences, strict=True)])
    free, before = cache.pool.num_free, [list(sequence.blocks) for sequence in batch.sequences]
    with pytest.raises(KeyboardInterrupt), cache.extend_step(batch, [0, 1], [key(whole[20:]), key(whole[29:])], [1] * 2, is_prompt=True):
        raise KeyboardInterrupt
    cache.check()
    assert cache.pool.num_free == free and [sequence.blocks for sequence in batch.sequences] == before
    for sequence, begin in zip(batch.sequences, (20, 29), strict=True):
        assert bytes(sequence.key) == key(whole[:begin])
        wanted = computed(whole[:begin])[0][0]
        assert torch.equal(cache.pool.keys[0][sequence.blocks].transpose(1, 2).flatten(0, 1)[:begin], wanted)
    cache.discard(batch)
