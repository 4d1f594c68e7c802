"""The prompts of bench/generate.py: questions on documents, in text for a real model and as random ids for another."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.demo.documents import build_prompts, shipped_documents

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Questions on documents.

    Attributes:
        name: for the table. prompts: document and question each. documents: the leading tokens that all prompts of one document share.
        owners: of each prompt which document. one_call: whether all prompts are there at once, or one comes after the other is answered.
    """

    name: str
    prompts: tuple[Tokens, ...]
    documents: tuple[Tokens, ...]
    owners: tuple[int, ...]
    one_call: bool

    @property
    def num_shared(self) -> int:
        """Prompt tokens that need not be computed if every document is computed once."""
        repeated = sum(len(self.documents[owner]) for owner in self.owners)
        return repeated - sum(len(self.documents[owner]) for owner in set(self.owners))


class RandomDocuments:
    """Documents of random ids; those of each round are new.

    Args:
        vocab_size: ids are below it. document_len: tokens of a document. question_len: of a question.
    """

    def __init__(self, vocab_size: int, document_len: int = 500, question_len: int = 20):
        self._vocab_size, self._document_len, self._question_len = vocab_size, document_len, question_len

    def prompts(self, round_number: int, counts: Sequence[int]) -> tuple[list[Tokens], list[list[Tokens]]]:
        """Of each document its tokens, and its prompts, as many as counts says."""
        numbers = random.Random(round_number)

        def draw(length: int) -> Tokens:
            return tuple(numbers.randrange(3, self._vocab_size) for _ in range(length))

        documents = [draw(self._document_len) for _ in counts]
        prompts = []
        for document, count in zip(documents, counts, strict=True):
            prompts.append([(*document, 3 + i, *draw(self._question_len - 1)) for i in range(count)])
        return documents, prompts


class TextDocuments:
    """The shipped documents, whose sentences are in another order in each document and round; questions are numbered.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def prompts(self, round_number: int, counts: Sequence[int]) -> tuple[list[Tokens], list[list[Tokens]]]:
        """As `RandomDocuments.prompts`."""
        shipped = shipped_documents()
        known = [question for document in shipped for question in document.questions]
        documents, prompts = [], []
        for index, count in enumerate(counts):
            document = shipped[index % len(shipped)]
            sentences = re.split(r"(?<=[.!?])\s+", document.text)
            random.Random(f"{round_number} {index}").shuffle(sentences)
            questions = tuple(f"Question {i + 1}: {known[i % len(known)]}" for i in range(count))
            built = build_prompts(type(document)(document.title, " ".join(sentences), questions), self._tokenizer)
            documents.append(tuple(built[0].tokens[: built[0].shared_len]))
            prompts.append([tuple(prompt.tokens) for prompt in built])
        return documents, prompts


def build_cases(source: RandomDocuments | TextDocuments, round_number: int, *, num_questions: int, num_zipf: int) -> list[Case]:
    """The cases of one round.

    Args:
        source: of the prompts. round_number: another one has other documents. num_questions: per document of the first cases.
        num_zipf: questions of the last one, on 5 documents in proportion to 1, 1/2, 1/3, 1/4, 1/5.
    """
    documents, prompts = source.prompts(2 * round_number, [num_questions] * 2)
    first = tuple(prompts[0])
    pairs = [(prompt, owner) for owner, rows in enumerate(prompts) for prompt in rows]
    random.Random(round_number).shuffle(pairs)
    shuffled, owners = (tuple(column) for column in zip(*pairs, strict=True))
    both = tuple(documents)
    cases = [
        Case(f"a: {num_questions} questions on 1 document, one by one", first, both[:1], (0,) * len(first), False),
        Case(f"a: {num_questions} questions on 1 document, at once", first, both[:1], (0,) * len(first), True),
        Case(f"b: {len(pairs)} questions on 2 documents, one by one", shuffled, both, owners, False),
        Case(f"c: {len(pairs)} questions on 2 documents, at once", shuffled, both, owners, True),
    ]
    asked = random.Random(round_number).choices(range(5), [1 / (rank + 1) for rank in range(5)], k=num_zipf)
    documents, prompts = source.prompts(2 * round_number + 1, [asked.count(document) for document in range(5)])
    left = [iter(rows) for rows in prompts]
    zipf = tuple(next(left[document]) for document in asked)
    return [*cases, Case(f"d: {num_zipf} questions on 5 documents, at once", zipf, tuple(documents), tuple(asked), True)]
