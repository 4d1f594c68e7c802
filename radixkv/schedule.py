"""Which of many waiting prompts goes next: those that share a prefix one after another, and none kept waiting without end."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Literal, get_args

from radixkv.token_key import TOKEN_BYTES, common_bytes

Order = Literal["cache", "given"]

# How many prompts given later may go before one, before it goes first. Going first costs at most one prefix computed twice, so once in so
# many prompts it costs little.
MOST_PASSED = 64


class Waiting:
    """Prompts that wait for their turn.

    In cache order the next one is the one that shares most with what was taken last. Prompts of one prefix then come one after another,
    those of a longer common prefix inside of it first, as in a walk through the tree of all prompts, depth first. The walk begins with what
    is cached already, before something else takes its room. A prompt that more than `most_passed` given later have passed goes first,
    and the walk goes on from there; the next such prompt has its turn after as many.

    Args:
        keys: the prompts, int32 little-endian, in the order given. Each is named by its place there.
        cached_lens: how many leading tokens of each are cached now.
        order: "cache", or "given" for as they came.
        most_passed: see above.
    """

    def __init__(self, keys: Sequence[bytes], cached_lens: Sequence[int], order: Order = "cache", most_passed: int = MOST_PASSED) -> None:
        if order not in get_args(Order):
            raise ValueError(f"order must be one of {', '.join(map(repr, get_args(Order)))}, got {order!r}")
        self._keys, self._cached_lens = list(keys), list(cached_lens)
        self._order, self._most_passed = order, most_passed
        self._is_waiting = [True] * len(keys)
        self._num_waiting = len(keys)
        self._returned: deque[int] = deque()
        self._last: int | None = None
        self._oldest = 0
        self._num_since_aged = most_passed
        # What all share tells nothing about which to begin with.
        shared = common_bytes(min(keys), max(keys), 0) // TOKEN_BYTES if len(keys) else 0
        self._groups = [
            _Group(self._keys, [i for i, length in enumerate(cached_lens) if (length > shared) == is_warm]) for is_warm in (True, False)
        ]

    def __len__(self) -> int:
        return self._num_waiting + len(self._returned)

    def key(self, place: int) -> bytes:
        """The prompt, with what was added to it by `put_back`."""
        return self._keys[place]

    def next(self) -> int:
        """The place of the prompt whose turn it is; the same until one is taken or put back. One must be waiting."""
        if self._returned:
            return self._returned[0]
        if self._order == "given" or self._is_aged():
            return self._oldest
        group = next(group for group in self._groups if group)
        if self._last is None:
            return group.first(self._cached_lens)
        return group.nearest(self._keys[self._last])

    def take(self) -> int:
        """Take the prompt whose turn it is, and return its place."""
        place = self.next()
        if self._returned:
            self._returned.popleft()
        else:
            self._num_since_aged = 0 if self._order == "cache" and self._is_aged() else self._num_since_aged + 1
            for group in self._groups:
                group.discard(place)
            self._is_waiting[place] = False
            self._num_waiting -= 1
            while self._num_waiting and not self._is_waiting[self._oldest]:
                self._oldest += 1
        self._last = place
        return place

    def put_back(self, place: int, key: bytes) -> None:
        """Let one that was taken wait again, before all others; `key` is what it is to be computed from then."""
        self._keys[place] = key
        self._returned.appendleft(place)

    def _is_aged(self) -> bool:
        """Whether the oldest prompt is one that too many have passed: it was passed by all that were taken but the older ones."""
        num_taken = len(self._keys) - self._num_waiting
        return num_taken - self._oldest > self._most_passed and self._num_since_aged >= self._most_passed


class _Group:
    """Some of the waiting prompts, sorted by their tokens.

    Args:
        keys: all prompts. places: which of them are in the group, ascending.
    """

    def __init__(self, keys: Sequence[bytes], places: list[int]) -> None:
        self._keys = keys
        self._sorted = sorted((keys[place], place) for place in places)
        self._oldest_first = deque(places)
        self._places = set(places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def first(self, cached_lens: Sequence[int]) -> int:
        """The one of which most is cached, the oldest of those."""
        return max(self._places, key=lambda place: (cached_lens[place], -place))

    def nearest(self, key: bytes) -> int:
        """The one that shares most tokens with a key; where all share equally many, the oldest."""
        index = bisect_left(self._sorted, (key, -1))
        around = [self._sorted[i] for i in (index - 1, index) if 0 <= i < len(self._sorted)]
        shared = [common_bytes(other, key, 0) for other, _ in around]
        # What shares least is first or last in the order.
        ends = (self._sorted[0][0], self._sorted[-1][0])
        if max(shared) == min(common_bytes(end, key, 0) for end in ends):
            return self._oldest()
        return around[shared.index(max(shared))][1]

    def discard(self, place: int) -> None:
        """Take one out, if it is here."""
        if place in self._places:
            self._places.remove(place)
            del self._sorted[bisect_left(self._sorted, (self._keys[place], place))]

    def _oldest(self) -> int:
        while self._oldest_first[0] not in self._places:
            self._oldest_first.popleft()
        return self._oldest_first[0]
