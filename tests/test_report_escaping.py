"""What prompts say in a report: text to every parser, and nothing in the page asks for anything from elsewhere."""

from __future__ import annotations

import html.parser
import json
import re

from radixkv.report import embed_json
from tests.small_cache import ask, keep, small_cache
from tests.test_report import read

NASTY = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 2'>",
    "<!--<script>",
    "]]>\u2028\u2029\x00\x1b[2J\r\u202e",
    "\"'`&quot;&amp;&lt;",
    "{{7*7}}%%data%%%%script%%\\u003cb\\u003e",
    "javascript:window.ran = 3",
    "line one\nline two\ttab",
]


class Speller:
    """The id n is the n-th nasty text."""

    def decode(self, ids: list[int]) -> str:
        return "".join(NASTY[id % len(NASTY)] for id in ids)


def nasty_cache():
    """One prefix for each nasty text, below a namespace of the same kind, and one that was evicted."""
    cache = small_cache(namespace=(NASTY[0], NASTY[1]))
    keep(cache, [100 * len(NASTY) + 1])
    cache.pool.release(cache.tree.evict(1))
    for i in range(len(NASTY)):
        keep(cache, [i])
        ask(cache, [i, 50])
    return cache


class Parser(html.parser.HTMLParser):
    """The tags of a page with their attributes, and what its scripts hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.scripts.append("")

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style") and self.scripts:
            self.scripts[-1] += data


def test_what_a_prompt_says_is_text_to_every_parser(tmp_path):
    cache = nasty_cache()
    path = cache.report(tmp_path / "cache.html", tokenizer=Speller())
    plain = small_cache().report(tmp_path / "plain.html")
    tags = Parser(path.read_text(encoding="utf-8")).found
    # The same page as one of an empty cache: nothing of the prompts became a tag, an attribute, a script or a part of one.
    assert tags == Parser(plain.read_text(encoding="utf-8")).found
    block = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None and block[1].isascii() and not set("<>&\n") & set(block[1])
    texts = read(path)["nodes"]["text"]
    for text in (NASTY[0], NASTY[1], NASTY[4], r"]]>\u2028\u2029\x00\x1b[2J\r\u202e", "line one\nline two\\ttab"):
        assert any(told.startswith(text) for told in texts), text


def test_json_in_a_page_comes_back_as_it_was():
    value = {"text": [*NASTY, "".join(map(chr, range(300)))]}
    assert json.loads(embed_json(value)) == value
    assert not set("<>&\u2028\u2029") & set(embed_json(value))


def test_nothing_comes_from_elsewhere(tmp_path):
    text = small_cache().report(tmp_path / "cache.html").read_text(encoding="utf-8")
    assert not re.search(r"(?i)\b(https?|ftp|wss?):|//[a-z0-9-]+\.[a-z]", text)
    assert not re.search(r"(?i)@import|\burl\(|\b(src|href|action|srcset|poster|formaction)\s*=", text)
    assert not re.search(r"\bfetch\(|XMLHttp|WebSocket|EventSource|sendBeacon|\bimport\s*\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    policies = [dict(attributes)["content"] for tag, attributes in Parser(text).found if attributes.get("http-equiv")]
    (policy,) = policies
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"\*|https?:|data:|'self'", policy)
