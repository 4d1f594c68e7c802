"""The columns of one call, checked against what the rows hold: which hold tokens, and which of those are new."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixkv.integration.paged_cache import PagedCache
from radixkv.sequence import TOKEN_BYTES
from radixkv.token_key import token_key


@dataclass(frozen=True)
class Columns:
    """What one call adds to the rows.

    Attributes:
        keys: the new tokens of each row, int32 little-endian; of some rows none.
        real: bool [rows, columns], which of the columns sent hold tokens.
        keep: of how many last columns logits are wanted.
        is_whole: whether they are all columns from the first on, in place of those that the rows had.
    """

    keys: list[bytes]
    real: np.ndarray
    keep: int
    is_whole: bool = False

    @property
    def kept(self) -> np.ndarray:
        """bool [rows, keep]: of which kept columns logits mean something."""
        return self.real[:, -self.keep :]


def appended(rows: PagedCache, ids: np.ndarray, mask: torch.Tensor | None, keep: int, width: int | None) -> Columns:
    """The columns of a call that sends what comes after the rows' columns.

    Args:
        rows: what is known so far. ids: int [rows, columns]. mask: bool or int [rows, all columns], None for tokens throughout.
        keep: of how many last columns logits are wanted. width: columns of the whole prompt, of which these may be a part; None if unknown.

    Raises:
        ValueError: they do not fit the rows.
    """
    num_rows, num_new = ids.shape
    if rows.batch is not None and rows.num_rows != num_rows:
        raise ValueError(f"input_ids: the cache holds {rows.num_rows} rows, got {num_rows}")
    real = _real_columns(mask, ids.shape, rows.num_columns + num_new)
    keys = [token_key(row[row_real]) for row, row_real in zip(ids, real, strict=True)]
    known = rows.row_lens or [0] * num_rows
    empty = [row for row in range(num_rows) if not keys[row] and not known[row]]
    if empty and (width is None or rows.num_columns + num_new >= width):
        raise ValueError(f"input_ids: row {empty[0]} holds no token, its attention_mask is all zeros")
    return Columns(keys, real, keep)


def resumed(
    rows: PagedCache, ids: np.ndarray, mask: torch.Tensor | None, keep: int, width: int | None, *, is_chunked: bool
) -> Columns:
    """The columns of the first forward of a generate() that was given a cache: the whole sequences, or what comes after the cache.

    Args:
        rows, ids, mask, keep, width: as for `appended`; the rows are cut, and multiplied, as the call wants them.
        is_chunked: whether these are the first columns of the whole sequences, in which some rows may have nothing but pads.

    Raises:
        ValueError: a row does not begin with what the cache holds of it.
    """
    num_rows, num_columns = ids.shape
    copies = _num_copies(rows, num_rows)
    if width is not None and width > num_columns and not is_chunked:
        if width != rows.num_columns + num_columns:
            raise ValueError(
                f"attention_mask has {width} columns, but the cache holds {rows.num_columns} and input_ids {num_columns}: pass the whole "
                "sequence, or new tokens only with a mask of the whole"
            )
        _multiply_rows(rows, copies)
        return appended(rows, ids, mask, keep, width)
    may_be_empty = is_chunked and width is not None and num_columns < width
    real = _real_columns(mask, ids.shape, num_columns)
    kept = real[:, -keep:].sum(1)
    keys, lengths = [], []
    for row, (row_ids, row_real, known) in enumerate(zip(ids, real, _repeated(rows.row_keys(), copies), strict=True)):
        key = token_key(row_ids[row_real])
        if not key.startswith(known[: len(key)]) or not (key or may_be_empty):
            raise ValueError(
                f"input_ids: row {row} does not begin with the {len(known) // TOKEN_BYTES} tokens that the cache holds: pass the whole "
                "sequence that the cache was made of and what follows it, or no cache"
            )
        # Logits come of computing: of what is cached, too, if they are asked for.
        length = max(0, min(len(known) // TOKEN_BYTES, len(key) // TOKEN_BYTES - max(1, int(kept[row]))))
        lengths.append(length)
        keys.append(bytes(key[length * TOKEN_BYTES :]))
    _multiply_rows(rows, copies)
    rows.truncate_rows(lengths)
    return Columns(keys, real, keep, is_whole=True)


def holds(rows: PagedCache, ids: np.ndarray, mask: torch.Tensor | None) -> bool:
    """Whether the rows begin with all tokens of the first columns of a sequence."""
    real = _real_columns(mask, ids.shape, ids.shape[1])
    held = zip(ids, real, _repeated(rows.row_keys(), _num_copies(rows, len(ids))), strict=True)
    return all(known.startswith(token_key(row_ids[row_real])) for row_ids, row_real, known in held)


def check_history(rows: PagedCache, mask: torch.Tensor | None) -> None:
    """Raise ValueError unless the mask says of the columns before what was said of them then."""
    if rows.batch is None or mask is None:
        return
    before = mask[:, : rows.num_columns].cpu().numpy() != 0
    if (before != rows.real_columns).any():
        raise ValueError(f"attention_mask must repeat what it said of the first {rows.num_columns} columns, which are cached as they were")


def check_positions(rows: PagedCache, positions: torch.Tensor | None, columns: Columns) -> None:
    """Raise ValueError unless given positions are those that a row's tokens have by their order; an offset does not matter to attention."""
    if positions is None:
        return
    given = np.broadcast_to(positions.cpu().numpy(), columns.real.shape)
    for row, real in enumerate(columns.real):
        if (np.diff(given[row][real]) != 1).any():
            raise ValueError("position_ids must count a row's tokens one by one with a PagedCache: leave them out, they are known")


def _num_copies(rows: PagedCache, num_rows: int) -> int:
    """How many sequences of each row generate() computes."""
    if num_rows % rows.num_rows:
        raise ValueError(f"input_ids: the cache holds {rows.num_rows} rows, generate() computes {num_rows}")
    return num_rows // rows.num_rows


def _repeated(keys: list[bytes], copies: int) -> list[bytes]:
    return [key for key in keys for _ in range(copies)]


def _multiply_rows(rows: PagedCache, copies: int) -> None:
    """Not before all else is known to be right: the caller's cache has the further rows from then on."""
    if copies > 1:
        rows.batch_repeat_interleave(copies)


def _real_columns(mask: torch.Tensor | None, shape: tuple[int, ...], num_columns: int) -> np.ndarray:
    """bool [rows, columns of this call]: which hold tokens."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    if mask.shape[1] != num_columns:
        raise ValueError(f"attention_mask must be [{shape[0]}, {num_columns}], a column for every column so far, got {list(mask.shape)}")
    return np.broadcast_to(mask[:, num_columns - shape[1] :].cpu().numpy() != 0, shape)
