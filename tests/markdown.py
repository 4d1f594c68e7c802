"""What the tests of the documents read in a Markdown file: its fenced blocks, its links, the anchors of its headings, its code spans."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+) *(?P<info>[^`]*)$")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?)(?: +#+)?$")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(?P<code>.+?)(?<!`)\1(?!`)")
_LINK = re.compile(r"\]\(<?(?P<target>[^)\s>]+)>?(?: +\"[^\"]*\")?\)|(?:src|href)=\"(?P<attribute>[^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        info: the words behind the fence; the first is the language. text: what is inside, without the indentation of the fence.
        line: the number in the file of the first line inside, from 1.
    """

    info: tuple[str, ...]
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info[0] if self.info else ""


@dataclass(frozen=True)
class Document:
    """A Markdown file, read.

    Attributes:
        path: of the file. blocks: in their order. prose: each line that is in no block, and its number.
    """

    path: Path
    blocks: tuple[Block, ...]
    prose: tuple[tuple[int, str], ...]

    def links(self) -> list[tuple[int, str]]:
        """The line and the target of each link and image."""
        bare = [(number, _CODE_SPAN.sub("", line)) for number, line in self.prose]
        return [(number, match["target"] or match["attribute"]) for number, line in bare for match in _LINK.finditer(line)]

    def code_spans(self) -> list[tuple[int, str]]:
        """The line and the text of each piece of code in the prose."""
        return [(number, match["code"].strip()) for number, line in self.prose for match in _CODE_SPAN.finditer(line)]

    def anchors(self) -> set[str]:
        """What a link may name behind `#`: the headings, as GitHub writes them."""
        seen: Counter[str] = Counter()
        anchors = set()
        for _, line in self.prose:
            if match := _HEADING.match(line):
                title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match["title"]).lower()
                slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
                anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return anchors


def read_markdown(path: Path) -> Document:
    """Read a Markdown file.

    Raises:
        ValueError: a fence is not closed.
    """
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    opened: re.Match[str] | None = None
    inside: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        match = _FENCE.match(line)
        if opened is None and match is None:
            prose.append((number, line))
        elif opened is None:
            opened, inside = match, []
        elif match is not None and match["fence"].startswith(opened["fence"]) and not match["info"]:
            text = "".join(f"{row.removeprefix(opened['indent'])}\n" for row in inside)
            blocks.append(Block(tuple(opened["info"].split()), text, number - len(inside)))
            opened = None
        else:
            inside.append(line)
    if opened is not None:
        raise ValueError(f"{path.name}: the fence of line {number - len(inside)} is not closed")
    return Document(path, tuple(blocks), tuple(prose))
