"""The documents that the demo asks about, and the prompts made of them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from radixkv.demo.errors import DemoError

GENERAL_QUESTIONS = (
    "What is this text about?",
    "Which people or things does the text name?",
    "What happens first?",
    "What happens last?",
    "Which number in the text matters most?",
    "What would be a good title for this text?",
)


@dataclass(frozen=True)
class Document:
    """A text and the questions asked about it."""

    title: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Prompt:
    """One question about one document, as the model gets it.

    `shared_len` is how many of its first tokens every prompt of the same document has in common.
    """

    question: str
    tokens: tuple[int, ...]
    shared_len: int


def shipped_documents() -> list[Document]:
    """The documents that come with the package, each with its questions."""
    folder = files("radixkv.demo") / "documents"
    documents = []
    for name in ("lighthouse.toml", "aral_sea.toml"):
        fields = tomllib.loads((folder / name).read_text(encoding="utf-8"))
        documents.append(Document(fields["title"], fields["text"].strip(), tuple(fields["questions"])))
    return documents


def choose_documents(path: str | None, questions: Sequence[str]) -> list[Document]:
    """The shipped documents, the first of them replaced by the caller's text or questions.

    Args:
        path: A text file in UTF-8, or None for the shipped document.
        questions: What to ask about the first document; empty for its own questions.

    Raises:
        DemoError: The file cannot be read or is empty, or a question is empty.
    """
    documents = shipped_documents()
    if path is not None:
        documents[0] = Document(Path(path).name, _read_text(path), GENERAL_QUESTIONS)
    if any(not question.strip() for question in questions):
        raise DemoError("--question: a question must not be empty")
    if questions:
        documents[0] = replace(documents[0], questions=tuple(questions))
    return documents


def build_prompts(document: Document, tokenizer: Any) -> list[Prompt]:
    """One prompt for each question: the document first, the question last.

    Args:
        document: The text and its questions.
        tokenizer: A transformers tokenizer; its chat template is used if it has one.
    """
    rows = [_encode(f"{document.text}\n\n{question}", tokenizer) for question in document.questions]
    shared_len = min(_common_len(rows[0], row) for row in rows)
    # A prompt is never shared to its end: what is left is computed.
    shared_len = min(shared_len, min(map(len, rows)) - 1)
    return [Prompt(question, row, shared_len) for question, row in zip(document.questions, rows, strict=True)]


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DemoError(f"--document: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DemoError(f"--document: {path} is not a text file in UTF-8") from error
    if not text:
        raise DemoError(f"--document: {path} is empty")
    return text


def _encode(text: str, tokenizer: Any) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
    else:
        encoded = tokenizer(text + "\n")
    return tuple(encoded["input_ids"])


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
