"""A counted hold on a cached prefix."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from radixkv.node import Node
from radixkv.token_key import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.tree import RadixTree


class Lease:
    """Keeps the blocks of a prefix in the tree until it is released; made by `RadixTree.lock` and `Lease.clone`.

    A context manager: leaving it releases what is not yet released, its forks too. A lease that is dropped unreleased comes back by
    itself. Releasing only hands the hold back to the tree, which takes it in at its next operation; so it is safe from
    any thread and inside the garbage collector.

    Attributes:
        tree: the tree that it belongs to.
        length: tokens of the prefix; with 0 it holds nothing.
        namespace: where the prefix lives.
        leaves_trace: whether the prefix counts as used, and reused, by it.
        priority: what it was asked for with; what is stored by a request that uses the lease gets it too. None for nothing.
        released: whether it was released.
    """

    __slots__ = (
        "tree", "length", "namespace", "priority", "leaves_trace", "released", "_key", "_node", "_num_borrowers", "_in_with_block",
        "_forks", "__weakref__",
    )  # fmt: skip

    def __init__(self, tree: RadixTree, node: Node | None, key: bytes, length: int, namespace: tuple) -> None:
        self.tree = tree
        self.length = length
        self.namespace = namespace
        self.priority: int | None = None
        self.leaves_trace = True
        self._key = key
        self._node = node
        self._num_borrowers = 0
        self._in_with_block = False
        # Weakly, so that a fork that is dropped comes back at once.
        self._forks: tuple[weakref.ref[Lease], ...] = ()
        self.released = False

    @property
    def tokens(self) -> bytes:
        """The prefix as key bytes."""
        return self._key[: self.length * TOKEN_BYTES]

    @property
    def blocks(self) -> list[int]:
        """Ids of the ceil(length / block_size) blocks, in token order, as a new list. RuntimeError after the release."""
        # Another thread may be splitting the path.
        with self.tree.guard:
            self._require_open("blocks")
            return [] if self._node is None else self._node.path_blocks()

    def clone(self) -> Lease:
        """Another hold on the same prefix, to be released on its own."""
        with self.tree.guard:
            self._require_open("clone")
            lease = self.tree.lock_again(self._node, self._key, self.length, self.namespace)
        lease.priority, lease.leaves_trace = self.priority, self.leaves_trace
        return lease

    def beginning(self, num_tokens: int) -> Lease:
        """A hold on the first num_tokens of the prefix, whole blocks, in the very blocks that this one holds.

        A match of the same tokens might find them in others: branches that part inside of a block both hold its beginning.
        """
        with self.tree.guard:
            self._require_open("beginning")
            node = self.tree.forest.node_at(self._node, num_tokens * TOKEN_BYTES) if self._node is not None and num_tokens else None
            lease = self.tree.lock_again(node, self._key, num_tokens, self.namespace)
        lease.priority, lease.leaves_trace = self.priority, self.leaves_trace
        return lease

    def fork(self, num_forks: int) -> list[Lease]:
        """Further holds on the same prefix, to continue it in so many ways; no K/V is copied.

            with model.radixkv.match_prefix(prompt_ids) as prefix:
                for fork in prefix.fork(4):
                    output = model.generate(input_ids, prefix_cache=fork, do_sample=True)

        Each is a lease like this one and released on its own. Leaving this one's `with` block releases those that are not yet.

        Args:
            num_forks: how many, at least 1.

        Raises:
            ValueError: num_forks is no int of at least 1. RuntimeError: this lease was released.
        """
        if type(num_forks) is not int or num_forks < 1:
            raise ValueError(f"fork: num_forks must be an int of at least 1, got {num_forks!r}")
        self._require_open("fork")
        forks = [self.clone() for _ in range(num_forks)]
        self._forks = (*(fork for fork in self._forks if fork() is not None), *map(weakref.ref, forks))
        return forks

    def release(self) -> None:
        """Gives the hold back. RuntimeError when that was done before."""
        self._require_open("release")
        self.released = True
        if self._node is not None:
            self.tree.returned.append((self._node, self.leaves_trace))
        self._node = None

    def hold(self, node: Node) -> None:
        """What the tree does with a lease that it made, once it has counted it."""
        self._node = node

    def count_hit(self) -> None:
        """A prompt was admitted that reuses the prefix."""
        if self._node is not None and self.leaves_trace:
            self._node.hits += 1

    def lend(self) -> None:
        """Somebody uses the lease and will say when that ends, with `give_back`."""
        self._num_borrowers += 1

    def give_back(self) -> None:
        """A borrower is done. With the last one the lease is released, unless a `with` block is there to do it."""
        self._num_borrowers -= 1
        if not self._num_borrowers and not self._in_with_block and not self.released:
            self.release()

    def __enter__(self) -> Lease:
        self._in_with_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fork in self._forks:
            if (lease := fork()) is not None and not lease.released:
                lease.release()
        if not self.released:
            self.release()

    def __del__(self) -> None:
        # May run in the middle of a tree operation: one append to the deque, and nothing else. Or after an interrupted __init__.
        if not getattr(self, "released", True):
            self.release()

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a Lease cannot be copied or pickled: use clone()")

    def __repr__(self) -> str:
        return f"Lease(length={self.length}, released={self.released})"

    def _require_open(self, action: str) -> None:
        if self.released:
            raise RuntimeError(f"Lease.{action}: this lease of {self.length} tokens was released before")
