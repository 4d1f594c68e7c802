"""Every code block of README.md and docs/ is executed or checked, and every link, path and command in them exists.

For who writes a document, what each fence means:

- ```python: run, unchanged. The blocks of one file run in their order, in one namespace, in an empty folder that holds a `document.txt`.
  Every name of a model or tokenizer that `AutoModelForCausalLM` or `AutoTokenizer` is asked for gives a tiny random Qwen2 or a tokenizer of
  bytes (tests/stand_ins.py). `READERS_OWN` below names what a block may use without having made it; `model` is such a one, unpatched. There
  is no mark that skips a block: what cannot run without a GPU or a download is not Python to a document, but `text`.
- A comment behind a `print` says what that line prints, if it begins with a number, a quote, a bracket, True, False or None:
  `print(lease.length)    # 100`. It must then be all of it; `...` stands for anything. Other comments are for the reader alone.
- ```text output, right behind a Python block: all that the block prints, `...` standing for anything.
- ```sh: each command is checked, not run: targets of make, options of `python FILE` and `python -m MODULE` (against their --help), files
  given to pytest, extras given to pip. So is a command in the prose, `make test`.
- ```text, ```mermaid, ```toml: shown as they are. A fence without a language fails.

In the prose, a path with a folder in it, `tests/test_exact.py`, must exist, and so must a test, `tests/test_exact.py::test_name`.
Links may lead to files, folders and headings of this repository, and those must exist, or out of it, which is not checked.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.markdown import Block, Document, read_markdown
from tests.shell_lines import ROOT, check_shell, is_command, require_path
from tests.stand_ins import byte_tokenizer, small_model, stand_in_for_downloads

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md"]
SHELL = ("sh", "bash")
SHOWN = ("text", "mermaid", "toml")
OUTPUT = ("text", "output")
DOCUMENT = "Anna keeps the light of Skerry Point. It stands in the north, and has since 1873.\n"


def names(paths: list[Path]) -> dict[str, Any]:
    return {"argvalues": paths, "ids": [path.relative_to(ROOT).as_posix() for path in paths]}


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder and what is on the reader's mind; what a block does to logging and random numbers is undone."""
    stand_in_for_downloads(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "document.txt").write_text(DOCUMENT, encoding="utf-8")
    loggers = [logging.getLogger(name) for name in (None, "radixkv")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield readers_own()
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def readers_own() -> dict[str, Any]:
    """What a block may use without having made it."""
    tokenizer = byte_tokenizer()
    input_ids = tokenizer(DOCUMENT + "Who keeps the light?", return_tensors="pt")["input_ids"]
    return {
        "__name__": "__main__",
        "tokenizer": tokenizer,
        "model": small_model(tokenizer),
        "document": DOCUMENT,
        "questions": ["Who keeps the light?", "Where does it stand?", "Since when?"],
        "messages": [{"role": "user", "content": "Who keeps the light?"}],
        "input_ids": input_ids,
        "ids": input_ids,
    }


@pytest.mark.parametrize("path", **names(PAGES))
def test_python_blocks_run_and_print_what_they_say(path, reader):
    document = read_markdown(path)
    for index, block in enumerate(document.blocks):
        if block.language == "python":
            printed = run_block(document, block, reader)
            following = document.blocks[index + 1 : index + 2]
            if following and following[0].info == OUTPUT:
                assert matches(following[0].text, printed), f"{path.name}:{following[0].line}: the block before prints\n{printed}"
        elif block.info == OUTPUT:
            assert index and document.blocks[index - 1].language == "python", f"{path.name}:{block.line}: the output of no block"
    handle = getattr(reader["model"], "radixkv", None)
    if handle is not None:
        handle.check()


@pytest.mark.parametrize("path", **names(PAGES))
def test_every_block_has_a_language_that_is_checked_or_shown(path):
    for block in read_markdown(path).blocks:
        assert block.language in ("python", *SHELL, *SHOWN), f"{path.name}:{block.line}: {block.language or 'no language'}"
        assert len(block.info) == 1 or block.info == OUTPUT, f"{path.name}:{block.line}: what does {' '.join(block.info)} mean?"


@pytest.mark.parametrize("path", **names(LINKING))
def test_commands_can_be_typed(path):
    document = read_markdown(path)
    for block in document.blocks:
        if block.language in SHELL:
            check_shell(block.text)
    for _, span in document.code_spans():
        if is_command(span):
            check_shell(span)


@pytest.mark.parametrize("path", **names(LINKING))
def test_links_paths_and_names_of_tests_are_alive(path):
    document = read_markdown(path)
    for line, target in document.links():
        check_link(document, line, target)
    for _, span in document.code_spans():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|md|toml)(::\w+)*", span):
            require_path(span)


def test_every_page_is_in_the_index():
    index = {target for _, target in read_markdown(ROOT / "docs" / "README.md").links()}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= index


def check_link(document: Document, line: int, target: str) -> None:
    if re.match(r"https?://|mailto:", target):
        return
    name, _, anchor = target.partition("#")
    linked = document.path.parent / name if name else document.path
    assert linked.exists(), f"{document.path.name}:{line} links to {target}"
    if anchor and linked.suffix == ".md":
        assert anchor in read_markdown(linked).anchors(), f"{document.path.name}:{line} links to {target}: there is no such heading"


def run_block(document: Document, block: Block, namespace: dict[str, Any]) -> str:
    """Run a block and check the comments behind its prints; what it printed."""
    name, by_line = document.path.name, defaultdict[int, list[str]](list)
    stream = io.StringIO()

    def record(*values: Any, sep: str | None = " ", **options: Any) -> None:
        frame = sys._getframe(1)
        if frame.f_code.co_filename == name:
            by_line[frame.f_lineno].append((" " if sep is None else sep).join(map(str, values)))
        print(*values, sep=sep, **{"file": stream, **options})

    namespace["print"] = record
    # Blank lines before it, so that a traceback names the line of the document.
    code = compile("\n" * (block.line - 1) + block.text, name, "exec")
    with contextlib.redirect_stdout(stream):
        exec(code, namespace)
    for line, expected in printed_comments(block):
        assert line in by_line, f"{name}:{line}: the print was not reached"
        printed = " ".join(by_line[line])
        assert matches(expected, printed), f"{name}:{line} prints {printed}"
    return stream.getvalue()


def printed_comments(block: Block) -> list[tuple[int, str]]:
    """The lines on which a print has a comment that says what it prints, and that."""
    printing, said = set(), []
    for token in tokenize.generate_tokens(io.StringIO(block.text).readline):
        line = token.start[0] + block.line - 1
        if token.type == tokenize.NAME and token.string == "print":
            printing.add(line)
        elif token.type == tokenize.COMMENT and line in printing:
            text = token.string.lstrip("# ")
            if re.match(r"-?\d|['\"\[({]|(True|False|None)\b", text):
                said.append((line, text))
    return said


def matches(expected: str, printed: str) -> bool:
    """Whether they are equal, `...` standing for anything, and spaces at the ends of lines and of all for nothing."""
    wanted, got = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (expected, printed))
    return re.fullmatch(re.escape(wanted).replace(re.escape("..."), ".*"), got, re.DOTALL) is not None


BROKEN = {
    "prints another number": ("```python\nx = 1\nprint(x)    # 2\n```\n", test_python_blocks_run_and_print_what_they_say, "prints 1"),
    "never prints": ("```python\nif 0:\n    print(1)    # 1\n```\n", test_python_blocks_run_and_print_what_they_say, "not reached"),
    "other output": (
        "```python\nprint('a')\nprint('b')\n```\n```text output\na\nc...\n```\n",
        test_python_blocks_run_and_print_what_they_say,
        "the block before prints",
    ),
    "no language": ("```\nmake test\n```\n", test_every_block_has_a_language_that_is_checked_or_shown, "no language"),
    "a skip": ("```python skip\nx\n```\n", test_every_block_has_a_language_that_is_checked_or_shown, "python skip"),
    "no target": ("```sh\nmake tea    # now\n```\n", test_commands_can_be_typed, "tea"),
    "no command": ("`python -m radixkv tea`", test_commands_can_be_typed, "there is no command 'tea'"),
    "no option": ("```sh\nX=1 python bench/replay.py --seeds 3\n```\n", test_commands_can_be_typed, "no option --seeds"),
    "no script": ("```sh\ngit clone x && python bench/tea.py\n```\n", test_commands_can_be_typed, "there is no bench/tea.py"),
    "no extra": ("`pip install 'radixkv[tea]'`", test_commands_can_be_typed, "no extra tea"),
    "no constraints": ("`pip install -c tea.txt .`", test_commands_can_be_typed, "tea.txt"),
    "unknown program": ("```sh\nbrew tea\n```\n", test_commands_can_be_typed, "how to check brew"),
    "dead link": ("[a](b.md)", test_links_paths_and_names_of_tests_are_alive, "links to b.md"),
    "dead image": ('<img alt="x" src="b.svg">', test_links_paths_and_names_of_tests_are_alive, "links to b.svg"),
    "dead anchor": ("# One `two`, three\n[a](#one-two-three) [b](#four)", test_links_paths_and_names_of_tests_are_alive, "links to #four"),
    "dead path": ("see `tests/test_tea.py`", test_links_paths_and_names_of_tests_are_alive, "there is no tests/test_tea.py"),
    "dead test": ("see `tests/test_docs.py::test_tea`", test_links_paths_and_names_of_tests_are_alive, "has no test_tea"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_in_a_document_is_found(case, tmp_path, reader):
    text, test, said = BROKEN[case]
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    options = {"reader": reader} if test is test_python_blocks_run_and_print_what_they_say else {}
    with pytest.raises(AssertionError, match=re.escape(said)):
        test(page, **options)


def test_a_fence_that_is_not_closed_is_found(tmp_path):
    (tmp_path / "page.md").write_text("text\n```python\n", encoding="utf-8")
    with pytest.raises(ValueError, match="the fence of line 2 is not closed"):
        read_markdown(tmp_path / "page.md")
