"""`PagedCache`: transformers' cache interface over rows in a pool, for a caller's own loop and as what generate() returns."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PretrainedConfig

from radixkv.integration.graphs import DecodeGraphs
from radixkv.integration.hf_cache import BaseCache
from radixkv.integration.versions import columns_after_crop
from radixkv.sequence import TOKEN_BYTES, Batch, CallOptions
from radixkv.sequence import Sequence as Row
from radixkv.step import Step
from radixkv.tree import Lease

if TYPE_CHECKING:
    from radixkv.integration.handle import ModelCache


class PagedCache(BaseCache):
    """The rows of one batch, whose K/V lives in the pool of a patched model; `model.radixkv.new_cache()` makes one.

    Pass it to the model as one would a `DynamicCache`, `model(input_ids, past_key_values=cache)` (`cache=cache` from transformers 5.23 on),
    with new tokens only, as often as wanted. The first call looks its rows up in the prefix cache. Logits cannot be had of tokens that are
    not computed: with `logits_to_keep=1` all but the last token may come from the cache, without it none. No gradients flow.

    `generate()` of a patched model returns one, and takes one: what it stands for is then not computed again. So do `copy.deepcopy` (rows
    in the same blocks, copied only where one of the two goes on writing), `crop`, `reorder_cache` and the other members of a dynamic cache.

    While rows are open they hold their blocks. `store()`, `insert(output)`, `close()` and dropping the cache let them go; the tokens
    are still known then, and a later call computes anew what is not cached any more.

    Args:
        prefix_cache: the handle of the model. options: where the rows are looked up and stored.

    Attributes:
        prefix_cache, options: as given. batch: the rows; None before the first call. num_columns: padded columns so far.
        configs, graphs: of the model, found out by the first call: the configurations that its layers read, and what its decode steps are
            captured in, None if they run as they are.
    """

    def __init__(self, prefix_cache: ModelCache, options: CallOptions):
        super().__init__(prefix_cache.shape.num_layers)
        self.prefix_cache, self.options = prefix_cache, options
        self.batch: Batch | None = None
        self.num_columns = 0
        self.configs: list[PretrainedConfig] = []
        self.graphs: DecodeGraphs | None = None
        # bool [rows, capacity]: which columns hold tokens, not pads.
        self._real = np.zeros((0, 0), dtype=bool)
        self._finalizer: weakref.finalize | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    @property
    def num_rows(self) -> int:
        return 0 if self.batch is None else len(self.batch.sequences)

    @property
    def batch_size(self) -> int:
        return self.num_rows or -1

    max_batch_size = batch_size

    @property
    def real_columns(self) -> np.ndarray:
        """bool [rows, num_columns]: which columns hold tokens, not pads."""
        return self._real[:, : self.num_columns]

    @property
    def is_open(self) -> bool:
        """Whether the rows hold blocks."""
        return self.batch is not None and not self.batch.closed

    @property
    def row_lens(self) -> list[int]:
        """Tokens of each row."""
        return [] if self.batch is None else [row.num_stored for row in self.batch.sequences]

    def row_keys(self) -> list[bytes]:
        """The tokens of each row, int32 little-endian."""
        rows = () if self.batch is None else self.batch.sequences
        return [bytes(row.key[: row.num_stored * TOKEN_BYTES]) for row in rows]

    # What a caller of the model does with it ------------------------------------------------------------------------------------------

    def store(self, priority: int | None = None) -> None:
        """Put the rows into the prefix cache, for later prompts; see `ModelCache.insert`. Nothing happens if they are not open."""
        if self.batch is not None:
            self.prefix_cache.store(self.batch, priority)

    def close(self) -> None:
        """Let go of the rows' blocks without storing them. Nothing happens if they are not open."""
        if self.batch is not None:
            self.prefix_cache.discard(self.batch)

    def crop(self, max_length: int) -> None:
        """Take columns off the end, as the installed transformers' `DynamicCache.crop` counts them."""
        kept = columns_after_crop(operator.index(max_length), self.num_columns)
        if self.batch is not None and kept < self.num_columns:
            self.truncate_rows(self._real[:, :kept].sum(1).tolist())
        self.num_columns = kept

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row beam_idx[i] was; rows named more than once share their blocks.

        Raises:
            ValueError: beam_idx is not a run of row numbers (negative ones count from the end) or a mask of the rows, at least one.
        """
        self.select_rows(self._row_numbers(beam_idx))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows; ValueError for fewer than one."""
        if type(repeats) is not int or repeats < 1:
            raise ValueError(f"batch_repeat_interleave: repeats must be an int of at least 1, got {repeats!r}")
        self.select_rows([row for row in range(self.num_rows) for _ in range(repeats)])

    def reset(self) -> None:
        """Forget the rows, as if new."""
        self.close()
        self._release_finalizer()
        self.batch, self.num_columns = None, 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "a PagedCache was used by a model that is not, or not any more, the patched one it belongs to: pass it to the model of its "
            "handle, and a DynamicCache to others"
        )

    def __deepcopy__(self, memo: dict) -> PagedCache:
        copied = PagedCache(self.prefix_cache, self.options)
        memo[id(self)] = copied
        copied.configs, copied.graphs = self.configs, self.graphs
        copied.num_columns, copied._real = self.num_columns, self._real.copy()
        if self.batch is not None:
            copied.take(self.prefix_cache.fork(self.batch) if self.is_open else _closed(self.batch, range(self.num_rows)))
        return copied

    def __copy__(self) -> PagedCache:
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a PagedCache cannot be pickled: its K/V lives in the pool; save the prefix cache with model.radixkv.save(path)")

    # What a packed forward does with it -----------------------------------------------------------------------------------------------

    def take(self, batch: Batch) -> None:
        """Become the owner of a batch; when this cache dies, so does the batch."""
        self._release_finalizer()
        self.batch = batch
        if not batch.closed:
            self._finalizer = weakref.finalize(self, self.prefix_cache.returned.append, batch)

    def refresh(self) -> None:
        """Let go of rows that were computed with other weights or adapters than the model has now: what comes next computes them anew."""
        if self.batch is None or not self.is_open:
            return
        namespace = self.prefix_cache.full_namespace(self.options.namespace)
        if self.prefix_cache.is_stale(self.batch) or self.batch.namespace != namespace:
            self.close()

    def add_columns(self, real: np.ndarray) -> None:
        """Note further columns, bool [rows, n]: which of them hold tokens."""
        num_rows, num_new = real.shape
        end = self.num_columns + num_new
        if len(self._real) != num_rows or end > self._real.shape[1]:
            grown = np.zeros((num_rows, max(64, 2 * end)), dtype=bool)
            if self.num_columns:
                grown[:, : self.num_columns] = self.real_columns
            self._real = grown
        self._real[:, self.num_columns : end] = real
        self.num_columns = end

    def set_columns(self, real: np.ndarray) -> None:
        """Note what all columns are, bool [rows, columns]."""
        self.num_columns = 0
        self._real = np.zeros((0, 0), dtype=bool)
        self.add_columns(real)

    def truncate_rows(self, num_tokens: Sequence[int]) -> None:
        """Take what lies past so many tokens off each row; their columns become pads."""
        assert self.batch is not None
        if self.is_open:
            self.prefix_cache.truncate(self.batch, num_tokens)
        else:
            for row, length in zip(self.batch.sequences, num_tokens, strict=True):
                del row.key[length * TOKEN_BYTES :]
                row.num_stored = min(row.num_stored, length)
        self._real[:, : self.num_columns] &= self.real_columns.cumsum(1) <= np.array(num_tokens)[:, None]

    def select_rows(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was."""
        if self.batch is None:
            return
        if self.is_open:
            self.prefix_cache.rearrange(self.batch, order)
        else:
            self.take(_closed(self.batch, order))
        self._real = self._real[order]

    @contextmanager
    def prompt_step(
        self, keys: list[bytes], num_logits: list[int], lease: Lease | None, *, is_prompt: bool
    ) -> Iterator[tuple[list[int], Step]]:
        """A step that computes several tokens more of each row.

        Args:
            keys: of each row its new tokens, int32 little-endian; of some rows none.
            num_logits: of how many of them, the last ones, logits are wanted.
            lease: the prefix chosen by hand for all rows, None to search.
            is_prompt: whether the statistics count them as tokens of prompts.

        Yields:
            The rows that the step has, and the step.
        """
        if self.batch is not None and self.is_open:
            rows = [row for row, key in enumerate(keys) if key]
            counts = [num_logits[row] for row in rows]
            with self.prefix_cache.extend_step(self.batch, rows, [keys[row] for row in rows], counts, is_prompt=is_prompt) as step:
                yield rows, step
            return
        # The tokens of rows that are not open any more come before the new ones.
        before, known = self.batch, self.row_keys() or [b""] * len(keys)
        batch = self.prefix_cache.admit(
            [old + new for old, new in zip(known, keys, strict=True)], num_logits, lease, options=self.options
        )
        self.take(batch)
        try:
            with self.prefix_cache.prompt_step(batch) as step:
                yield list(range(len(keys))), step
        except BaseException:
            self.prefix_cache.discard(batch)
            self._release_finalizer()
            self.batch = before
            raise

    def _row_numbers(self, indices: Any) -> list[int]:
        chosen = torch.as_tensor(indices)
        if chosen.dtype == torch.bool and chosen.shape == (self.num_rows,):
            chosen = chosen.nonzero()[:, 0]
        numbers = chosen.tolist() if chosen.ndim == 1 and chosen.dtype in (torch.int32, torch.int64) else []
        if self.batch is not None and not (numbers and all(-self.num_rows <= row < self.num_rows for row in numbers)):
            raise ValueError(f"rows must be numbers below {self.num_rows}, int64 [n], or a mask of the rows, at least one; got {indices!r}")
        return [row % self.num_rows for row in numbers] if self.num_rows else []

    def _release_finalizer(self) -> None:
        if self._finalizer is not None:
            # Called, it hands an open batch back; closed ones are left alone.
            self._finalizer()
            self._finalizer = None


class GenerationCache(BaseCache):
    """What generate() is shown in place of its rows. It claims to be empty at first, so that generate() sends the whole prompt.

    Args:
        rows: of the call; with tokens in it if the caller passed it in.
        skips_finished: whether rows that have finished may be left out.
        is_draft_checked: whether later forwards hold candidates that may be rejected (assisted decoding).
        mask_width: columns of the whole sequence, as generate() was told of them.
        is_chunked: whether the prompt comes in several forwards, in columns from the first on.

    Attributes:
        begun: whether there was a forward. resumes: whether the rows had tokens before. finished: the rows that generate()'s stopping
            criteria have ended, bool [rows]; None when all are still computed. skipped: int [rows, columns], chunks of a sequence that the
            rows held already; None before the first.
    """

    def __init__(
        self, rows: PagedCache, *, skips_finished: bool, is_draft_checked: bool, mask_width: int | None, is_chunked: bool
    ):
        super().__init__(rows.num_layers)
        self.rows, self.skips_finished, self.is_draft_checked, self.mask_width = rows, skips_finished, is_draft_checked, mask_width
        self.resumes = rows.batch is not None
        self.begun = False
        self.is_chunked = is_chunked
        self.finished: torch.Tensor | None = None
        self.skipped: np.ndarray | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self.begun:
            return self.rows.num_columns
        return 0 if self.skipped is None else self.skipped.shape[1]

    def crop(self, max_length: int) -> None:
        self.rows.crop(max_length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.rows.reorder_cache(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows.batch_repeat_interleave(repeats)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this cache belongs to the generate() call that made it and cannot be passed to a forward or another generate()")

    def __deepcopy__(self, memo: dict) -> GenerationCache:
        raise RuntimeError("this cache belongs to a generate() call that is running; copy the one that the call returns")


def _closed(batch: Batch, order: Sequence[int]) -> Batch:
    """A closed batch with the tokens of another one's rows, in some order."""
    rows = [Row(bytearray(batch.sequences[row].key), num_stored=batch.sequences[row].num_stored) for row in order]
    return Batch(rows, batch.namespace, batch.options, batch.counted, closed=True)
