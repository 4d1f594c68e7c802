"""tree(): the tree as text, with rich and as HTML; bounded, exact in what it counts, and safe whatever a prompt says."""

from __future__ import annotations

import html.parser
import io
import random
import re
import sys
from typing import Any

import pytest
from rich.console import Console

import radixkv
from radixkv import tree_view
from radixkv.tree import RadixTree
from radixkv.tree_view import FoldedRow, NamespaceRow, NodeRow
from tests.models import prompt, tiny_qwen2
from tests.small_cache import ask, keep, small_cache
from tests.test_explain import state_of


class Speller:
    """Every id is a piece of one nasty text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, ids: list[int]) -> str:
        return "".join(self.text[id % len(self.text)] for id in ids)


NASTY = '<script>alert("&")</script>[red]\x1b[2J\n\r\u202e\0'


def rows_of(tree: RadixTree, **options) -> list[tuple]:
    return [(type(row).__name__[:-3], row.depth) for row in tree(**options).rows]


def test_the_text_of_a_small_tree():
    cache = small_cache()
    keep(cache, range(40))
    keep(cache, [*range(32), *range(900, 930)])
    assert ask(cache, [*range(40), 7]) == 40
    lease = cache.match_prefix(range(32))
    cache.tree.insert([5, 6], [cache.allocate(1)[0]], ("tenant",))
    lines = str(cache.tree()).splitlines()
    uses = [int(use) for use in re.findall(r"last use (\d+)", str(cache.tree()))]
    assert lines == [
        "2 namespaces, 4 nodes, 73 tokens in 6 blocks of 16 (2 leased)",
        "namespace (('weights', 0), ('cache', ()), ('call', ())): 3 nodes, 71 tokens",
        f"└─ 32 tokens, 2 blocks, last use {uses[0]}, 1 hit, leased  0 1 2 3 4 5 6 7 …",
        f"   ├─ 30 tokens, 2 blocks, last use {uses[1]}, 0 hits  900 901 902 903 904 905 906 907 …",
        f"   └─ 9 tokens, 1 block, last use {uses[2]}, 1 hit  32 33 34 35 36 37 38 39 …",
        "namespace ('tenant',): 1 node, 2 tokens",
        f"└─ 2 tokens, 1 block, last use {uses[3]}, 0 hits  5 6",
    ]
    assert uses[0] == max(uses[:3])  # whoever used what is below used it too
    lease.release()
    assert repr(cache.tree()) == str(cache.tree()) and "leased  " not in str(cache.tree())


def test_siblings_that_begin_alike_are_shown_by_what_differs():
    """Edges part at block borders; what is shown of two that part inside of a block are the tokens from there on."""
    cache = small_cache()
    for end in ([901, 902], [901, 903, 904], [500, 501, 502, 503]):
        keep(cache, [*range(12), *end])
    keep(cache, range(800, 816))
    beginnings = sorted(row.beginning for row in cache.tree().rows if isinstance(row, NodeRow))
    assert beginnings == [
        "800 801 802 803 804 805 806 807 …",
        "… 500 501 502 503",
        "… 902",
        "… 903 904",
    ]
    told = [row.beginning for row in cache.tree(tokenizer=Speller("abcdefghij")).rows if isinstance(row, NodeRow)]
    assert len(set(told)) == 4


def test_hits_of_what_was_evicted_stay_with_what_it_hung_on():
    cache = small_cache()
    keep(cache, range(16))
    keep(cache, [*range(16), 50, 51])
    keep(cache, [*range(16), 60, 61])
    for _ in range(3):
        ask(cache, [*range(16), 50, 51, 52])
    cache.pool.release(cache.tree.evict(2))
    assert [row.hits for row in cache.tree().rows if isinstance(row, NodeRow)] == [3]


def test_looking_changes_nothing():
    cache = small_cache()
    for first in range(9):
        keep(cache, [first, *range(20)])
    before = state_of(cache.tree), cache.stats()
    view = cache.tree()
    str(view), view._repr_html_(), view.__rich__()
    assert (state_of(cache.tree), cache.stats()) == before


@pytest.mark.parametrize("max_nodes", [1, 2, 7, 50, 10**6])
def test_what_is_folded_is_counted(max_nodes):
    rng = random.Random(max_nodes)
    tree = RadixTree(4)
    for i in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        tree.insert(tokens, range(100 * i, 100 * i - (-len(tokens) // 4)), (i % 3,))
    tree.check()
    rows = tree(max_nodes=max_nodes).rows
    shown = [row for row in rows if isinstance(row, NodeRow)]
    folded = [row for row in rows if isinstance(row, FoldedRow)]
    num_nodes = len(tree.nodes()) - len(tree.roots())
    assert len(shown) + sum(isinstance(row, NamespaceRow) for row in rows) == min(max_nodes, num_nodes + 3)
    assert len(shown) + sum(row.num_nodes for row in folded) == num_nodes
    assert sum(row.num_tokens for row in shown) + sum(row.num_tokens for row in folded) == tree.num_tokens
    assert len(rows) <= 2 * max_nodes + 1
    assert f"{num_nodes:,} nodes" in tree().summary


def test_ten_thousand_nodes_make_a_short_text():
    tree = RadixTree(4)
    for i in range(10_000):
        tree.insert([i, *range(i % 7)], range(10 * i, 10 * i + -(-(1 + i % 7) // 4)))
    for text in (str(tree()), tree()._repr_html_()):
        assert len(text) < 30_000 and "… 9,951 nodes more" in text


def test_a_chain_of_5000_nodes_needs_no_recursion():
    tree = RadixTree(4)
    tokens: list[int] = []
    for turn in range(5000):
        tokens += [turn, 1, 2, 3]
        tree.insert([*tokens, 7000], range(6000 * turn, 6000 * turn + turn + 2))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        text, page = str(tree()), tree()._repr_html_()
    finally:
        sys.setrecursionlimit(limit)
    assert len(text) < 10_000 and len(page) < 30_000
    assert max(row.depth for row in tree().rows) <= tree_view.MAX_DEPTH + 1
    assert re.search(r"… 9,9\d\d nodes more", text)


class Page(html.parser.HTMLParser):
    """Tags that were opened, in order, and the text between; everything that is opened must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_prompt_cannot_leave_its_cell():
    """Neither as HTML, nor as markup of rich, nor as codes of a terminal."""
    cache = small_cache(namespace=("<script>",))
    speller = Speller(NASTY)
    keep(cache, range(len(NASTY)))
    keep(cache, [8, *range(len(NASTY))])
    view = cache.tree(tokenizer=speller)
    page = Page(view._repr_html_())
    assert page.tags <= {"div", "b", "i", "table", "tr", "th", "td"} and set(page.attributes) <= {"style", "colspan"}
    assert '"<script>alert("&"…' in page.text and "('cache', ('<script>',))" in page.text
    assert "src" not in view._repr_html_() and "http" not in view._repr_html_()
    written = io.StringIO()
    console = Console(file=written, width=300, force_terminal=True)
    tail = small_cache()
    keep(tail, range(NASTY.index("[red]"), len(NASTY)))
    tail_view = tail.tree(tokenizer=speller)
    console.print(tail_view)
    printed = written.getvalue()
    assert r"[red]\x1b[2J\n\r\u202e\x00" in printed and "\x1b[2J" not in printed
    for text in (str(view), str(tail_view)):
        assert all(line.isprintable() for line in text.splitlines()) and "\r" not in text


def test_rich_prints_what_str_does(capsys):
    cache = small_cache()
    for first in range(80):
        keep(cache, [first])
        cache.pool.release(cache.tree.evict(0))
        if cache.pool.num_free < 2:
            break
    written = io.StringIO()
    console = Console(file=written, width=200)
    view = cache.tree()
    console.print(view)
    assert written.getvalue().rstrip("\n") == str(view)
    view.print()
    assert capsys.readouterr().out.splitlines()[0] == view.summary


def test_without_rich_it_prints_its_text(monkeypatch, capsys):
    cache = small_cache()
    keep(cache, range(20))
    monkeypatch.setattr(tree_view, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rich", None)
    view = cache.tree()
    view.print()
    assert capsys.readouterr().out == f"{view}\n"


def test_stale_namespaces_say_so():
    cache = small_cache()
    keep(cache, range(20))
    lease = cache.match_prefix(range(20))
    cache.invalidate()
    keep(cache, range(5))
    states = {row.name: row.stale for row in cache.tree().rows if isinstance(row, NamespaceRow)}
    assert list(states.values()) == [True, False] and "1 node, 20 tokens, stale" in str(cache.tree())
    lease.release()


def test_of_a_patched_model():
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=20, block_size=16)
    assert str(model.radixkv.tree()) == "0 namespaces, 0 nodes, 0 tokens in 0 blocks of 16 (0 leased)"
    model.generate(prompt(20, seed=1)[None], max_new_tokens=3, do_sample=False)
    assert rows_of(model.radixkv.tree) == [("Namespace", 0), ("Node", 1)]
    assert "22 tokens, 2 blocks" in str(model.radixkv.tree())


def test_bad_input_is_refused_in_words():
    tree = RadixTree(4)
    wrong: list[Any] = [0, -1, 2.0, True]
    for max_nodes in wrong:
        with pytest.raises(ValueError, match="tree: max_nodes must be an int of at least 1"):
            tree(max_nodes=max_nodes)
    with pytest.raises(ValueError, match=r"tree: tokenizer must have a decode\(ids\) method, got int"):
        tree(tokenizer=3)
