"""A picture of a radix tree at one moment: as text, with rich, and as HTML in a notebook. Its size is bounded, however large the tree."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from radixkv.node import Node, Root
from radixkv.readable import Decoder, as_text, decoder_of
from radixkv.token_key import TOKEN_BYTES, common_bytes, namespace_of

if TYPE_CHECKING:
    from radixkv.tree import RadixTree

MAX_DEPTH = 16
BEGINNING_TOKENS = 8
DECODED_TOKENS = 16


@dataclass(frozen=True)
class NodeRow:
    """One node of the tree.

    Attributes:
        stem: the lines that lead to it. depth: 0 for a namespace, 1 for an edge at its root.
        num_tokens, num_blocks: its own, not those below it. leased: whether a lease holds it.
        last_use: the logical time when it or anything below it was last used. hits: admitted prompts that reused it.
        beginning: its first tokens, as ids or as quoted text; where those are also of a sibling that is shown, the first that are not.
    """

    stem: str
    depth: int
    num_tokens: int
    num_blocks: int
    leased: bool
    last_use: int
    hits: int
    beginning: str

    def __str__(self) -> str:
        leased = ", leased" if self.leased else ""
        numbers = f"{_count(self.num_tokens, 'token')}, {_count(self.num_blocks, 'block')}, last use {self.last_use}"
        return f"{numbers}, {_count(self.hits, 'hit')}{leased}  {self.beginning}"


@dataclass(frozen=True)
class NamespaceRow:
    """The root of a namespace: its name, whether it is stale (older weights), and what is below it."""

    stem: str
    depth: int
    name: str
    stale: bool
    num_nodes: int
    num_tokens: int

    def __str__(self) -> str:
        stale = ", stale" if self.stale else ""
        return f"namespace {self.name}: {_count(self.num_nodes, 'node')}, {_count(self.num_tokens, 'token')}{stale}"


@dataclass(frozen=True)
class FoldedRow:
    """Children that are not shown, with all that is below them."""

    stem: str
    depth: int
    num_nodes: int
    num_tokens: int

    def __str__(self) -> str:
        return f"… {_count(self.num_nodes, 'node')} more, {_count(self.num_tokens, 'token')}"


Row = NamespaceRow | NodeRow | FoldedRow


@dataclass(frozen=True)
class TreeView:
    """A radix tree as it was when the view was made; `str()`, `print()` and a notebook show it.

    Attributes:
        summary: one line about the whole tree. rows: what is shown of it, from the top.
    """

    summary: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"{row.stem}{row}" for row in self.rows)])

    __repr__ = __str__

    def print(self) -> None:
        """Prints it, in colours where rich is installed."""
        if find_spec("rich") is None:
            print(self)
        else:
            import rich

            rich.print(self)

    def __rich__(self) -> Any:
        from rich.text import Text

        # Appended piece by piece: what a prompt says must not be read as markup.
        text = Text(self.summary, style="bold", no_wrap=True, overflow="ellipsis")
        for row in self.rows:
            text.append(f"\n{row.stem}", "not bold dim")
            if isinstance(row, NodeRow):
                text.append(str(row)[: -len(row.beginning)], "not bold yellow" if row.leased else "not bold")
                text.append(row.beginning, "not bold cyan")
            else:
                text.append(str(row), "not bold dim" if isinstance(row, FoldedRow) else "bold green")
        return text

    def _repr_html_(self) -> str:
        cell = 'style="text-align:right;padding:0 0.8em"'
        head = "".join(f"<th {cell}>{name}</th>" for name in ("tokens", "blocks", "last use", "hits", ""))
        lines = [
            f'<div style="font-family:monospace"><div><b>{escape(self.summary)}</b></div>',
            f'<table style="border-collapse:collapse"><tr><th style="text-align:left">begins with</th>{head}</tr>',
        ]
        for row in self.rows:
            first = f'style="text-align:left;white-space:pre;padding-left:{1.5 * row.depth:.1f}em"'
            if isinstance(row, NodeRow):
                numbers = (row.num_tokens, row.num_blocks, row.last_use, row.hits, "leased" if row.leased else "")
                cells = "".join(f"<td {cell}>{number}</td>" for number in numbers)
                lines.append(f"<tr><td {first}>{escape(row.beginning)}</td>{cells}</tr>")
            else:
                tag = "i" if isinstance(row, FoldedRow) else "b"
                lines.append(f'<tr><td {first} colspan="6"><{tag}>{escape(str(row))}</{tag}></td></tr>')
        return "\n".join([*lines, "</table></div>"])


@dataclass
class _Below:
    """What there is at and below a node."""

    num_nodes: int = 0
    num_tokens: int = 0
    last_use: int = 0
    hits: int = 0


def view_tree(tree: RadixTree, tokenizer: Any, max_nodes: int) -> TreeView:
    """Makes the picture; see `RadixTree.__call__`."""
    if type(max_nodes) is not int or max_nodes < 1:
        raise ValueError(f"tree: max_nodes must be an int of at least 1, got {max_nodes!r}")
    decode = decoder_of("tree", tokenizer)
    with tree.guard:
        num_leased = tree.num_leased_blocks
        nodes = tree.nodes()
        below = _add_up(nodes)
        roots: list[Node] = list(tree.roots().values())
        shown = _choose(roots, below, max_nodes)
        num_nodes = len(nodes) - len(roots)
        summary = (
            f"{_count(len(roots), 'namespace')}, {_count(num_nodes, 'node')}, {_count(tree.num_tokens, 'token')} in "
            f"{_count(tree.num_blocks, 'block')} of {tree.block_size} ({num_leased} leased)"
        )
        drawn = _draw(tree, roots, shown, below, BEGINNING_TOKENS if decode is None else DECODED_TOKENS)
    # Outside of the lock, because a tokenizer is not ours and may take its time.
    return TreeView(summary, tuple(_row(part, decode) for part in drawn))


def _add_up(nodes: list[Node]) -> dict[Node, _Below]:
    below: dict[Node, _Below] = {node: _Below() for node in nodes}
    for node in reversed(nodes):  # children first
        own = below[node]
        own.num_nodes += not isinstance(node, Root)
        own.num_tokens += len(node.edge) // TOKEN_BYTES
        own.last_use = max(own.last_use, node.stamp)
        own.hits += node.hits
        if node.parent is not None:
            upper = below[node.parent]
            upper.num_nodes += own.num_nodes
            upper.num_tokens += own.num_tokens
            upper.last_use = max(upper.last_use, own.last_use)
            upper.hits += own.hits
    return below


def _choose(roots: list[Node], below: dict[Node, _Below], max_nodes: int) -> set[Node]:
    """The nodes with the most tokens at and below them, each after its parent."""
    waiting: list[tuple[int, int, int, Node]] = []
    for node in roots:
        heapq.heappush(waiting, (-below[node].num_tokens, len(waiting), 0, node))
    shown: set[Node] = set()
    count = len(waiting)
    while waiting and len(shown) < max_nodes:
        _, _, depth, node = heapq.heappop(waiting)
        shown.add(node)
        if depth < MAX_DEPTH:
            for child in node.children.values():
                count += 1
                heapq.heappush(waiting, (-below[child].num_tokens, count, depth + 1, child))
    return shown


def _draw(
    tree: RadixTree, roots: list[Node], shown: set[Node], below: dict[Node, _Below], num_words: int
) -> list[tuple[NodeRow, bytes, bool] | Row]:
    """The rows from the top; a node's with the tokens that it is shown by, still to be put into words, and whether others precede them.

    Args:
        num_words: so many tokens are put into words.
    """
    drawn: list[tuple[NodeRow, bytes, bool] | Row] = []
    siblings: defaultdict[Node | None, list[Node]] = defaultdict(list)
    for node in shown:
        siblings[node.parent].append(node)
    stack: list[tuple[Node, str, str, int] | FoldedRow] = []
    _push(stack, roots, shown, below, "", 0)
    while stack:
        top = stack.pop()
        if isinstance(top, FoldedRow):
            drawn.append(top)
            continue
        node, stem, stem_below, depth = top
        total = below[node]
        if isinstance(node, Root):
            name = as_text(repr(namespace_of(node.namespace_key)), 100)
            drawn.append(NamespaceRow(stem, depth, name, tree.is_stale(node), total.num_nodes, total.num_tokens))
        else:
            numbers = (len(node.edge) // TOKEN_BYTES, len(node.blocks), node.locks > 0, total.last_use, total.hits)
            begin = _own_part(node, siblings[node.parent], num_words * TOKEN_BYTES)
            drawn.append((NodeRow(stem, depth, *numbers, ""), node.edge[begin : begin + (num_words + 1) * TOKEN_BYTES], begin > 0))
        _push(stack, list(node.children.values()), shown, below, stem_below, depth + 1)
    return drawn


def _own_part(node: Node, siblings: list[Node], num_bytes: int) -> int:
    """Where the edge of a node begins to differ from its siblings' edges, if that is not in its first num_bytes; otherwise 0.

    Edges part at block borders only, so siblings may have a beginning in common.
    """
    alike = [other.edge for other in siblings if other is not node and other.edge.startswith(node.edge[:num_bytes])]
    if not alike:
        return 0
    common = max(common_bytes(node.edge, edge, 0) for edge in alike) // TOKEN_BYTES
    return min(common, len(node.edge) // TOKEN_BYTES - 1) * TOKEN_BYTES


def _push(
    stack: list[tuple[Node, str, str, int] | FoldedRow],
    children: list[Node],
    shown: set[Node],
    below: dict[Node, _Below],
    stem: str,
    depth: int,
) -> None:
    visible = sorted((child for child in children if child in shown), key=lambda child: (-below[child].num_tokens, child.edge))
    hidden = [below[child] for child in children if child not in shown]
    lines = ("├─ ", "│  "), ("└─ ", "   ")
    rows: list[tuple[Node, str, str, int] | FoldedRow] = []
    for position, child in enumerate(visible):
        branch, beside = lines[position == len(visible) - 1 and not hidden]
        rows.append((child, stem + branch, stem + beside, depth) if depth else (child, "", "", 0))
    if hidden:
        num_nodes, num_tokens = sum(part.num_nodes for part in hidden), sum(part.num_tokens for part in hidden)
        rows.append(FoldedRow(stem + lines[1][0] if depth else "", depth, num_nodes, num_tokens))
    stack += reversed(rows)


def _row(part: tuple[NodeRow, bytes, bool] | Row, decode: Decoder | None) -> Row:
    if not isinstance(part, tuple):
        return part
    row, key, is_preceded = part
    ids = np.frombuffer(key, "<i4").tolist()
    if decode is not None:
        beginning = decode(ids[:DECODED_TOKENS]) + ("…" if len(ids) > DECODED_TOKENS else "")
    else:
        beginning = " ".join(map(str, ids[:BEGINNING_TOKENS])) + (" …" if len(ids) > BEGINNING_TOKENS else "")
    beginning = "… " * is_preceded + beginning
    return NodeRow(row.stem, row.depth, row.num_tokens, row.num_blocks, row.leased, row.last_use, row.hits, beginning)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
