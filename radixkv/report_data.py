"""What a report of a cache shows: a copy that is taken under the lock, and its form as plain values, made with nothing locked."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from radixkv.history import HEAD_BYTES, EvictedRun
from radixkv.node import Root
from radixkv.readable import as_text, decoder_of
from radixkv.stats import CacheStats
from radixkv.token_key import TOKEN_BYTES, namespace_of

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

# Tokens that are shown of all nodes together, and of one at least and at most.
SHOWN_TOKENS = 300_000
FEWEST_SHOWN, MOST_SHOWN = 32, 4096
SHOWN_IDS = 24
# Most characters of a text: so many, and so many more for each of its tokens; what a tokenizer makes beyond that is cut off.
CHARACTERS, CHARACTERS_PER_TOKEN = 100, 16

Shower = Callable[[bytes, int], str]


class CopiedNode(NamedTuple):
    """A node as it was; `parent` is its place in the list, which is after its parent's, or -1 for the root of a namespace."""

    edge: bytes
    parent: int
    start: int
    num_blocks: int
    hits: int
    leased: bool
    last_use: int


@dataclass(frozen=True)
class CacheCopy:
    """All that a report says of a cache, at one moment.

    Attributes:
        facts: what the cache is made of. stats: its counters and its pool. nodes: of all namespaces.
        namespaces: of each root, by its place in `nodes`, the name and whether it is stale.
        log, given_up: entries in the order of `LoggedPrompt` and `GivenUp`. runs: what was evicted last, the oldest first.
    """

    facts: dict[str, Any]
    stats: CacheStats
    nodes: list[CopiedNode]
    namespaces: dict[int, tuple[tuple, bool]]
    log: list[tuple[int, float, int, int, int]]
    given_up: list[tuple[int, float, str, int, int]]
    runs: list[EvictedRun]


def copy_cache(cache: PrefixCache) -> CacheCopy:
    """The copy; the lock is held for about a microsecond per node."""
    with cache.lock:
        stats, tree, pool = cache.stats(), cache.tree, cache.pool
        nodes = tree.nodes()
        place = {node: i for i, node in enumerate(nodes)}
        copied = [
            CopiedNode(
                node.edge,
                -1 if node.parent is None else place[node.parent],
                node.start,
                len(node.blocks),
                node.hits,
                node.locks > 0,
                node.stamp,
            )
            for node in nodes
        ]
        roots = {
            place[root]: (namespace_of(root.namespace_key), tree.is_stale(root)) for root in nodes if isinstance(root, Root)
        }
        facts = {
            "block_size": pool.block_size,
            "num_blocks": pool.num_blocks,
            "block_bytes": pool.block_bytes,
            "host_blocks": 0 if cache.tier is None else cache.tier.pool.num_blocks,
            "dtype": str(pool.dtype).removeprefix("torch."),
            "device": ", ".join(map(str, dict.fromkeys(pool.devices))),
            "backend": cache.backend.name,
            "eviction": tree.queue.name,
        }
        history = tree.history
        return CacheCopy(facts, stats, copied, roots, list(cache.request_log), list(history.given_up), history.runs())


def report_data(copy: CacheCopy, tokenizer: Any, max_nodes: int) -> dict[str, Any]:
    """A copy as values that JSON has a form for.

    Args:
        copy: of a cache. tokenizer: with a `decode(ids)`; None for ids in place of text.
        max_nodes: how many nodes are told of, those with the most tokens at and below them; the others are counted.

    Returns:
        The values: "written" (seconds since 1970), "cache", "stats", "has_text", "num_namespaces" and "num_nodes" (of the whole
        tree), "nodes" (columns of equal length, namespaces among them, a parent before its children; what is not shown is counted at its
        parent), "log", "given_up" and "runs".

    Raises:
        ValueError: tokenizer decodes nothing.
    """
    decoder_of("report", tokenizer)
    show = _shower(tokenizer)
    below = _add_up(copy.nodes)
    shown = _choose(copy.nodes, below, max_nodes)
    num_shown = min(MOST_SHOWN, max(FEWEST_SHOWN, SHOWN_TOKENS // max(1, len(shown))))
    return {
        "written": time(),
        "cache": copy.facts,
        "stats": asdict(copy.stats) | {"hit_rate": copy.stats.hit_rate, "token_hit_rate": copy.stats.token_hit_rate},
        "has_text": tokenizer is not None,
        "num_namespaces": len(copy.namespaces),
        "num_nodes": len(copy.nodes) - len(copy.namespaces),
        "nodes": _columns(copy, below, shown, show, num_shown),
        "log": copy.log,
        "given_up": copy.given_up,
        "runs": [
            {
                "step": run.step,
                "namespace": _label(namespace_of(run.root_key)),
                "start": run.start // TOKEN_BYTES,
                "tokens": (run.end - run.start) // TOKEN_BYTES,
                "text": show(run.head, HEAD_BYTES // TOKEN_BYTES),
            }
            for run in reversed(copy.runs)
        ],
    }


@dataclass
class _Below:
    """What there is at and below a node."""

    num_nodes: int
    num_tokens: int
    num_leaves: int
    hits: int
    last_use: int


def _add_up(nodes: list[CopiedNode]) -> list[_Below]:
    below = [_Below(int(node.parent >= 0), len(node.edge) // TOKEN_BYTES, 0, node.hits, node.last_use) for node in nodes]
    for node, own in zip(reversed(nodes), reversed(below), strict=True):  # children first
        own.num_leaves = max(1, own.num_leaves)
        if node.parent >= 0:
            upper = below[node.parent]
            upper.num_nodes += own.num_nodes
            upper.num_tokens += own.num_tokens
            upper.num_leaves += own.num_leaves
            upper.hits += own.hits
            upper.last_use = max(upper.last_use, own.last_use)
    return below


def _choose(nodes: list[CopiedNode], below: list[_Below], max_nodes: int) -> list[int]:
    """The places of the nodes with the most tokens at and below them, each after its parent's."""
    if len(nodes) <= max_nodes:
        return list(range(len(nodes)))
    children: list[list[int]] = [[] for _ in nodes]
    waiting: list[tuple[int, int]] = []
    for i, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].append(i)
        else:
            waiting.append((-below[i].num_tokens, i))
    heapq.heapify(waiting)
    shown: list[int] = []
    while waiting and len(shown) < max_nodes:
        _, i = heapq.heappop(waiting)
        shown.append(i)
        for child in children[i]:
            heapq.heappush(waiting, (-below[child].num_tokens, child))
    return sorted(shown)


def _columns(copy: CacheCopy, below: list[_Below], shown: list[int], show: Shower, num_shown: int) -> dict[str, list]:
    places = {i: place for place, i in enumerate(shown)}
    nodes, sums = [copy.nodes[i] for i in shown], [below[i] for i in shown]
    hidden_nodes, hidden_tokens = [part.num_nodes for part in sums], [part.num_tokens for part in sums]
    for place, node in enumerate(nodes):
        hidden_nodes[place] -= node.parent >= 0
        hidden_tokens[place] -= len(node.edge) // TOKEN_BYTES
        if node.parent >= 0:
            hidden_nodes[places[node.parent]] -= sums[place].num_nodes
            hidden_tokens[places[node.parent]] -= sums[place].num_tokens
    roots = [copy.namespaces.get(i) for i in shown]
    return {
        "parent": [places.get(node.parent, -1) for node in nodes],
        "start": [node.start // TOKEN_BYTES for node in nodes],
        "tokens": [len(node.edge) // TOKEN_BYTES for node in nodes],
        "blocks": [node.num_blocks for node in nodes],
        "leased": [int(node.leased) for node in nodes],
        "hits": [part.hits for part in sums],
        "last_use": [part.last_use for part in sums],
        "leaves": [part.num_leaves for part in sums],
        "stale": [int(root is not None and root[1]) for root in roots],
        "nodes_below": [part.num_nodes - (node.parent >= 0) for part, node in zip(sums, nodes, strict=True)],
        "tokens_below": [part.num_tokens for part in sums],
        "hidden_nodes": hidden_nodes,
        "hidden_tokens": hidden_tokens,
        "label": ["" if root is None else _label(root[0]) for root in roots],
        "text": [show(node.edge, num_shown) if root is None else _name(root[0]) for node, root in zip(nodes, roots, strict=True)],
        "ids": [" ".join(map(str, _ids(node.edge, SHOWN_IDS))) for node in nodes],
    }


def _shower(tokenizer: Any) -> Shower:
    """What makes text of the first tokens of an edge: decoded, or their ids. Its lines hold printable characters only."""

    def show(edge: bytes, num_tokens: int) -> str:
        ids = _ids(edge, num_tokens)
        if tokenizer is None:
            text = " ".join(map(str, ids))
        else:
            text = _printable(tokenizer.decode(ids) if ids else "", CHARACTERS + len(ids) * CHARACTERS_PER_TOKEN)
        return text + ("" if len(edge) <= num_tokens * TOKEN_BYTES else " …" if tokenizer is None else "…")

    return show


def _printable(text: str, max_characters: int) -> str:
    # Not splitlines(), which takes characters for line ends that a browser does not.
    return "\n".join(as_text(line, max_characters) for line in text[:max_characters].split("\n"))


def _ids(key: bytes, num_tokens: int) -> list[int]:
    return np.frombuffer(key[: num_tokens * TOKEN_BYTES], "<i4").tolist()


def _name(namespace: tuple) -> str:
    return as_text(repr(namespace), 400)


def _label(namespace: tuple) -> str:
    """A short name: of the parts of a cache's full namespace those that are not empty."""
    parts = [part for part in namespace if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)]
    if not parts or len(parts) < len(namespace):
        return _name(namespace)
    return as_text(", ".join(f"{name} {value!r}" for name, value in parts if value != ()), 200)
