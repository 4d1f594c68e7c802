"""Why a prompt reuses what it reuses: how far it matches, along which edges, and what ended the match."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.history import Dropped
from radixkv.node import Node, Root, walk
from radixkv.readable import Decoder, decoder_of
from radixkv.token_key import TOKEN_BYTES, namespace_key, namespace_of, token_key

if TYPE_CHECKING:
    from radixkv.tree import RadixTree

NUM_NEIGHBOURS = 8
MAX_SCANNED = 10_000
MAX_EDGES_SHOWN = 6


@dataclass(frozen=True)
class MatchedEdge:
    """One edge of the tree that the prompt runs along.

    Attributes:
        depth: 1 for an edge at the root. start: position of its first token. num_tokens: its tokens that match. edge_tokens: all it has.
    """

    depth: int
    start: int
    num_tokens: int
    edge_tokens: int


@dataclass(frozen=True)
class Difference:
    """The first token that is cached otherwise.

    Attributes:
        position: of the token. asked: its id in the prompt. cached: ids cached at that position, at most 8; there are others if `more`.
        before: up to 8 ids that precede it. asked_run, cached_run: up to 8 ids from it on, of the prompt and of one that is cached.
    """

    position: int
    asked: int
    cached: tuple[int, ...]
    more: bool
    before: tuple[int, ...]
    asked_run: tuple[int, ...]
    cached_run: tuple[int, ...]


@dataclass(frozen=True)
class Elsewhere:
    """Another namespace in which more of the prompt is cached, never to be served here. `stale`: it is this one under older weights."""

    namespace: tuple
    matched: int
    stale: bool


@dataclass(frozen=True)
class Loss:
    """Tokens of the prompt that were cached and had to make room: the last logical step, their first and last position, how many."""

    step: int
    start: int
    end: int
    num_tokens: int


@dataclass(frozen=True)
class Explanation:
    """What of a prompt is cached and why not more; prints as a paragraph.

    Attributes:
        num_tokens: of the prompt. matched: its leading tokens that are cached in the pool. in_host_memory: those in the second tier.
        reusable: those of them that generate() would not compute (if the pool has room for what comes from the second tier).
        namespace: where it was looked up. edges: what matched, from the root down.
        reason: what ended the match: "all cached", "in host memory" (more of it is there), "evicted", "older weights", "other namespace",
            "differs" (another token is cached there) or "end" (nothing is cached behind it); the first of these that applies.
        difference, elsewhere, loss: the details, each None where there is nothing to tell; several may be given.
        dropped: when and why everything that nobody held was last dropped at once; None if it never was.
    """

    num_tokens: int
    matched: int
    in_host_memory: int
    reusable: int
    namespace: tuple
    edges: tuple[MatchedEdge, ...]
    reason: str
    difference: Difference | None = None
    elsewhere: Elsewhere | None = None
    loss: Loss | None = None
    dropped: Dropped | None = None
    decode: Decoder | None = None

    def __str__(self) -> str:
        sentences = [self._matched(), *self._losses(), *self._other_tier(), *self._other_namespace(), *self._ending()]
        sentences.append(f"generate() would reuse {self.reusable} tokens and compute {self.num_tokens - self.reusable}.")
        return " ".join(sentences)

    def _matched(self) -> str:
        if not self.matched:
            return f"Of {_tokens(self.num_tokens)} none is cached."
        shown = [f"{edge.num_tokens} of {edge.edge_tokens} at depth {edge.depth}" for edge in self.edges]
        if len(shown) > MAX_EDGES_SHOWN:
            half = MAX_EDGES_SHOWN // 2
            shown[half:-half] = [f"{len(shown) - 2 * half} more"]
        edges = "1 edge" if len(self.edges) == 1 else f"{len(self.edges)} edges"
        return f"Of {_tokens(self.num_tokens)} the first {self.matched} are cached, along {edges} (tokens: {', '.join(shown)})."

    def _losses(self) -> list[str]:
        if self.loss is None:
            return []
        loss = self.loss
        return [f"More of it was cached: {_tokens(loss.num_tokens)} from position {loss.start} on were evicted, at step {loss.step}."]

    def _other_tier(self) -> list[str]:
        if self.in_host_memory <= self.matched:
            return []
        return [f"Its first {_tokens(self.in_host_memory)} are in host memory and come back from there when they are asked for."]

    def _other_namespace(self) -> list[str]:
        if self.elsewhere is None:
            return []
        where = "under older weights" if self.elsewhere.stale else "in another namespace"
        return [f"Its first {self.elsewhere.matched} tokens are cached {where}, {self.elsewhere.namespace}; that is never served here."]

    def _ending(self) -> list[str]:
        if self.reason == "all cached":
            return ["Nothing is missing; the last token is computed all the same, for its logits."]
        difference = self.difference
        if difference is None:
            ending = "Nothing is cached in this namespace." if not self.edges else f"Nothing is cached behind position {self.matched}."
            return [ending, *self._dropped()]
        more = " and others" if difference.more else ""
        told = [
            f"The match ends at position {difference.position}: asked for token {difference.asked}, "
            f"cached there: {_ids(difference.cached)}{more}."
        ]
        if self.decode is None:
            before = f"after {_ids(difference.before)}, " if difference.before else ""
            told.append(f"In full, {before}asked: {_ids(difference.asked_run)}; cached: {_ids(difference.cached_run)}.")
        else:
            before, asked, cached = map(self.decode, (difference.before, difference.asked_run, difference.cached_run))
            told.append(f"In words, after {before}, asked: {asked}; cached: {cached}.")
        return told + self._dropped()

    def _dropped(self) -> list[str]:
        why = {"clear": "the cache was cleared", "weights": "the model's weights had changed", "pool": "the model was moved or cast"}
        if self.dropped is None or self.loss is not None or not self.dropped.num_tokens:
            return []
        dropped = self.dropped
        return [f"At step {dropped.step} everything that nobody held, {_tokens(dropped.num_tokens)}, was dropped: {why[dropped.reason]}."]


def explain(
    tree: RadixTree, tokens: Any, namespace: tuple = (), num_logits: int = 1, tokenizer: Any = None, host_tree: RadixTree | None = None
) -> Explanation:
    """Looks a prompt up and says what was found. It changes nothing, recency included.

    Args:
        tree: where to look.
        tokens: the prompt, see `token_key`.
        namespace: where to look, as the tree has it.
        num_logits: how many of the last tokens are computed for their logits; one always is.
        tokenizer: with a `decode(ids)`, to show the tokens around a difference as text; None for ids alone.
        host_tree: of the second tier, if there is one.

    Returns:
        The explanation.

    Raises:
        ValueError: tokens, namespace, num_logits or tokenizer is none.
    """
    if type(num_logits) is not int or num_logits < 0:
        raise ValueError(f"explain: num_logits must be an int of at least 0, got {num_logits!r}")
    decode = decoder_of("explain", tokenizer)
    key = bytes(token_key(tokens))
    num_tokens, root_key = len(key) // TOKEN_BYTES, namespace_key(namespace)
    block_bytes = tree.block_size * TOKEN_BYTES
    node, start, taken = _walk(tree, root_key, key)
    _, host_start, host_taken = (None, 0, 0) if host_tree is None else _walk(host_tree, root_key, key)
    in_host_memory = (host_start + host_taken) // TOKEN_BYTES
    end = start + taken
    matched = end // TOKEN_BYTES
    is_whole = end == len(key)
    difference = None if node is None or is_whole else _difference(node, start, taken, key, block_bytes)
    runs = [] if is_whole else tree.history.lost_runs(root_key, key, end)
    loss = None
    if runs:
        # Of the last run only the first tokens are known to have been this prompt's; it may have been longer than the prompt.
        last = min(runs[-1].end, len(key))
        lost = sum(min(run.end, len(key)) - max(run.start, end) for run in runs)
        loss = Loss(max(run.step for run in runs), matched, last // TOKEN_BYTES, lost // TOKEN_BYTES)
    elsewhere = None if is_whole else _elsewhere(tree, key, end, root_key, block_bytes)
    reasons = {
        "all cached": is_whole,
        "in host memory": in_host_memory > matched,
        "evicted": loss is not None,
        "older weights": elsewhere is not None and elsewhere.stale,
        "other namespace": elsewhere is not None,
        "differs": difference is not None,
        "end": True,
    }
    return Explanation(
        num_tokens,
        matched,
        in_host_memory,
        max(0, min(max(matched, in_host_memory), num_tokens - max(1, num_logits))),
        namespace,
        () if node is None else _edges(node, taken),
        next(reason for reason, applies in reasons.items() if applies),
        difference,
        elsewhere,
        loss,
        None if is_whole else tree.history.dropped,
        decode,
    )


def _walk(tree: RadixTree, root_key: tuple, key: bytes) -> tuple[Node | None, int, int]:
    root = tree.roots().get(root_key)
    return (None, 0, 0) if root is None else walk(root, key, len(key), tree.block_size * TOKEN_BYTES)


def _edges(node: Node, num_bytes: int) -> tuple[MatchedEdge, ...]:
    """The edges from the root to a node, of which num_bytes match."""
    path: list[tuple[Node, int]] = []
    upper: Node | None = node
    while upper is not None and not isinstance(upper, Root):
        path.append((upper, len(upper.edge) if path else num_bytes))
        upper = upper.parent
    path.reverse()
    return tuple(
        MatchedEdge(depth, step.start // TOKEN_BYTES, taken // TOKEN_BYTES, len(step.edge) // TOKEN_BYTES)
        for depth, (step, taken) in enumerate(path, 1)
    )


def _difference(node: Node, start: int, taken: int, key: bytes, block_bytes: int) -> Difference | None:
    """What is cached where the key leaves a node's edge, or follows it at its end; None if nothing is."""
    if taken < len(node.edge):
        shared = key[start : start + taken]
        # Inside its first block other children of the same parent may share as much, and go on otherwise.
        siblings = node.parent.children.values() if taken < block_bytes and node.parent is not None else ()
        runs = [node.edge[taken:], *(other.edge[taken:] for other in _scanned(siblings) if other.edge.startswith(shared))]
    else:
        runs = [child.edge for child in _scanned(node.children.values())]
    runs = [run[: NUM_NEIGHBOURS * TOKEN_BYTES] for run in runs if run]
    if not runs:
        return None
    ids = list(dict.fromkeys(_tokens_of(run)[0] for run in runs))
    end = start + taken
    return Difference(
        end // TOKEN_BYTES,
        _tokens_of(key[end : end + TOKEN_BYTES])[0],
        tuple(ids[:NUM_NEIGHBOURS]),
        len(ids) > NUM_NEIGHBOURS,
        _tokens_of(key[max(0, end - NUM_NEIGHBOURS * TOKEN_BYTES) : end]),
        _tokens_of(key[end : end + NUM_NEIGHBOURS * TOKEN_BYTES]),
        _tokens_of(runs[0]),
    )


def _scanned(nodes: Any) -> list[Node]:
    return list(islice(nodes, MAX_SCANNED))


def _elsewhere(tree: RadixTree, key: bytes, end: int, root_key: tuple, block_bytes: int) -> Elsewhere | None:
    """The namespace where most of the key is cached, older weights before others; None if it is not more than here."""
    best: Elsewhere | None = None
    ours = namespace_of(root_key)
    for other_key, root in tree.roots().items():
        if other_key == root_key:
            continue
        _, start, taken = walk(root, key, len(key), block_bytes)
        if start + taken <= end:
            continue
        theirs = namespace_of(other_key)
        found = Elsewhere(theirs, (start + taken) // TOKEN_BYTES, _differ_in_weights_only(ours, theirs))
        if best is None or (found.matched, found.stale) > (best.matched, best.stale):
            best = found
    return best


def _differ_in_weights_only(ours: tuple, theirs: tuple) -> bool:
    """Whether two namespaces of a `PrefixCache` are equal but for what counts the changes of the weights, and of adapters."""
    return all(
        bool(part) and isinstance(part[0], tuple) and part[0][:1] == ("weights",) for part in (ours, theirs)
    ) and namespace_key(_uncounted(ours)) == namespace_key(_uncounted(theirs))


def _uncounted(namespace: tuple) -> tuple:
    """A namespace without the version of the weights, and its adapters without their numbers; see `integration/adapters.py`."""
    part = namespace[1] if len(namespace) > 1 else None
    if not (isinstance(part, tuple) and part[:1] == ("adapters",) and isinstance(part[1], tuple)):
        return namespace[1:]
    return (("adapters", tuple(adapter[0] for adapter in part[1]), *part[2:]), *namespace[2:])


def _tokens_of(key: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(key, "<i4").tolist())


def _ids(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
