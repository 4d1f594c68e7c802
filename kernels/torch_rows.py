"""Items of sequences that get a token each per step, moved on from step to step instead of being built anew.

A step that is one token longer sees one key more of each sequence: a mask loses an entry a row, or a range ends one later. Only where a
block begins is anything gathered otherwise, and only by the item whose row it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from radixkv.kernels.torch_items import Item


class SingleRows:
    """One item of several sequences with one new token each, and what it takes to make it longer.

    Args:
        item: its rows are one per sequence; everything else is filled in here.
        seqs: which sequences. first_blocks: int [num_seqs], how many leading blocks of each other items cover, or no query sees.
        num_kv_heads, block_size: of the pool. device: where the item's tensors are.
    """

    def __init__(
        self, item: Item, seqs: Sequence[int], first_blocks: np.ndarray, num_kv_heads: int, block_size: int, device: torch.device
    ):
        self.item, self.seqs, self._first_blocks = item, np.array(seqs), first_blocks
        self._num_kv_heads, self._block_size, self._device = num_kv_heads, block_size, device
        # Where in the mask each row's next key stands.
        self._next = torch.zeros(0, dtype=torch.int64)

    @property
    def num_gathered_blocks(self) -> int:
        return self.item.gather.shape[0] // self._num_kv_heads

    def fill(self, blocks: np.ndarray, spans: np.ndarray) -> None:
        """Let each row see the keys of its span.

        Args:
            blocks: int [num_seqs, most blocks], filled up with any block of the pool.
            spans: int [num_seqs, 2], the first key and the end, counted from the first of the row's blocks here.
        """
        item, heads = self.item, np.arange(self._num_kv_heads)[:, None]
        # [num_seqs, num_kv_heads, most]: heads outside blocks, so that a head's keys are one run in what is gathered.
        item.gather = self._upload((blocks[:, None].astype(np.int64) * self._num_kv_heads + heads).reshape(-1))
        if (spans == spans[0]).all():
            item.first_key, item.end_key = spans[0].tolist()
            item.mask = item.dead = None
            return
        num_keys = blocks.shape[1] * self._block_size
        item.first_key, item.end_key = 0, num_keys
        # [num_seqs, num_keys]: in how many steps a key is seen; below 0 it was seen already.
        steps = np.arange(num_keys) - spans[:, 1:]
        unseen = (steps >= 0) | (np.arange(num_keys) < spans[:, :1])
        mask = torch.zeros(unseen.shape, dtype=item.dtype).masked_fill_(torch.from_numpy(unseen), float("-inf"))
        item.mask = mask[:, None, None].to(self._device)
        self._next = self._upload(np.arange(len(spans)) * num_keys + spans[:, 1])
        # What is seen next stands last, so that the next step only takes off the end.
        rows, keys = unseen.nonzero()
        order = np.argsort(-steps[rows, keys], kind="stable")
        rows, keys = rows[order], keys[order]
        item.dead = self._upload(((rows[:, None] * self._num_kv_heads + heads.T) * num_keys + keys[:, None]).reshape(-1))

    def lengthen(self) -> None:
        """Let each row see one key more, of a block that it sees others of."""
        item = self.item
        if item.mask is None:
            item.end_key += 1
            return
        assert item.dead is not None
        item.mask.view(-1).index_fill_(0, self._next, 0.0)
        self._next += 1
        item.dead = item.dead.narrow(0, 0, item.dead.shape[0] - item.num_rows * self._num_kv_heads)

    def begin_blocks(self, table: np.ndarray, lens: np.ndarray) -> None:
        """Let each row see one key more, some of them the first one of a block.

        Args:
            table: int [sequences, columns], their blocks. lens: int [sequences], their tokens.
        """
        newest = lens[self.seqs] - 1
        columns, rows = newest // self._block_size, np.flatnonzero(newest % self._block_size == 0)
        places, num_columns = columns[rows] - self._first_blocks[rows], self.num_gathered_blocks // len(self.seqs)
        if self.item.mask is None or places.max() >= num_columns:
            self._refill(table, lens[self.seqs])
            return
        # A row that is shorter than others gathers some block in place of those that it has not: the new one takes its place.
        heads = np.arange(self._num_kv_heads)
        where = (rows[:, None] * self._num_kv_heads + heads) * num_columns + places[:, None]
        what = table[self.seqs[rows], columns[rows]].astype(np.int64)[:, None] * self._num_kv_heads + heads
        self.item.gather.index_copy_(0, self._upload(where.reshape(-1)), self._upload(what.reshape(-1)))
        self.lengthen()

    def _refill(self, table: np.ndarray, lens: np.ndarray) -> None:
        first = self._first_blocks[:, None]
        num_blocks = -(-lens // self._block_size)[:, None]
        columns = first + np.arange(int((num_blocks - first).max()))
        blocks = table[self.seqs[:, None], np.where(columns < num_blocks, columns, first)]
        ends = lens - self._first_blocks * self._block_size
        self.fill(blocks, np.stack([np.zeros_like(ends), ends], 1))

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class GrowingRows:
    """All such items of a decode step without a window.

    Args:
        rows: the items. num_seqs: sequences of the step. block_size: tokens per block.
        most_blocks: an item of several sequences gathers no more blocks than so many.
    """

    def __init__(self, rows: Sequence[SingleRows], num_seqs: int, block_size: int, most_blocks: int):
        self._rows, self._block_size, self._most_blocks = list(rows), block_size, most_blocks
        self._places = np.zeros(num_seqs, dtype=np.int64)
        for place, single in enumerate(self._rows):
            self._places[single.seqs] = place

    def grow(self, table: np.ndarray, lens: np.ndarray) -> bool:
        """Each sequence is one token longer; table and lens as in `SingleRows.begin_blocks`. False: the items are too large to be kept."""
        begun = set(self._places[(lens - 1) % self._block_size == 0].tolist())
        for place, single in enumerate(self._rows):
            if place not in begun:
                single.lengthen()
                continue
            single.begin_blocks(table, lens)
            if len(single.seqs) > 1 and single.num_gathered_blocks > self._most_blocks:
                return False
        return True
