"""The requests of bench/scenarios.py: how users ask a model again about what it has read before."""

from __future__ import annotations

import importlib.util
import json
import pydoc_data.topics
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from radixkv.bench import scenario_texts as texts
from radixkv.demo.documents import shipped_documents

Tokens = tuple[int, ...]
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sizes:
    """How much of everything; `_tokens` are tokens of the model's tokenizer, before the chat template."""

    rag_documents: int
    rag_document_tokens: int
    rag_questions: int
    rag_new: int
    chat_users: int
    chat_turns: int
    chat_new: int
    few_shot_queries: int
    few_shot_new: int
    code_context_tokens: int
    code_requests: int  # of each of the two repositories
    code_new: int
    best_of_tasks: int
    best_of_samples: int
    best_of_new: int
    long_counted: int  # new tokens on the model of two layers
    long_timed: int  # new tokens on the model itself


FULL = Sizes(
    *(5, 2000, 100, 16),
    *(4, 8, 48),
    *(16, 32),
    *(3000, 4, 32),
    *(2, 8, 32),
    *(1000, 256),
)
QUICK = Sizes(
    *(2, 600, 10, 8),
    *(2, 4, 16),
    *(6, 16),
    *(900, 3, 16),
    *(1, 4, 16),
    *(200, 24),
)


@dataclass(frozen=True)
class Request:
    """One prompt, as the model gets it.

    Attributes:
        number: the same request has the same number whenever it arrives. prompt: its tokens. owner: what it asks about, or whose it is.
        prefix_len: the leading tokens that all prompts of one owner share, or as much of them as is known when the first one arrives.
    """

    number: int
    prompt: Tokens
    owner: str
    prefix_len: int


@dataclass(frozen=True)
class Scenario:
    """Requests in the order in which they arrive.

    Attributes:
        name: as the command line calls it. num_requests: how many. num_new: the most tokens of an answer. request: the one that arrives
            as number i, given the unpatched model's answers to those before it. num_samples: answers drawn for each prompt; 1 is greedy.
        fixed_len: whether every answer has num_new tokens, and what is counted is the whole call and not its prompt alone.
    """

    name: str
    num_requests: int
    num_new: int
    request: Callable[[int, Sequence[Tokens]], Request]
    num_samples: int = 1
    fixed_len: bool = False


def build_scenario(name: str, tokenizer: Any, sizes: Sizes, seed: int) -> Scenario:
    """A scenario by its name.

    Args:
        name: "rag", "chat", "few-shot", "code", "best-of-n" or "long-output". tokenizer: of the model, with a chat template. sizes: of
            everything. seed: of what is drawn: which question comes next, and who writes next.
    """
    numbers = random.Random(f"{name} {seed}")
    return BUILDERS[name](tokenizer, sizes, numbers)


def encode_chat(tokenizer: Any, messages: Messages) -> Tokens:
    """The tokens of a conversation, up to where the model is to go on."""
    return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])


def cut_text(tokenizer: Any, text: str, num_tokens: int) -> str:
    """The beginning of a text, whole lines of at most so many tokens; at least one line."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(tokens) <= num_tokens:
        return text
    lines = tokenizer.decode(tokens[:num_tokens]).split("\n")
    return "\n".join(lines[:-1] if len(lines) > 1 else lines)


def find_terms(text: str, count: int) -> list[str]:
    """The words of at least six letters that come most often in a text."""
    words = Counter(re.findall(r"[a-z]{6,}", text))
    return [word for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0]))[:count]]


def rag_documents(tokenizer: Any, sizes: Sizes) -> list[str]:
    """Chapters of Python's own documentation."""
    topics = pydoc_data.topics.topics
    chosen = texts.RAG_TOPICS[: sizes.rag_documents]
    return [cut_text(tokenizer, "\n".join(topics[name] for name in names), sizes.rag_document_tokens) for names in chosen]


def _build_rag(tokenizer: Any, sizes: Sizes, numbers: random.Random) -> Scenario:
    documents = rag_documents(tokenizer, sizes)
    ranks = range(len(documents))
    asked = numbers.choices(ranks, [1 / (rank + 1) for rank in ranks], k=sizes.rag_questions)
    rows: list[tuple[str, Messages]] = []
    for rank, document in enumerate(documents):
        pairs = [(question, term) for question in texts.RAG_QUESTIONS for term in find_terms(document, 12)]
        for question, term in numbers.sample(pairs, asked.count(rank)):
            content = f"{document}\n\nQuestion: {question.format(term=term)}"
            rows.append((f"document {rank}", [_system(texts.RAG_SYSTEM), _user(content)]))
    requests = _requests(tokenizer, rows)
    left = {rank: iter([request for request in requests if request.owner == f"document {rank}"]) for rank in ranks}
    return _fixed("rag", [next(left[rank]) for rank in asked], sizes.rag_new)


def _build_few_shot(tokenizer: Any, sizes: Sizes, _numbers: random.Random) -> Scenario:
    parts = [texts.FEW_SHOT_TASK]
    for message, product, kind, action, urgency in texts.FEW_SHOT_EXAMPLES:
        record = json.dumps({"product": product, "kind": kind, "action": action, "urgency": urgency})
        parts.append(f"Message: {message}\nRecord: {record}")
    queries = texts.FEW_SHOT_QUERIES[: sizes.few_shot_queries]
    rows = [("examples", [_user("\n\n".join([*parts, f"Message: {query}\nRecord:"]))]) for query in queries]
    return _fixed("few-shot", _requests(tokenizer, rows), sizes.few_shot_new)


def _build_code(tokenizer: Any, sizes: Sizes, numbers: random.Random) -> Scenario:
    rows = []
    for index, (modules, edits) in enumerate(texts.CODE_CONTEXTS):
        context = cut_text(tokenizer, "\n".join(map(_source, modules)), sizes.code_context_tokens)
        for edit in edits[: sizes.code_requests]:
            rows.append((f"repository {index}", [_system(texts.CODE_SYSTEM), _user(f"{context}\n\nRequest: {edit}")]))
    requests = _requests(tokenizer, rows)
    numbers.shuffle(requests)
    return _fixed("code", requests, sizes.code_new)


def _build_best_of_n(tokenizer: Any, sizes: Sizes, _numbers: random.Random) -> Scenario:
    # The task comes first, so that two prompts share next to nothing: what is shared is one prompt among its samples.
    pairs = [(document, task) for task in texts.BEST_OF_TASKS[: sizes.best_of_tasks] for document in shipped_documents()]
    requests = []
    for index, (document, task) in enumerate(pairs):
        prompt = encode_chat(tokenizer, [_user(f"{task}\n\n{document.text}")])
        requests.append(Request(index, prompt, f"prompt {index}", len(prompt) - 1))
    return Scenario("best-of-n", len(requests), sizes.best_of_new, lambda i, _answers: requests[i], sizes.best_of_samples)


def _build_long_output(tokenizer: Any, sizes: Sizes, _numbers: random.Random) -> Scenario:
    prompt = encode_chat(tokenizer, [_user(texts.LONG_PROMPT)])
    request = Request(0, prompt, "prompt", len(prompt) - 1)
    return Scenario("long-output", 1, sizes.long_timed, lambda _i, _answers: request, fixed_len=True)


class _Chat:
    """Conversations of several users, who write by turns; each prompt holds the model's earlier answers."""

    def __init__(self, tokenizer: Any, sizes: Sizes, numbers: random.Random):
        self._tokenizer, self._num_turns = tokenizer, sizes.chat_turns
        users = list(range(sizes.chat_users))
        # One message of each user in each round, in an order of its own, so that nobody can count on coming next.
        self.turns = [(user, turn) for turn in range(sizes.chat_turns) for user in numbers.sample(users, len(users))]
        first, second = (encode_chat(tokenizer, [_system(texts.CHAT_SYSTEM), _user(letter)]) for letter in "AB")
        self._prefix_len = len(commonprefix([first, second]))

    def request(self, arrival: int, answers: Sequence[Tokens]) -> Request:
        user, turn = self.turns[arrival]
        messages = [_system(texts.CHAT_SYSTEM)]
        for earlier in range(turn):
            answer = answers[self.turns.index((user, earlier))]
            said = self._tokenizer.decode(answer, skip_special_tokens=True)
            messages += [self._message(user, earlier), {"role": "assistant", "content": said}]
        messages.append(self._message(user, turn))
        return Request(user * self._num_turns + turn, encode_chat(self._tokenizer, messages), "system prompt", self._prefix_len)

    def _message(self, user: int, turn: int) -> dict[str, str]:
        return _user(texts.CHAT_TURNS[turn].format(subject=texts.CHAT_SUBJECTS[user]))


def _build_chat(tokenizer: Any, sizes: Sizes, numbers: random.Random) -> Scenario:
    chat = _Chat(tokenizer, sizes, numbers)
    return Scenario("chat", len(chat.turns), sizes.chat_new, chat.request)


def _requests(tokenizer: Any, rows: Iterable[tuple[str, Messages]]) -> list[Request]:
    """The prompts of conversations, numbered in their order."""
    encoded = [(owner, encode_chat(tokenizer, messages)) for owner, messages in rows]
    prefix_lens = {}
    for owner in {owner for owner, _ in encoded}:
        prompts = [prompt for name, prompt in encoded if name == owner]
        # A prefix never holds a whole prompt: what is left is computed.
        prefix_lens[owner] = min(len(commonprefix(prompts)), min(map(len, prompts)) - 1)
    return [Request(number, prompt, owner, prefix_lens[owner]) for number, (owner, prompt) in enumerate(encoded)]


def _fixed(name: str, requests: Sequence[Request], num_new: int) -> Scenario:
    """A scenario whose requests do not depend on answers."""
    return Scenario(name, len(requests), num_new, lambda i, _answers: requests[i])


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"the standard library has no {module}"
    return f"# file: {module.replace('.', '/')}.py\n{Path(spec.origin).read_text(encoding='utf-8')}"


def _system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


BUILDERS: dict[str, Callable[[Any, Sizes, random.Random], Scenario]] = {
    "rag": _build_rag,
    "chat": _build_chat,
    "few-shot": _build_few_shot,
    "code": _build_code,
    "best-of-n": _build_best_of_n,
    "long-output": _build_long_output,
}
