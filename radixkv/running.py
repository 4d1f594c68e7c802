"""`RunningRows`: batches whose rows are cut, copied and put in another order between their steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress

from radixkv.errors import OutOfBlocks
from radixkv.rows import fork_row, hold_published, join_rows, let_go, make_writable, take_rows, truncate_row
from radixkv.sequence import Batch, Sequence
from radixkv.storage import CacheStorage


class RunningRows(CacheStorage):
    """What may happen to the rows of an open batch besides its steps. No K/V is copied by any of it."""

    def truncate(self, batch: Batch, num_tokens: Seq[int]) -> None:
        """Take what lies past so many tokens off each row of a batch that is open; a row that is shorter stays as it is."""
        with self.lock:
            require_open(batch)
            batch.may_share, batch.step_rows, batch.carried = True, (), {}
            for sequence, length in zip(batch.sequences, num_tokens, strict=True):
                truncate_row(self, sequence, length)

    def rearrange(self, batch: Batch, order: Seq[int]) -> None:
        """Let row i of an open batch become what row order[i] was. Rows that are named several times share their blocks from then on."""
        with self.lock:
            require_open(batch)
            old = batch.sequences
            if list(order) == list(range(len(old))):
                return
            rows: dict[int, Sequence] = {}
            new: list[Sequence] = []
            try:
                for row in order:
                    new.append(fork_row(self, old[row]) if row in rows else rows.setdefault(row, old[row]))
            except BaseException:
                let_go(self, [sequence for sequence in new if all(sequence is not other for other in old)])
                raise
            batch.sequences, batch.may_share = new, True
            batch.step_rows, batch.carried = (), {}
            let_go(self, [sequence for row, sequence in enumerate(old) if row not in rows])

    def fork(self, batch: Batch) -> Batch:
        """A second batch with the rows of an open one, in the same blocks; both go their own ways from here."""
        with self.lock:
            self._collect()
            require_open(batch)
            forked = Batch([], batch.namespace, batch.options, batch.counted)
            self._live.add(forked)
            try:
                for sequence in batch.sequences:
                    forked.sequences.append(fork_row(self, sequence))
            except BaseException:
                self._discard(forked)
                raise
            batch.may_share = forked.may_share = True
            return forked

    def join(self, batch: Batch, other: Batch) -> None:
        """Let the rows of another open batch become further rows of this one, after its own; the other one is closed then.

        Raises:
            ValueError: they differ in namespace or options, or the other one was admitted with a lease.
        """
        with self.lock:
            require_open(batch)
            require_open(other)
            join_rows(batch, other)
            self._discard(other)

    def part(self, batch: Batch, rows: Seq[int]) -> Batch:
        """Take rows out of an open batch; they become a batch of their own, to be stored or discarded."""
        with self.lock:
            require_open(batch)
            parted = take_rows(batch, rows)
            self._live.add(parted)
            return parted

    def publish(self, batch: Batch, row: int) -> None:
        """Put what a running row has stored into the tree, where other prompts find it; the row goes on.

        Nothing happens to a row whose batch is not to be stored, or whose weights have changed since.
        """
        with self.lock:
            self._collect()
            require_open(batch)
            sequence = batch.sequences[row]
            if not sequence.num_stored or not batch.options.store or self.is_stale(batch):
                return
            self._insert(batch, sequence, None)
            with suppress(OutOfBlocks):
                hold_published(self, batch, sequence)

    def is_stale(self, batch: Batch) -> bool:
        """Whether a batch was computed with weights that have changed since."""
        return batch.is_mixed or not self.is_current(batch.namespace)

    def _make_room(self, batch: Batch, sequences: list[Sequence]) -> None:
        """Give rows that are one token longer the block for it, if it takes one."""
        if batch.may_share:
            if make_writable(self, sequences):
                batch.carried = {}
            return
        size = self.pool.block_size
        full = [sequence for sequence in sequences if sequence.num_stored == len(sequence.blocks) * size]
        if full:
            for sequence, block in zip(full, self.allocate(len(full)), strict=True):
                sequence.blocks.append(block)


def require_open(batch: Batch) -> None:
    """Raise RuntimeError if the batch was stored or dropped."""
    if batch.closed:
        raise RuntimeError("this batch was already stored or dropped: start a new generate()")
