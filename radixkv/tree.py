"""The radix tree: which token prefixes are cached, and in which blocks.

An edge is a run of tokens kept as bytes; edges split at block borders only, so a node's blocks are its own. Two branches
may share the first tokens of a block, each with a block of its own, and a leaf may end inside a block; a match is exact
to the token all the same. Namespaces are separate roots. Nothing is recursive, and nothing depends on the time of day.
Which blocks go first when some are wanted is the eviction policy's to say, see eviction.py.
The tree only does the bookkeeping of ids: the pool that they come from, and a lock between threads, are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from radixkv.eviction import PolicyMaker, policy_maker
from radixkv.forest import Added, Forest
from radixkv.history import History, path_key
from radixkv.holds import Holds
from radixkv.lease import Lease
from radixkv.node import Node, Root, walk
from radixkv.token_key import TOKEN_BYTES, namespace_key, token_key
from radixkv.tree_check import check_tree
from radixkv.tree_view import TreeView, view_tree

__all__ = ["Inserted", "Lease", "Match", "RadixTree", "token_key"]


class Match(NamedTuple):
    """The longest cached prefix of some tokens, as `match_prefix` found it. It holds nothing: see `RadixTree.lock`."""

    length: int
    namespace: tuple
    key: bytes
    tree: RadixTree
    version: int
    node: Node | None
    num_node_bytes: int

    @property
    def held_length(self) -> int:
        """How many of its tokens some lease holds, as far as nodes are held whole."""
        node, length = self.node, self.length
        while node is not None and not node.locks:
            length, node = node.start // TOKEN_BYTES, node.parent
        return 0 if node is None else length


class Inserted(NamedTuple):
    """What `insert` did with the blocks that it was given.

    Attributes:
        blocks: per position the block that the tree has there.
        first_adopted: the given blocks from here on belong to the tree now. Those before were known already: the caller
            writes `blocks` into its table and drops its own where they differ.
        replaced: blocks that the tree gave up for longer ones; the caller drops the tree's reference on them.
    """

    blocks: list[int]
    first_adopted: int
    replaced: list[int]


class RadixTree:
    """Token prefixes to blocks.

    Args:
        block_size: tokens per block, a power of two (the pool asks for 16 or more, the tree for 1 or more).
        eviction: which leaf goes first: "lru", "lfu", "fifo", "slru", "priority" or "cost", see `radixkv.eviction`; or what makes
            a policy of one's own for a block size.

    Attributes:
        queue: the eviction policy.
        forest: the nodes.
        history: counters of what was stored and evicted so far, and what was evicted lately.
        guard: held by what leases do by themselves and while a picture of the tree is taken; who uses the tree from several threads puts
            its lock here.
        holds: what leases hold.
        returned: what `Holds` says; appending is all that anyone else does with it.

    Tokens are whatever `token_key` takes. A namespace is any hashable tuple; two are the same only if their elements are
    equal and of equal types, so (1,) and (True,) are two.
    """

    def __init__(self, block_size: int, eviction: str | PolicyMaker = "lru") -> None:
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"RadixTree: block_size must be a power of two, got {block_size}")
        self.block_size = block_size
        self.history = History()
        self.guard: AbstractContextManager = nullcontext()
        self._block_bytes = block_size * TOKEN_BYTES
        self.queue = policy_maker("RadixTree", eviction)(block_size)
        self.forest = Forest(self._block_bytes, self.queue, self.history)
        self.holds = Holds()
        self.returned = self.holds.returned

    def tick(self) -> int:
        """The logical time, which moves on by one: the clock by which uses are stamped."""
        return next(self.queue.clock)

    @property
    def evicted_tokens(self) -> int:
        """Tokens that `evict` has dropped so far; it never goes down."""
        return self.history.evicted_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that the tree holds."""
        return self.forest.num_blocks

    @property
    def num_leased_blocks(self) -> int:
        """Those of them that a lease protects."""
        self.holds.take_in()
        return self.holds.num_blocks

    @property
    def num_evictable_blocks(self) -> int:
        """Those of them that no lease protects."""
        self.holds.take_in()
        return self.forest.num_blocks - self.holds.num_blocks

    @property
    def num_leases(self) -> int:
        """Leases of at least one token that are out."""
        self.holds.take_in()
        return self.holds.num_leases

    def count_leases(self) -> tuple[int, int]:
        """`num_leases` and `num_leased_blocks` of the same moment; other threads may release leases at any time."""
        self.holds.take_in()
        return self.holds.num_leases, self.holds.num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens that the tree holds K/V of, each stored copy counted."""
        return self.forest.num_bytes // TOKEN_BYTES

    def match_prefix(self, tokens: Any, namespace: tuple = (), limit: int | None = None) -> Match:
        """Finds the longest cached prefix, exact to the token. It changes nothing, recency included.

        Args:
            tokens: see `token_key`; bytes are taken as a key.
            namespace: where to look.
            limit: the match is at most this many tokens long; None for no limit.

        Returns:
            The match, valid as long as the tree is not changed; `lock` it to keep it.
        """
        key = token_key(tokens)
        if self.returned:
            self.holds.take_in()
        end = len(key) if limit is None else min(len(key), max(limit, 0) * TOKEN_BYTES)
        root = self.forest.roots.get(namespace_key(namespace))
        if root is None:
            return Match(0, namespace, key, self, self.forest.version, None, 0)
        node, start, matched = walk(root, key, end, self._block_bytes)
        return Match((start + matched) // TOKEN_BYTES, namespace, key, self, self.forest.version, node, matched)

    def lock(self, match: Match, priority: int | None = None) -> Lease:
        """Holds the blocks of a match, exactly ceil(length / block_size) of them; they count as used until the release.

        A match that is older than the last change of the tree is looked up again, so the lease may be shorter than the
        match was (what had gone by then is not in it), never longer.

        Args:
            match: from this tree's `match_prefix`.
            priority: from now on that of the prefix; None leaves it. With eviction="priority" only.

        Returns:
            The lease, released exactly once by whoever gets it.

        Raises:
            ValueError: for a match of another tree, or a priority that is not an int or that the policy does not know.
        """
        self.require_priority("lock", priority)
        if match.tree is not self:
            raise ValueError("lock: the match is of another tree")
        self.holds.take_in()
        if match.version != self.forest.version:
            match = self.match_prefix(match.key, match.namespace, match.length)
        if not match.length or match.node is None:
            lease = Lease(self, None, b"", 0, match.namespace)
        else:
            node = self.forest.cut(match.node, match.num_node_bytes)
            if priority is not None:
                node.queue.set_priority(node, priority)
            lease = self.lock_again(node, match.key, match.length, match.namespace)
        lease.priority = priority
        return lease

    def lock_again(self, node: Node | None, key: bytes, length: int, namespace: tuple) -> Lease:
        """One more hold on a node that ends with a prefix, or in which it ends, and all above it; what leases are made by."""
        if node is None:
            return Lease(self, None, key, length, namespace)
        lease = Lease(self, None, key, length, namespace)
        self.holds.add(node)
        lease.hold(node)
        return lease

    def insert(self, tokens: Any, blocks: Sequence[int], namespace: tuple = (), priority: int | None = None) -> Inserted:
        """Stores a prefix; the tree takes over the blocks of what it did not know and marks all of it as used now.

        A leaf that nobody leases grows in place, and its partly filled last block gives way to the longer one. What is
        leased stays as it is: the longer one is then stored beside it.

        Args:
            tokens: see `token_key`.
            blocks: ceil(num_tokens / block_size) block ids in token order; the last may be partly filled. Not changed.
            namespace: where to store.
            priority: from now on that of the prefix; None leaves it. With eviction="priority" only.

        Returns:
            Who owns which block now, see `Inserted`.

        Raises:
            ValueError: for another number of blocks, or a priority that is not an int or that the policy does not know.
        """
        self.require_priority("insert", priority)
        key = token_key(tokens)
        num_blocks = -(-len(key) // self._block_bytes)
        if len(blocks) != num_blocks:
            raise ValueError(f"insert: {len(key) // TOKEN_BYTES} tokens fill {num_blocks} blocks of {self.block_size}, got {len(blocks)}")
        self.holds.take_in()
        if not key:
            return Inserted([], 0, [])
        found = walk(self.forest.root_of(namespace_key(namespace)), key, len(key), self._block_bytes)
        node, start, matched = found
        if start + matched == len(key):
            node = self.forest.cut(node, matched)
            node.queue.renew(node)
            if priority is not None:
                node.queue.set_priority(node, priority)
            inserted = Inserted(node.path_blocks(), num_blocks, [])
            self.history.store(self, key, 0, namespace)
            return inserted
        # Before what it would leave half done if it failed for want of memory.
        num_bytes = self.forest.num_bytes
        first_adopted = (start + matched) // self._block_bytes
        adopted = list(blocks[first_adopted:])
        path = node.path_blocks()[:first_adopted] + adopted
        added = self.forest.extend(found, key, adopted)
        try:
            if priority is not None:
                added.node.queue.set_priority(added.node, priority)
            inserted = Inserted(path, first_adopted, added.replaced)
            self.history.store(self, key, self.forest.num_bytes - num_bytes, namespace)
        except BaseException:
            self.forest.retract(added)
            raise
        return inserted

    def fill_block(self, tokens: Any, block: int, namespace: tuple = ()) -> None:
        """Where the last block of a leaf is this one, and the leaf ends inside of it, lets it hold what a prefix has of the block.

        A leaf that is leased may be filled in this way, as no block of it changes. Nothing happens if there is no such leaf.

        Args:
            tokens: see `token_key`; the prefix, at most up to the end of the block.
            block: its last block, in which all its tokens are stored.
            namespace: of the prefix.
        """
        key = token_key(tokens)
        self.holds.take_in()
        border = (len(key) - 1) // self._block_bytes * self._block_bytes
        node, start, _ = walk(self.forest.root_of(namespace_key(namespace)), key, len(key), self._block_bytes)
        # The leaf, or one that has more of these tokens and stands beside it.
        beside = node.parent.children.values() if node.parent is not None and start == border else ()
        for leaf in (node, *beside):
            if leaf.blocks and leaf.blocks[-1] == block and not leaf.children and leaf.start + len(leaf.edge) < len(key):
                edge_before = leaf.edge
                num_bytes = len(key) - leaf.start - len(edge_before)
                self.forest.fill(leaf, key[leaf.start :])
                try:
                    self.history.store(self, key, num_bytes, namespace)
                except BaseException:
                    self.forest.fill(leaf, edge_before)
                    raise
                return

    def add_below(self, place: Node | None, border: int, key: bytes, blocks: Sequence[int], namespace: tuple) -> Added:
        """Stores a part of a prefix, in time that does not depend on what is above it. What is known is not marked as used.

        Args:
            place: a node whose path begins as the prefix does, at least up to the border; None for the root.
            border: where the part begins in the prefix, in bytes of whole blocks.
            key: its tokens. blocks: its blocks; those of known tokens are not looked at.
            namespace: where to store.

        Returns:
            What became of it; the first adopted block is counted from the border.
        """
        self.holds.take_in()
        anchor = self.forest.root_of(namespace_key(namespace)) if place is None else self.forest.node_at(place, border)
        num_bytes = self.forest.num_bytes
        added = self.forest.add_below(anchor, key, blocks)
        prefix = b"" if self.history.listener is None else path_key(added.node)[: border + len(key)]
        self.history.store(self, prefix, self.forest.num_bytes - num_bytes, namespace)
        return added

    def evict(self, num_blocks: int, victims: Callable[[Node], None] | None = None) -> list[int]:
        """Gives up blocks, from the end of the leaf that the policy names backwards, then of the next; never leased ones.

        Those of stale namespaces go before all others.

        Args:
            num_blocks: how many are wanted.
            victims: gets each leaf that is about to lose blocks, while it still has them; it must not raise.

        Returns:
            The ids given up, num_blocks of them or all that could be, fewer if Python's memory runs out in the middle; the caller drops
            the tree's references.
        """
        return self._give_up(num_blocks, "room", victims)

    def clear(self, reason: str = "clear") -> list[int]:
        """Gives up everything that is not leased and returns the ids, as `evict` does; not counted as evicted.

        Args:
            reason: what `radixkv.events.Evicted` says of it; "room" is what `evict` says.
        """
        return self._give_up(self.forest.num_blocks, reason)

    def retire(self, prefix: tuple) -> None:
        """Makes namespaces stale: what they hold is the first to go, what is leased now as soon as it is released.

        A stale namespace works as before. It is fresh again when it is filled after it was emptied.

        Args:
            prefix: all namespaces that begin with these elements; () for all.
        """
        self.holds.take_in()
        self.forest.retire(namespace_key(prefix))

    def blocks(self) -> list[int]:
        """All ids that the tree holds, in no particular order."""
        return [block for node in self.nodes() for block in node.blocks]

    def nodes(self) -> list[Node]:
        """All nodes with the roots, each after its parent; for looking at, not for changing."""
        return self.forest.nodes()

    def roots(self) -> Mapping[tuple, Root]:
        """The roots of all namespaces that hold something, by `namespace_key`; for looking at, not for changing."""
        return self.forest.roots

    def is_stale(self, node: Node) -> bool:
        """Whether a node is of a stale namespace, see `retire`."""
        return node.queue is self.forest.stale_queue

    def __call__(self, *, tokenizer: Any = None, max_nodes: int = 50) -> TreeView:
        """A picture of the tree as it is now; it changes nothing.

        Args:
            tokenizer: anything with `decode(ids)`, to show how edges begin as text; None for ids.
            max_nodes: how many nodes are shown, those with the most tokens at and below them; the rest is counted.

        Returns:
            The view, to be printed or shown in a notebook.

        Raises:
            ValueError: max_nodes is not an int of at least 1, or tokenizer decodes nothing.
        """
        return view_tree(self, tokenizer, max_nodes)

    def stale_nodes(self) -> list[Node]:
        """The leaves of stale namespaces that nobody leases, the first to go first; for looking at, not for changing."""
        return self.forest.stale_queue.nodes()

    def check(self) -> None:
        """Walks everything and recomputes every counter. Raises AssertionError with a sentence on any violation."""
        check_tree(self)

    def first_to_go(self) -> Node | None:
        """The leaf that `evict` would begin with; None if nothing can go."""
        return self.forest.first_to_go()

    def require_priority(self, function: str, priority: int | None) -> None:
        """Raises ValueError unless a priority is an int that this tree's policy heeds, or None."""
        if priority is None:
            return
        if type(priority) is not int:
            raise ValueError(f"{function}: priority must be an int or None, got {priority!r}")
        if not self.queue.takes_priority:
            raise ValueError(f"{function}: priority={priority} needs eviction='priority', this cache evicts by {self.queue.name!r}")

    def _give_up(self, num_blocks: int, reason: str, victims: Callable[[Node], None] | None = None) -> list[int]:
        self.holds.take_in()
        num_bytes = self.forest.num_bytes
        self.history.begin(reason, self.tick())
        given_up = self.forest.give_up(num_blocks, victims)
        try:
            self.history.end((num_bytes - self.forest.num_bytes) // TOKEN_BYTES, len(given_up))
        except MemoryError:  # the caller must get the ids, so once more
            self.history.end((num_bytes - self.forest.num_bytes) // TOKEN_BYTES, len(given_up))
        return given_up
