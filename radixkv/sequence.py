"""`Sequence`, one row being generated, and `Batch`, the rows of one generate() call."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixkv.tree import Lease

TOKEN_BYTES = 4  # a token id in a key: int32, little-endian


@dataclass(frozen=True)
class SharedRun:
    """Positions [start, end) of a row whose K/V another row of the same step computes, at the same positions."""

    start: int
    end: int
    row: int


@dataclass(eq=False, slots=True)
class Sequence:
    """One row being generated: its tokens, its block table, and how much of it is stored.

    The block table has three parts: blocks[:num_leased] belong to the tree and are held by `lease`; blocks[num_leased:first_private] are
    full blocks that other rows of the batch may hold too, one reference each; blocks[first_private:] are written by this row alone.

    Attributes:
        key: all known tokens, int32 little-endian. num_stored: tokens whose K/V are written in the row's blocks.
        cached_len: leading tokens found in the tree. hit_len: leading tokens that the row need not compute in the step: those, and what
            other rows of the step compute. shared_runs: who computes the tokens in between.
        first_shared: of the blocks up to first_private those from here on are filled, in the step, by the rows that compute shared_runs.
        jumps: how often the row changed in another way than by a token at its end; what follows it from step to step must start over.
    """

    key: bytearray
    lease: Lease | None = None
    blocks: list[int] = field(default_factory=list)
    num_leased: int = 0
    first_private: int = 0
    first_shared: int = 0
    num_stored: int = 0
    cached_len: int = 0
    hit_len: int = 0
    shared_runs: list[SharedRun] = field(default_factory=list)
    jumps: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES


def runs_of_mate(mate: Sequence, row: int, start: int, end: int) -> list[SharedRun]:
    """Who computes positions [start, end) that a row takes from its mate, the row of that number: the mate, or those it takes from."""
    runs = (*mate.shared_runs, SharedRun(mate.hit_len, mate.num_tokens, row))
    return [SharedRun(max(run.start, start), min(run.end, end), run.row) for run in runs if run.start < end and run.end > start]


@dataclass(frozen=True)
class CallOptions:
    """What a caller of generate() asked of the cache.

    Attributes:
        namespace: what to add to the cache's own.
        reuse: whether tokens may be taken from the cache or from rows beside; if not, every row computes all of its own.
        store: whether the rows are stored in the end; if not, nothing tells later that they were there: what they used does not count as
            used.
    """

    namespace: tuple = ()
    reuse: bool = True
    store: bool = True


@dataclass(eq=False)
class Batch:
    """The rows of one generate() call, from admission until they are stored or discarded.

    Attributes:
        namespace: the full one in which the rows were matched. options: of the call. counted: whether the statistics see the rows.
        lent: the caller's lease, when the prefix was chosen by hand. closed: stored or discarded; nothing is held any more, but for the
            rows' tokens. may_share: whether the last block of a row may be another's too. shares_blocks: whether any block may be.
        is_mixed: not all was computed with the weights that the namespace names, so nothing may be stored.
        step_rows: the rows of the last step. carried: what the backend keeps from one step of those rows to the next.
    """

    sequences: list[Sequence]
    namespace: tuple
    options: CallOptions = CallOptions()
    counted: bool = True
    lent: Lease | None = None
    closed: bool = False
    may_share: bool = False
    shares_blocks: bool = False
    is_mixed: bool = False
    step_rows: tuple[int, ...] = ()
    carried: dict = field(default_factory=dict)
