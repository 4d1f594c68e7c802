"""Which eviction policy keeps what is asked for again: one trace, all policies, and Belady's optimum beside them.

    python bench/replay.py                          # three kinds of synthetic traces, at four pool sizes each
    python bench/replay.py --trace requests.jsonl   # a recorded one, see bench/traces.py
    python bench/replay.py --json results.json

A request leases the longest cached prefix of its prompt, takes blocks for the rest and for its answer, and stores both, as
`PrefixCache` does; requests run one after another in the order of their arrival. The hit rate is the share of prompt tokens
that were cached. Everything is counted, nothing is timed, so that the figures are the same on every machine.

Belady's optimum gives up the block whose next use is furthest in the future. It is that for blocks: a block counts as used when
a later prompt contains all of its tokens, every block costs the same, and what a request stores must go in. A block that shares
only its first tokens with a prompt may be reused in part, which it does not foresee.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script, from anywhere and without an installation.
    sys.path.insert(0, str(ROOT))

from radixkv.bench.traces import KINDS, Trace, read_trace  # noqa: E402
from radixkv.eviction import POLICIES, PolicyMaker  # noqa: E402
from radixkv.eviction_queue import Eviction  # noqa: E402
from radixkv.node import Node  # noqa: E402
from radixkv.token_key import TOKEN_BYTES, token_key  # noqa: E402
from radixkv.tree import RadixTree  # noqa: E402

BELADY = "belady"
NAMES = [*(policy.name for policy in POLICIES), BELADY]
POOL_SHARES = (0.05, 0.1, 0.2, 0.4)
NEVER = 1 << 62


@dataclass(frozen=True)
class Result:
    """What one policy did with one trace in a pool of one size.

    Attributes:
        trace, num_requests: which trace. num_blocks, pool_share: the pool, in blocks and as a share of all different blocks of the trace.
        policy: its name, or "belady".
        prompt_tokens, cached_tokens, evicted_tokens: counted as `CacheStats` does. refused: requests that the pool could not hold.
    """

    trace: str
    num_requests: int
    num_blocks: int
    pool_share: float
    policy: str
    prompt_tokens: int
    cached_tokens: int
    evicted_tokens: int
    refused: int

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Future:
    """When each block of a trace is used again. Requests are told apart by whole blocks of their keys, from the beginning.

    Args:
        keys: per request prompt and answer, as key bytes. prompt_lens: tokens of the prompts.
    """

    def __init__(self, keys: list[bytes], prompt_lens: list[int], block_size: int) -> None:
        self._keys = keys
        self._block_bytes = block_size * TOKEN_BYTES
        # Per request the id of what comes before each of its blocks, and per id who has it in the prompt and goes on how.
        self._before: list[list[int]] = []
        self._followers: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._uses: dict[tuple[int, bytes], list[int]] = {}
        ids: dict[tuple[int, bytes], int] = {}
        for request, (key, prompt_len) in enumerate(zip(keys, prompt_lens, strict=True)):
            before, path = 0, []
            for start in range(0, len(key), self._block_bytes):
                path.append(before)
                inside = key[start : min(start + self._block_bytes, prompt_len * TOKEN_BYTES)]
                if inside:
                    self._followers[before].append((request, inside))
                before = ids.setdefault((before, key[start : start + self._block_bytes]), len(ids) + 1)
            self._before.append(path)
        self.num_blocks = len(ids)

    def next_use(self, request: int, block: int, num_bytes: int, now: int) -> int:
        """The first request after `now` whose prompt has all num_bytes of the block that `request` stored as its block-th."""
        start = block * self._block_bytes
        place = self._before[request][block], self._keys[request][start : start + num_bytes]
        uses = self._uses.get(place)
        if uses is None:
            uses = self._uses[place] = [user for user, inside in self._followers[place[0]] if inside.startswith(place[1])]
        after = bisect_right(uses, now)
        return uses[after] if after < len(uses) else NEVER


class BeladyQueue(Eviction):
    """The leaf whose last block is used again last; it looks at every leaf. A node's `worth` is when that is."""

    name = BELADY

    def __init__(self, block_size: int, future: Future) -> None:
        super().__init__(block_size)
        self.now = 0
        self.origins: dict[int, tuple[int, int]] = {}  # block id: the request that stored it, and as which of its blocks
        self._future = future
        self._waiting: dict[Node, None] = {}

    def add(self, leaf: Node) -> None:
        leaf.stamp = next(self.clock)
        self.expose(leaf)

    def renew(self, node: Node) -> None:
        node.stamp, node.worth = next(self.clock), None

    touch = renew
    restore = add

    def expose(self, leaf: Node) -> None:
        leaf.place, leaf.worth = 1, None
        self._waiting[leaf] = None

    def discard(self, node: Node) -> None:
        if node.place:
            node.place = 0
            del self._waiting[node]

    def num_at_once(self, leaf: Node) -> int:
        return 1

    def trim(self, leaf: Node) -> None:
        leaf.worth = None

    def first(self) -> Node | None:
        return max(self._waiting, key=self._next_use, default=None)

    def nodes(self) -> list[Node]:
        return sorted(self._waiting, key=self._next_use, reverse=True)

    def _next_use(self, leaf: Node) -> int:
        if leaf.worth is None or leaf.worth <= self.now:
            request, block = self.origins[leaf.blocks[-1]]
            num_bytes = len(leaf.edge) - (len(leaf.blocks) - 1) * self.block_size * TOKEN_BYTES
            leaf.worth = self._future.next_use(request, block, num_bytes, self.now)
        return leaf.worth


class Replay:
    """One trace, to be run with any policy in any pool."""

    def __init__(self, name: str, trace: Trace, block_size: int) -> None:
        self.name, self.block_size = name, block_size
        self.prompts = [token_key(request.prompt) for request in trace]
        self.keys = [token_key(request.prompt + request.output) for request in trace]
        self.prompt_lens = [len(request.prompt) for request in trace]
        self.future = Future(self.keys, self.prompt_lens, block_size)

    def run(self, policy: str, pool_share: float) -> Result:
        """Replay the trace in a pool of that share of all its different blocks."""
        num_blocks = max(1, int(pool_share * self.future.num_blocks))
        maker: str | PolicyMaker = partial(BeladyQueue, future=self.future) if policy == BELADY else policy
        tree = RadixTree(self.block_size, maker)
        free = list(range(num_blocks))
        cached = refused = 0
        for request in range(len(self.keys)):
            if isinstance(tree.queue, BeladyQueue):
                tree.queue.now = request
            hit = self._serve(tree, free, request)
            if hit is None:
                refused += 1
            else:
                cached += hit
        tree.check()
        assert len(free) + tree.num_blocks == num_blocks, "blocks were lost"
        return Result(
            self.name, len(self.keys), num_blocks, pool_share, policy, sum(self.prompt_lens), cached, tree.evicted_tokens, refused
        )

    def _serve(self, tree: RadixTree, free: list[int], request: int) -> int | None:
        """Returns how many tokens of the prompt were cached; None if there is no room."""
        key = self.keys[request]
        with tree.lock(tree.match_prefix(self.prompts[request], limit=self.prompt_lens[request] - 1)) as lease:
            hit = lease.length
            shared = lease.blocks[: hit // self.block_size]
            num_new = -(-len(key) // TOKEN_BYTES // self.block_size) - len(shared)
            if num_new > len(free) + tree.num_evictable_blocks:
                return None
            if num_new > len(free):
                free += tree.evict(num_new - len(free))
            new = [free.pop() for _ in range(num_new)]
        inserted = tree.insert(key, shared + new, ())
        if isinstance(tree.queue, BeladyQueue):
            stored = enumerate(inserted.blocks[inserted.first_adopted :], inserted.first_adopted)
            tree.queue.origins.update((block, (request, i)) for i, block in stored)
        free += new[: max(0, inserted.first_adopted - len(shared))] + inserted.replaced
        return hit


def replay(name: str, trace: Trace, block_size: int, pool_shares: tuple[float, ...] = POOL_SHARES) -> Iterator[Result]:
    """One trace with every policy and Belady's optimum, in pools of several sizes."""
    prepared = Replay(name, trace, block_size)
    for share in pool_shares:
        for policy in NAMES:
            yield prepared.run(policy, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a recorded trace in place of the synthetic ones: JSON lines, see bench/traces.py")
    parser.add_argument("--requests", type=int, default=1500, help="length of a synthetic trace (default 1500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the results there too")
    args = parser.parse_args()
    traces = {args.trace.name: read_trace(args.trace)} if args.trace else {k: make(args.requests, args.seed) for k, make in KINDS.items()}
    print(f"share of prompt tokens that were cached, in percent; blocks of {args.block_size}; pool: share of the trace's different blocks")
    print(f"{'trace':12} {'pool':>5} {'blocks':>7}" + "".join(f"{name:>10}" for name in NAMES))
    results: list[Result] = []
    for name, trace in traces.items():
        for result in replay(name, trace, args.block_size):
            if result.policy == NAMES[0]:
                print(f"{name:12} {result.pool_share:5.0%} {result.num_blocks:7,}", end="")
            refused = f" ({result.refused} refused)" if result.refused else ""
            print(f"{100 * result.hit_rate:10.1f}{refused}", end="\n" if result.policy == NAMES[-1] else "", flush=True)
            results.append(result)
    means = {n: sum(r.hit_rate for r in results if r.policy == n) / sum(r.policy == n for r in results) for n in NAMES}
    print(f"{'mean':26}" + "".join(f"{100 * means[name]:10.1f}" for name in NAMES))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) | {"hit_rate": r.hit_rate} for r in results], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
