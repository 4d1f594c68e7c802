"""The running rows of `generate_many`, and what happens to them from step to step.

A prompt waits (radixkv/schedule.py), is admitted with as many others as there is room for, and computed together with them in one prompt
step; then it is a row among the running ones, which get a token each in every decode step. A row that finishes is stored at once. A row for
whose next token there is no block is stored too, and waits again, with the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv.errors import OutOfBlocks
from radixkv.integration.answers import FinishReason, Request
from radixkv.integration.interrupts import Interrupts
from radixkv.integration.packed_model import PackedModel
from radixkv.integration.sampling import Sampler, Stopping
from radixkv.plan import Plan
from radixkv.schedule import Waiting
from radixkv.sequence import TOKEN_BYTES, Batch, CallOptions
from radixkv.step import Step
from radixkv.token_key import common_bytes

if TYPE_CHECKING:
    from radixkv.integration.handle import ModelCache

# What generate() sends beside the tokens, so that its captured steps serve here too.
MODEL_INPUTS = {"use_cache": True, "return_dict": True}

# Seconds until a call without rows, for which there was no room beside other threads' rows, looks again at what is free and for Ctrl-C.
LONGEST_WAIT = 0.05
# Seconds in which the others compute nothing until it takes them for stuck: one of them may wait for this very call.
LONGEST_STANDSTILL = 30.0

# Told of requests that are done, why each is, and, of those that failed, what was wrong.
Report = Callable[[Sequence[Request], Sequence[FinishReason], str | None], None]


class Engine:
    """The running rows, and what happens to them from step to step.

    Args:
        model, cache, options: what computes, and where.
        max_batch_tokens: tokens of a forward at most. most_new: tokens of an answer at most.
        requests: by their place. waiting: those that are not running, all of them at first.
        sampler, stopping: of the call. report: told of those that are done.
    """

    def __init__(
        self,
        model: PackedModel,
        cache: ModelCache,
        options: CallOptions,
        max_batch_tokens: int,
        most_new: int,
        requests: Sequence[Request],
        waiting: Waiting,
        sampler: Sampler,
        stopping: Stopping,
        report: Report,
    ):
        self._model, self._cache, self._options = model, cache, options
        self._max_batch_tokens, self._most_new = max_batch_tokens, most_new
        self._requests, self._waiting = requests, waiting
        self._sampler, self._stopping, self._report = sampler, stopping, report
        self._batch: Batch | None = None
        # Of each row of the batch its request, and its last token, which is not computed yet.
        self._rows: list[Request] = []
        self._pending: list[int] = []
        self._most_admitted = len(requests)
        # Tokens that were computed here; and how many others had computed when that was last seen to grow, and when.
        self._num_computed = 0
        self._last_progress = (-1, monotonic())

    def run(self, interrupts: Interrupts) -> None:
        """Compute everything; whatever way out is taken, what was computed is stored and nothing is held."""
        has_room = True
        try:
            while self._waiting or self._rows:
                interrupts.check()
                has_room |= self._put_back_stale()
                while has_room and self._waiting:
                    has_room = self._admit()
                    interrupts.check()
                if self._rows:
                    has_room = self._decode()
        finally:
            try:
                if self._batch is not None:
                    self._cache.store(self._batch)
            finally:
                self._cache.occupants.leave(self)

    # Prompts --------------------------------------------------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Compute as many waiting prompts as fit, in one step. False: there is no room before some row finishes."""
        chosen = self._choose()
        if not chosen:
            return False
        occupants = self._cache.occupants
        since = occupants.num_departures
        occupants.enter(self)
        try:
            batch, logits = self._compute_prompts(chosen)
        except OutOfBlocks as error:
            # Other threads took what was free a moment ago, or more is pinned than it seemed.
            for request in reversed(chosen):
                self._waiting.put_back(request.place, bytes(request.key))
            self._most_admitted = max(1, len(chosen) // 2)
            if self._rows:
                return False
            occupants.withdraw(self)
            if len(chosen) == 1 and not self._wait(since):
                self._waiting.take()
                self._report(chosen, ["error"], str(error))
            return True
        self._most_admitted = len(self._requests)
        self._put_back_stale()
        occupants.enter(self)
        first = len(self._rows)
        if self._batch is None:
            self._batch = batch
        else:
            self._cache.join(self._batch, batch)
        for request in chosen:
            self._sampler.open(request.index, np.frombuffer(bytes(request.key), dtype="<i4"))
        self._rows += chosen
        self._pending += [0] * len(chosen)
        self._add_tokens(first, self._sampler.next_tokens([request.index for request in chosen], logits))
        return True

    def _choose(self) -> list[Request]:
        """Take from the waiting those that go into the next prompt step."""
        cache, size = self._cache, self._cache.pool.block_size
        free = cache.num_allocatable - sum(map(self._growth, self._rows))
        budget = self._max_batch_tokens
        chosen: list[Request] = []
        while self._waiting and len(chosen) < self._most_admitted and len(self._rows) + len(chosen) < self._max_batch_tokens:
            request = self._requests[self._waiting.next()]
            key, last = bytes(request.key), request.num_tokens - 1  # the last token is computed in any case
            cached, held = cache.known_prefix(key[: last * TOKEN_BYTES], self._options.namespace)
            row, of_row = self._closest_row(key, cached)
            of_mate = _common(chosen[-1].key, key) if chosen else 0
            num_new = request.num_tokens - min(last, max(cached, of_row, of_mate))
            if chosen and num_new > budget:
                break
            num_blocks = -(-request.num_tokens // size) - min(last, max(held, of_row, of_mate)) // size + self._growth(request)
            if num_blocks > free and (self._rows or chosen):
                break
            if row is not None:
                assert self._batch is not None
                cache.publish(self._batch, row)
                free -= 1  # the row's own copy of its last block
            self._waiting.take()
            chosen.append(request)
            free, budget = free - num_blocks, budget - num_new
            if budget <= 0:
                break
        return chosen

    def _closest_row(self, key: bytes, cached: int) -> tuple[int | None, int]:
        """The running row that shares most with a prompt, and how much, if that is more than is cached."""
        best, most = None, cached
        for row, request in enumerate(self._rows):
            beginning = key[: (most + 1) * TOKEN_BYTES]
            if request.num_tokens - 1 > most and request.key.startswith(beginning):
                best, most = row, min(_common(request.key, key), request.num_tokens - 1)
        return (None, 0) if best is None else (best, most)

    def _growth(self, request: Request) -> int:
        """Whether a request's answer will need a further block, of which one is kept free for it."""
        size = self._cache.pool.block_size
        most = request.num_tokens + self._most_new - request.num_new - 1
        return int(-(-most // size) > -(-request.num_tokens // size))

    def _compute_prompts(self, chosen: Sequence[Request]) -> tuple[Batch, torch.Tensor]:
        """Admit and compute; the logits [prompts, vocabulary] are those of each one's last token."""
        cache, keys = self._cache, [bytes(request.key) for request in chosen]
        rest: list[bytes] = []
        if len(keys) == 1:
            # A prompt that is too long for one forward is computed piece by piece.
            begin = cache.known_prefix(keys[0][:-TOKEN_BYTES], self._options.namespace)[0] * TOKEN_BYTES
            piece = self._max_batch_tokens * TOKEN_BYTES
            borders = [*range(begin + piece, len(keys[0]), piece), len(keys[0])]
            rest = [keys[0][start:end] for start, end in zip(borders[:-1], borders[1:], strict=True)]
            keys = [keys[0][: borders[0]]]
        batch = cache.admit(keys, [1] * len(keys), options=self._options)
        try:
            for request, sequence in zip(chosen, batch.sequences, strict=True):
                if request.cached_tokens is None:
                    request.cached_tokens = sequence.hit_len
            self._num_computed += sum(sequence.num_tokens - sequence.hit_len for sequence in batch.sequences)
            with cache.prompt_step(batch) as step:
                logits = self._last_logits(step)
            for key in rest:
                with cache.extend_step(batch, [0], [key], [1], is_prompt=True) as step:
                    assert isinstance(step.plan, Plan)
                    self._num_computed += step.plan.num_tokens
                    logits = self._last_logits(step)
        except BaseException:
            cache.discard(batch)
            raise
        return batch, logits

    def _last_logits(self, step: Step) -> torch.Tensor:
        plan = step.plan
        assert isinstance(plan, Plan), "prompts have a plan of their own"
        ends = np.array([*plan.starts[1:], plan.num_tokens]) - 1
        return self._model.run(step, plan.token_ids[None], ends, MODEL_INPUTS).logits[0]

    # Rows -----------------------------------------------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        """One token more of every row. True: some finished, so that there may be room for others."""
        assert self._batch is not None
        num_rows, occupants = len(self._rows), self._cache.occupants
        since = occupants.num_departures
        # From an array, which takes a third of the time that it takes from a list.
        token_ids = torch.from_numpy(np.array(self._pending)).to(self._cache.pool.device)
        try:
            _, logits = self._model.decode(self._cache, self._batch, list(range(num_rows)), token_ids, MODEL_INPUTS)
        except OutOfBlocks as error:
            has_all = len(self._batch.sequences[0].blocks) == self._cache.pool.num_blocks
            if num_rows == 1 and (has_all or not occupants.may_make_room(self, since) or self._stands_still()):
                self._finish({0: "error"}, str(error))
                return True
            self._put_back(1)
            if not self._rows:
                self._wait(occupants.num_departures)
            return not self._rows
        self._num_computed += num_rows
        self._add_tokens(0, self._sampler.next_tokens([request.index for request in self._rows], logits))
        return len(self._rows) < num_rows

    def _wait(self, since: int) -> bool:
        """Wait for a moment until other threads' rows leave. False: that cannot help, see `Occupants.wait`, or they are stuck."""
        return not self._stands_still() and self._cache.occupants.wait(self, since, LONGEST_WAIT)

    def _stands_still(self) -> bool:
        """Whether nobody else has computed anything on this cache for a long time."""
        computed, now = self._cache.num_computed - self._num_computed, monotonic()
        if computed != self._last_progress[0]:
            self._last_progress = computed, now
        return now - self._last_progress[1] > LONGEST_STANDSTILL

    def _add_tokens(self, first: int, tokens: list[int]) -> None:
        """Give the rows from `first` on their next tokens; those that are at their end leave."""
        rows = self._rows[first:]
        for request, token in zip(rows, tokens, strict=True):
            request.add(token)
        self._pending[first:] = tokens
        reasons = self._stopping.reasons([request.key for request in rows], [request.num_new for request in rows], tokens)
        done = {first + row: reason for row, reason in enumerate(reasons) if reason is not None}
        if done:
            self._finish(done)

    def _finish(self, done: dict[int, FinishReason], error: str | None = None) -> None:
        """Store rows that are done, so that what comes later finds them, and report them."""
        requests = self._leave(list(done))
        self._report(requests, list(done.values()), error)

    def _put_back(self, num_rows: int) -> None:
        """Let the rows that were admitted last wait again; they go on with the same tokens, and recompute what is evicted until then."""
        for request in reversed(self._leave(list(range(len(self._rows)))[-num_rows:])):
            self._waiting.put_back(request.place, bytes(request.key))

    def _put_back_stale(self) -> bool:
        """Another thread's call saw that the weights have changed: what the rows hold is of no use any more."""
        if self._batch is None or not self._cache.is_stale(self._batch):
            return False
        self._put_back(len(self._rows))
        return True

    def _leave(self, rows: list[int]) -> list[Request]:
        """Take rows, ascending, out of the batch and store them."""
        assert self._batch is not None
        parted = self._cache.part(self._batch, rows)
        requests = [self._rows.pop(row) for row in reversed(rows)][::-1]
        for row in reversed(rows):
            del self._pending[row]
        for request in requests:
            self._sampler.close(request.index)
        self._cache.store(parted)
        if self._rows:
            self._cache.occupants.give_back()
        else:
            self._cache.discard(self._batch)
            self._batch = None
            self._cache.occupants.leave(self)
        return requests


def _common(left: bytearray, right: bytes) -> int:
    """How many leading tokens two prompts share."""
    return common_bytes(left, right, 0) // TOKEN_BYTES
