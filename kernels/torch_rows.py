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


# numpy has no bfloat16, and 0.0 is 0 in every type.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class SingleRows:
    """One item of several sequences with one new token each, and, on a CPU, what it takes to make it longer.

    Its tensors are written on through numpy, which takes a third of the time.

    Args:
        item: its rows are one per sequence; everything else is filled in here.
        seqs: which sequences. first_blocks: int [num_seqs], how many leading blocks of each other items cover, or no query sees.
        num_kv_heads, block_size: of the pool. device: where the item's tensors are.
    """

    def __init__(
        self, item: Item, seqs: Sequence[int], first_blocks: np.ndarray, num_kv_heads: int, block_size: int, device: torch.device
    ):
        self.item, self.seqs, self._first_blocks = item, list(seqs), first_blocks.tolist()
        self._block_size, self._device = block_size, device
        self._heads = np.arange(num_kv_heads)
        # int64 [num_seqs, num_kv_heads, blocks]: what is gathered. Heads are outside blocks, so that a head's keys are one run there.
        self._gather = np.zeros((len(self.seqs), num_kv_heads, 0), dtype=np.int64)
        # The mask, flat, and where in it each row's next key stands.
        self._mask = self._next = np.zeros(0, dtype=np.int64)

    @property
    def num_gathered_blocks(self) -> int:
        return len(self.seqs) * self._gather.shape[2]

    def fill(self, blocks: np.ndarray, spans: np.ndarray) -> None:
        """Let each row see the keys of its span.

        Args:
            blocks: int [num_seqs, most blocks], filled up with any block of the pool.
            spans: int [num_seqs, 2], the first key and the end, counted from the first of the row's blocks here.
        """
        item, num_heads = self.item, len(self._heads)
        self._set_gather(blocks[:, None].astype(np.int64) * num_heads + self._heads[:, None])
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
        self._mask = mask.view(-1).view(_INTEGERS[item.dtype.itemsize]).numpy()
        self._next = np.arange(len(spans)) * num_keys + spans[:, 1]
        # What is seen next stands last, so that the next step only takes off the end.
        rows, keys = unseen.nonzero()
        order = np.argsort(-steps[rows, keys], kind="stable")
        rows, keys = rows[order], keys[order]
        item.dead = self._upload(((rows[:, None] * num_heads + self._heads) * num_keys + keys[:, None]).reshape(-1))

    def lengthen(self) -> None:
        """Let each row see one key more, of a block that it sees others of."""
        item = self.item
        if item.mask is None:
            item.end_key += 1
            return
        assert item.dead is not None
        self._mask[self._next] = 0
        self._next += 1
        item.dead = item.dead[: -item.num_rows * len(self._heads)]

    def begin_blocks(self, rows: Sequence[int], table: np.ndarray, lens: np.ndarray) -> None:
        """Let each row see one key more, which for some is the first one of a block.

        Args:
            rows: which, by their place among the item's sequences.
            table: int [sequences, columns], the blocks of all sequences. lens: int [sequences], their tokens.
        """
        num_seqs, num_heads, num_columns = self._gather.shape
        columns = [(int(lens[self.seqs[row]]) - 1) // self._block_size for row in rows]
        places = [column - self._first_blocks[row] for row, column in zip(rows, columns, strict=True)]
        if max(places) == num_columns:
            if self.item.mask is not None:
                self._refill(table, lens[self.seqs])
                return
            # Without a mask all end at the same key, so all begin a block.
            lines = np.empty((num_seqs, num_heads, num_columns + 1), dtype=np.int64)
            lines[:, :, :-1] = self._gather
            self._set_gather(lines)
        # A row that is shorter than others gathers some block in place of those that it has not: the new one takes its place.
        for row, column, place in zip(rows, columns, places, strict=True):
            self._gather[row, :, place] = int(table[self.seqs[row], column]) * num_heads + self._heads
        self.lengthen()

    def _refill(self, table: np.ndarray, lens: np.ndarray) -> None:
        first = np.array(self._first_blocks)[:, None]
        num_blocks = -(-lens // self._block_size)[:, None]
        columns = first + np.arange(int((num_blocks - first).max()))
        blocks = table[np.array(self.seqs)[:, None], np.where(columns < num_blocks, columns, first)]
        ends = lens - first[:, 0] * self._block_size
        self.fill(blocks, np.stack([np.zeros_like(ends), ends], 1))

    def _set_gather(self, lines: np.ndarray) -> None:
        self._gather = lines
        self.item.gather = self._upload(lines.reshape(-1))

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class GrowingRows:
    """All such items of a decode step without a window, on a CPU.

    Args:
        rows: the items; each sequence is in one. most_blocks: an item of several sequences gathers no more blocks than so many.
    """

    def __init__(self, rows: Sequence[SingleRows], most_blocks: int):
        self._rows, self._most_blocks = list(rows), most_blocks
        # Of each sequence its item, and its row there.
        self._places = {seq: (item, row) for item, single in enumerate(self._rows) for row, seq in enumerate(single.seqs)}

    def grow(self, begun: Sequence[int], table: np.ndarray, lens: np.ndarray) -> bool:
        """Each sequence is one token longer.

        Args:
            begun: the sequences whose token is the first one of a block. table, lens: as in `SingleRows.begin_blocks`.

        Returns:
            Whether the items can be kept: not if one has become too large.
        """
        begun_in: dict[int, list[int]] = {}
        for seq in begun:
            item, row = self._places[seq]
            begun_in.setdefault(item, []).append(row)
        for item, single in enumerate(self._rows):
            if item not in begun_in:
                single.lengthen()
                continue
            single.begin_blocks(begun_in[item], table, lens)
            if len(single.seqs) > 1 and single.num_gathered_blocks > self._most_blocks:
                return False
        return True
