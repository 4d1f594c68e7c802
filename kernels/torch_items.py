"""What the torch kernels attend to in one step: items of (query rows, a range of keys), made on the host once per step.

Each run of blocks that several sequences share is one item for all their rows; what is left of a sequence is its own item, or part of one
that takes several single-token sequences. Rows with more than one item merge by their LSE, in list order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os.path import commonprefix

import numpy as np
import torch
from torch import Tensor

from radixkv.kernels.torch_rows import SingleRows
from radixkv.kernels.work import Work

# Single-token sequences share a gather up to this size per pool, so that it is still in a cache when it is used.
GATHER_BYTES = 3 << 19
# An item with a mask has at most so many queries, so that its mask, and its scores where they are materialised, stay small.
MASKED_QUERIES = 256
# A shared run is an item of its own if that spares gathering so many tokens; below that, the merge costs more.
SHARED_TOKENS = 512


@dataclass
class Item:
    """Query rows and the range of keys that they attend to in one call; what it gathers grows with its rows, see torch_rows.py.

    Attributes:
        rows: the rows of query: one per sequence, or all of the only sequence.
        num_rows: how many they are.
        num_seqs: sequences gathered; 1 for rows that share all keys.
        gather: int64 `[num_seqs * num_kv_heads * num_blocks]`, rows of a pool seen as `[num_blocks * num_kv_heads, block_size * head_dim]`.
        first_key, end_key: which of the gathered keys take part.
        merge: whether the rows hold the result over other keys already.
        causal: whether row i sees only the keys up to first_key + i.
        mask: added to the scores, 0 or -inf, `[num_seqs, 1, 1, num_keys]` or `[1, 1, num_rows, num_keys]`.
        dead: rows of the gathered keys, seen as `[num_seqs * num_kv_heads * num_gathered_keys, head_dim]`, that no query sees and that
            the mask alone would not keep out, since 0 * NaN is NaN.
        dtype: what is computed with.
    """

    rows: slice | Tensor
    num_rows: int
    num_seqs: int
    gather: Tensor
    first_key: int
    end_key: int
    merge: bool = False
    causal: bool = False
    mask: Tensor | None = None
    dead: Tensor | None = None
    dtype: torch.dtype = torch.float32


class ItemBuilder:
    """Builds the items of one step.

    Args:
        work: lengths and block ids of the step.
        num_kv_heads, block_size, block_bytes: of one layer's pool; block_bytes counts one block of K as it is computed with.
        window: keys that a query sees, its own included; None for all.
        causal_calls: whether items may be causal; otherwise their masks say so.
        merges: whether the rows of a sequence may be in several items; otherwise nothing is shared.
        dtype, device: of the masks, that is, of what is computed with.
    """

    def __init__(
        self,
        work: Work,
        *,
        num_kv_heads: int,
        block_size: int,
        block_bytes: int,
        window: int | None,
        causal_calls: bool,
        merges: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.tables, self.seq_lens = _host_tables(work, block_size)
        self.query_lens = work.query_lens
        self.starts = [0, *accumulate(work.query_lens)]
        self.num_kv_heads, self.block_size, self.block_bytes = num_kv_heads, block_size, block_bytes
        self.window, self.causal_calls, self.merges = window, causal_calls, merges
        self.dtype, self.device = dtype, device
        # The items of several sequences with one new token each, as far as they were built.
        self.single_rows: list[SingleRows] = []
        # Blocks of each sequence that its earlier items cover.
        self.covered = [0] * len(self.seq_lens)
        self.causal_masks: dict[tuple[int, int, int], Tensor] = {}

    def build(self) -> list[Item]:
        """Return the items of all rows that see a key."""
        items = list(self._shared_runs()) if self.window is None and self.merges else []
        seqs = [seq for seq, (new, total) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)) if new and total]
        for seq in seqs:
            if self.query_lens[seq] > 1:
                items += self._prompt(seq)
        return items + list(self._single_rows([seq for seq in seqs if self.query_lens[seq] == 1]))

    def _shared_runs(self) -> Iterator[Item]:
        """Walk the sequences' common beginnings as a trie, from the root; yield the runs of whole stored blocks that are worth an item."""
        size = self.block_size
        stored = [table[: (total - new) // size] for table, new, total in zip(self.tables, self.query_lens, self.seq_lens, strict=True)]
        pending = [([seq for seq, new in enumerate(self.query_lens) if new], 0)]
        while pending:
            seqs, depth = pending.pop()
            branches = defaultdict(list)
            for seq in seqs:
                if len(stored[seq]) > depth:
                    branches[stored[seq][depth]].append(seq)
            for branch in branches.values():
                if len(branch) == 1:
                    continue
                end = len(commonprefix([stored[seq] for seq in branch]))
                start = self.covered[branch[0]]
                if (end - start) * size * (len(branch) - 1) >= SHARED_TOKENS:
                    rows = [row for seq in branch for row in range(self.starts[seq], self.starts[seq + 1])]
                    yield self._range(rows, branch[0], start * size, end * size, merge=start > 0)
                    for seq in branch:
                        self.covered[seq] = end
                pending.append((branch, end))

    def _prompt(self, seq: int) -> Iterator[Item]:
        """Yield the items of one sequence with several new tokens."""
        rows = range(self.starts[seq], self.starts[seq + 1])
        total = self.seq_lens[seq]
        first_new, covered = total - len(rows), self.covered[seq] * self.block_size
        if self.causal_calls and self.window is None and (covered == first_new or (self.merges and len(rows) > MASKED_QUERIES)):
            if covered < first_new:
                yield self._range(rows, seq, covered, first_new, merge=covered > 0)
            yield self._range(rows, seq, first_new, total, merge=first_new > 0, causal=True)
            return
        # Without merging a row is to round as in one call for all, whose tiling depends on how many rows it gets.
        size = MASKED_QUERIES if self.merges else len(rows)
        for tile in range(0, len(rows), size):
            tile_rows = rows[tile : tile + size]
            first = first_new + tile
            low = covered if self.window is None else max(0, first - self.window + 1)
            end = first + len(tile_rows)
            yield self._range(tile_rows, seq, low, end, merge=covered > 0, mask=self._causal_mask(len(tile_rows), end - low, first - low))

    def _single_rows(self, seqs: list[int]) -> Iterator[Item]:
        """Yield items of several sequences with one new token each, those of about as many blocks together."""
        lows = [0 if self.window is None else max(0, total - self.window) for total in self.seq_lens]
        tables = [table[max(self.covered[seq], lows[seq] // self.block_size) :] for seq, table in enumerate(self.tables)]
        # One group is filled up to equal numbers of blocks, and its rows have or have not an earlier partial.
        seqs = sorted(seqs, key=lambda seq: (self.covered[seq] > 0, -len(tables[seq])))
        while seqs:
            merge, most = self.covered[seqs[0]] > 0, len(tables[seqs[0]])
            limit = max(1, GATHER_BYTES // (most * self.block_bytes))
            group = [seq for seq in seqs[:limit] if (self.covered[seq] > 0) == merge and 2 * len(tables[seq]) >= most]
            seqs = seqs[len(group) :]
            skipped = [(len(self.tables[seq]) - len(tables[seq])) * self.block_size for seq in group]
            spans = [(max(0, lows[seq] - skip), self.seq_lens[seq] - skip) for seq, skip in zip(group, skipped, strict=True)]
            blocks = [tables[seq] + tables[seq][:1] * (most - len(tables[seq])) for seq in group]
            yield self._group(group, np.array(blocks), np.array(spans), np.array(skipped) // self.block_size, merge)

    def _group(self, seqs: list[int], blocks: np.ndarray, spans: np.ndarray, first_blocks: np.ndarray, merge: bool) -> Item:
        """Make the item of one row per sequence, which sees the keys of its span of what its line of blocks holds."""
        item = Item(self._rows([self.starts[seq] for seq in seqs]), len(seqs), len(seqs), torch.empty(0), 0, 0, merge, dtype=self.dtype)
        rows = SingleRows(item, seqs, first_blocks, self.num_kv_heads, self.block_size, self.device)
        rows.fill(blocks, spans)
        self.single_rows.append(rows)
        return item

    def _range(
        self, rows: Sequence[int], seq: int, low: int, end: int, *, merge: bool, causal: bool = False, mask: Tensor | None = None
    ) -> Item:
        """Make the item of rows that attend to the keys of one sequence from position low up to end."""
        first_block, end_block = low // self.block_size, -(-end // self.block_size)
        skipped = first_block * self.block_size
        table = self.tables[seq][first_block:end_block]
        return self._item(rows, [table], low - skipped, end - skipped, merge=merge, causal=causal, mask=mask)

    def _item(
        self,
        rows: Sequence[int],
        tables: list[list[int]],
        first_key: int,
        end_key: int,
        *,
        merge: bool,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Item:
        # [num_seqs, num_kv_heads, num_blocks]: heads outside blocks, so that a head's keys are one run in what is gathered.
        gather = torch.tensor(tables)[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)[:, None]
        gathered = gather.flatten().to(self.device)
        return Item(self._rows(rows), len(rows), len(tables), gathered, first_key, end_key, merge, causal, mask, None, self.dtype)

    def _rows(self, rows: Sequence[int]) -> slice | Tensor:
        in_order = rows[-1] - rows[0] + 1 == len(rows) and all(row == rows[0] + i for i, row in enumerate(rows))
        return slice(rows[0], rows[-1] + 1) if in_order else torch.tensor(rows, device=self.device)

    def _causal_mask(self, num_rows: int, num_keys: int, first: int) -> Tensor:
        """Return the mask `[1, 1, num_rows, num_keys]` of rows whose first sees the keys up to number first."""
        shape = (num_rows, num_keys, first)
        if shape not in self.causal_masks:
            unseen = torch.ones((num_rows, num_keys), dtype=torch.bool).triu_(first + 1)
            if self.window is not None:
                unseen |= torch.ones_like(unseen).tril_(first - self.window)
            mask = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, float("-inf"))
            self.causal_masks[shape] = mask[None, None].to(self.device)
        return self.causal_masks[shape]


def _host_tables(work: Work, block_size: int) -> tuple[list[list[int]], list[int]]:
    """The block ids of each sequence, and its length, as they are now."""
    if work.table is None or work.lens is None:
        return [ids.tolist() for ids in work.block_ids], work.seq_lens
    lens = work.lens.tolist()
    return [row[: -(-num_tokens // block_size)].tolist() for row, num_tokens in zip(work.table, lens, strict=True)], lens
