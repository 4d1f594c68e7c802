"""What a tree remembers of what it no longer holds: its counters, and the last runs of tokens that it gave up.

A run is kept as a few numbers and its first tokens, so that `explain` can tell a prompt that was lost from one that was never there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import time
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from radixkv.events import CacheEvent, Evicted, Stored
from radixkv.node import Node, Root
from radixkv.token_key import TOKEN_BYTES, common_bytes_short, namespace_of

if TYPE_CHECKING:
    from radixkv.tree import RadixTree

NUM_RUNS = 1024
HEAD_BYTES = 64 * TOKEN_BYTES


class EvictedRun(NamedTuple):
    """Tokens that were evicted one after the other from the end of one prefix.

    Attributes:
        step: the logical time of the last of them. root_key: the key of their namespace.
        start, end: their positions, in bytes of the prefix's key.
        checksum: of all bytes before `start`. head: the first of theirs, at most HEAD_BYTES.
    """

    step: int
    root_key: tuple
    start: int
    end: int
    checksum: int
    head: bytes


class GivenUp(NamedTuple):
    """One call that gave something up.

    Attributes:
        step: its logical time, that of its `EvictedRun`s too. time_s: seconds since 1970, for who looks at it; nothing depends on it.
        reason: see `Evicted.reason`. num_tokens, num_blocks: how much went.
    """

    step: int
    time_s: float
    reason: str
    num_tokens: int
    num_blocks: int


class Dropped(NamedTuple):
    """Everything that nobody held was dropped at once: when, why (see `Evicted.reason`), and how many tokens."""

    step: int
    reason: str
    num_tokens: int


class _Trimmed(NamedTuple):
    """The run at the end of a leaf that is still there: what comes before it can be read from the tree."""

    step: int
    start: int
    end: int
    head: bytes


class History:
    """The counters of one tree, and its last evicted runs: NUM_RUNS whose leaf is gone and NUM_RUNS of leaves that were only shortened,
    less than 0.6 KB each.

    Attributes:
        num_insertions: calls of `insert` with at least one token. stored_tokens: tokens that they brought. evicted_tokens, evicted_blocks:
            what `evict` dropped. None of them ever goes down.
        dropped: the last time that everything was dropped; None if it never was.
        given_up: the last NUM_RUNS calls that gave something up, each in the order of `GivenUp`.
        listener: what gets an event for everything that is stored or given up; None: none are made.
    """

    def __init__(self) -> None:
        self.num_insertions = 0
        self.stored_tokens = 0
        self.evicted_tokens = 0
        self.evicted_blocks = 0
        self.dropped: Dropped | None = None
        self.given_up: deque[tuple[int, float, str, int, int]] = deque(maxlen=NUM_RUNS)
        self.listener: Callable[[CacheEvent], None] | None = None
        self._runs: deque[tuple[int, tuple, int, int, int, bytes]] = deque(maxlen=NUM_RUNS)
        self._trimmed: dict[Node, _Trimmed] = {}
        self._reason, self._step = "room", 0
        # Per inner node: its edge when that was seen, the checksum of all tokens up to its end, and the key of its namespace. While the
        # edge is the same object they hold, because what has children neither grows nor shrinks.
        self._places: dict[Node, tuple[bytes, int, tuple]] = {}

    def store(self, tree: RadixTree, key: bytes, num_bytes: int, namespace: tuple) -> None:
        """An insertion of `key` brought its last num_bytes."""
        num_insertions, stored_tokens = self.num_insertions + 1, self.stored_tokens + num_bytes // TOKEN_BYTES
        if num_bytes and self.listener is not None:
            self.listener(Stored(tree.tick(), namespace, key, num_bytes // TOKEN_BYTES))
        self.num_insertions, self.stored_tokens = num_insertions, stored_tokens

    def begin(self, reason: str, step: int) -> None:
        """From now on nodes are given up for this reason. Until `end` the tree changes in no other way."""
        self._reason, self._step = reason, step

    def give_up(self, leaf: Node, num_kept: int) -> None:
        """A leaf is about to lose its tokens from its byte num_kept on; with 0 it leaves the tree."""
        if self.listener is not None:
            num_tokens = (len(leaf.edge) - num_kept) // TOKEN_BYTES
            self.listener(Evicted(self._step, namespace_of(_root_key(leaf)), path_key(leaf), num_tokens, self._reason))
        if self._reason != "room":
            return
        if num_kept or (self._trimmed and leaf in self._trimmed):
            self._note_trimmed(leaf, num_kept)
            return
        parent, start, edge = leaf.parent, leaf.start, leaf.edge
        assert parent is not None
        place = self._places.get(parent)
        if place is None or place[0] is not parent.edge:
            place = self._place(parent)
        # A plain tuple in the order of EvictedRun, which takes as long to make as all else here.
        self._runs.append((self._step, place[2], start, start + len(edge), place[1], edge[:HEAD_BYTES]))

    def lose_children(self, node: Node) -> None:
        """A node has lost its last child."""
        self._places.pop(node, None)

    def end(self, num_tokens: int, num_blocks: int) -> None:
        """What was begun is over, and so many tokens and blocks are gone."""
        if len(self._places) > NUM_RUNS:
            self._places.clear()
        # Whatever may fail for want of memory comes before what may not be done twice, and the entry comes last of it.
        dropped = None if self._reason == "room" else Dropped(self._step, self._reason, num_tokens)
        evicted_tokens, evicted_blocks = self.evicted_tokens + num_tokens, self.evicted_blocks + num_blocks
        if num_tokens:
            self.given_up.append((self._step, time(), self._reason, num_tokens, num_blocks))
        if dropped is None:
            self.evicted_tokens, self.evicted_blocks = evicted_tokens, evicted_blocks
        else:
            self.dropped = dropped
            self._runs.clear()
            self._trimmed.clear()
            self._places.clear()

    def give_up_all(self, tree: RadixTree, reason: str) -> None:
        """The whole tree is about to be given up, what is leased included."""
        self.begin(reason, tree.tick())
        for node in reversed(tree.nodes()):
            if self.listener is not None and not isinstance(node, Root):
                self.give_up(node, 0)
        self.end(tree.num_tokens, tree.num_blocks)

    def carry_on(self, other: History) -> None:
        """Goes on where the history of the tree before this one ended."""
        self.num_insertions, self.stored_tokens = other.num_insertions, other.stored_tokens
        self.evicted_tokens, self.evicted_blocks = other.evicted_tokens, other.evicted_blocks
        self.dropped, self.listener, self.given_up = other.dropped, other.listener, other.given_up

    def runs(self, root_key: tuple | None = None) -> list[EvictedRun]:
        """The runs of a namespace, or of all, the oldest first."""
        runs = [EvictedRun(*run) for run in self._runs if root_key is None or run[1] == root_key]
        for leaf, trimmed in self._trimmed.items():
            if root_key is None or _root_key(leaf) == root_key:
                runs.append(_closed(leaf, trimmed))
        runs.sort(key=lambda run: run.step)
        return runs

    def lost_runs(self, root_key: tuple, key: bytes, position: int) -> list[EvictedRun]:
        """The runs that a key would have matched, the first of which holds the token at byte `position`; empty if that was not evicted."""
        runs = self.runs(root_key)
        first = next((run for run in reversed(runs) if _held(run, key, position)), None)
        if first is None:
            return []
        later = (run for run in runs if run.start >= first.end and _held(run, key, run.start))
        return [first, *sorted(later, key=lambda run: run.start)]

    def _note_trimmed(self, leaf: Node, num_kept: int) -> None:
        start, end = leaf.start + num_kept, leaf.start + len(leaf.edge)
        head = leaf.edge[num_kept : num_kept + HEAD_BYTES]
        earlier = self._trimmed.pop(leaf, None)
        if earlier is not None:
            if earlier.start == end:
                end, head = earlier.end, (head + earlier.head)[:HEAD_BYTES]
            else:  # the leaf has grown meanwhile
                self._runs.append(_closed(leaf, earlier))
        if num_kept:
            self._trimmed[leaf] = _Trimmed(self._step, start, end, head)
            if len(self._trimmed) > NUM_RUNS:
                del self._trimmed[next(iter(self._trimmed))]
        else:
            assert leaf.parent is not None
            _, checksum, root_key = self._place(leaf.parent)
            self._runs.append(EvictedRun(self._step, root_key, start, end, checksum, head))

    def _place(self, node: Node) -> tuple[bytes, int, tuple]:
        place = self._places.get(node)
        if place is not None and place[0] is node.edge:
            return place
        below: list[Node] = []
        while True:
            if isinstance(node, Root):
                place = self._places[node] = (node.edge, 0, node.namespace_key)
                break
            place = self._places.get(node)
            if place is not None and place[0] is node.edge:
                break
            below.append(node)
            assert node.parent is not None
            node = node.parent
        for node in reversed(below):
            place = self._places[node] = (node.edge, crc32(node.edge, place[1]), place[2])
        return place


def path_key(node: Node) -> bytes:
    """All tokens from the root to the end of a node."""
    edges = []
    upper: Node | None = node
    while upper is not None:
        edges.append(upper.edge)
        upper = upper.parent
    return b"".join(reversed(edges))


def _root_key(node: Node) -> tuple:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node.namespace_key


def _closed(leaf: Node, trimmed: _Trimmed) -> EvictedRun:
    step, start, end, head = trimmed
    return EvictedRun(step, _root_key(leaf), start, end, crc32(path_key(leaf)[:start]), head)


def _held(run: EvictedRun, key: bytes, position: int) -> bool:
    """Whether a run held the token of `key` at a byte position, after the same tokens."""
    if not run.start <= position < run.end:
        return False
    common = common_bytes_short(run.head, key[run.start : run.start + HEAD_BYTES])
    return run.start + common > position and crc32(key[: run.start]) == run.checksum
