"""The five parts of the demo; each runs the stock and the patched model on the same prompts and reports rows and findings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from tqdm import tqdm

from radixkv.demo.documents import Prompt
from radixkv.demo.measure import Difference, Generation, compare_all, generate
from radixkv.demo.table import Row

SHUFFLE_SEED = 0
FIRST_WORDS = "A reader who asks six questions about one document has to read it only once."


@dataclass
class Report:
    """What the parts found: rows for the table, differences between answers, and figures that are not what they must be."""

    rows: list[Row] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.problems and all(difference.is_tie for difference in self.differences)

    def add(self, part: str, pairs: Sequence[Pair], reused: str = "") -> None:
        """A row that sums what pairs of runs cost."""
        found = [difference for pair in pairs for difference in pair.differences]
        num_answers = sum(len(pair.stock.answers) for pair in pairs)
        self.differences += found
        self.rows.append(
            Row(
                part,
                sum(pair.stock.computed for pair in pairs),
                sum(pair.patched.computed for pair in pairs),
                sum(pair.stock.seconds for pair in pairs),
                sum(pair.patched.seconds for pair in pairs),
                reused,
                _describe_answers(num_answers, found),
            )
        )

    def expect(self, what: str, expected: int, got: int) -> None:
        """Note a count that differs from what it must be."""
        if expected != got:
            self.problems.append(f"{what}: expected {expected:,}, got {got:,}")


@dataclass(frozen=True)
class Pair:
    """The same prompts run by both models."""

    prompts: tuple[Prompt, ...]
    stock: Generation
    patched: Generation
    differences: tuple[Difference, ...]

    @property
    def prompt_computed(self) -> int:
        """Prompt tokens of a single prompt that the patched model computed; its last new token is never computed."""
        return self.patched.computed - (self.patched.num_new - 1)

    @property
    def is_hit(self) -> bool:
        """Whether a single prompt reused at least half of itself."""
        return 2 * self.prompt_computed <= len(self.prompts[0].tokens)


@dataclass(frozen=True)
class Models:
    """The two models of the demo, over the same weights."""

    stock: Any
    patched: Any
    tokenizer: Any
    max_new_tokens: int

    @property
    def end_tokens(self) -> list[int]:
        ids = self.stock.generation_config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    def run(self, what: str, prompts: Sequence[Prompt]) -> Pair:
        """Answer prompts, as one batch, with the stock model and then with the patched one, and compare."""
        rows = [prompt.tokens for prompt in prompts]
        stock = generate(self.stock, rows, self.max_new_tokens, end_tokens=self.end_tokens)
        patched = generate(self.patched, rows, self.max_new_tokens, end_tokens=self.end_tokens)
        return Pair(tuple(prompts), stock, patched, tuple(compare_all(self.stock, what, prompts, stock, patched)))

    def forget(self) -> None:
        """Empty the cache and set its counters to zero."""
        self.patched.radixkv.clear()
        self.patched.radixkv.reset_stats()

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.tokenizer.decode(tokens, skip_special_tokens=True).split())


def show_kv_cache(models: Models, report: Report) -> None:
    """Part 1: what a K/V cache saves inside one request."""
    ids = models.tokenizer(FIRST_WORDS, add_special_tokens=False)["input_ids"][:9]
    prompts = [Prompt(FIRST_WORDS, tuple(ids), len(ids) - 1)]
    num_new = 16
    options: dict[str, Any] = {"end_tokens": models.end_tokens, "min_new_tokens": num_new}
    # One run of each model that is not measured, then an empty cache.
    models.run("warm-up", prompts)
    models.forget()
    with tqdm(total=3, desc="1 K/V cache") as bar:
        without = generate(models.stock, [ids], num_new, use_cache=False, **options)
        bar.update()
        stock = generate(models.stock, [ids], num_new, **options)
        bar.update()
        patched = generate(models.patched, [ids], num_new, **options)
        bar.update()
    for name, run in (("unpatched without a cache", without), ("unpatched with a cache", stock)):
        differences = tuple(compare_all(models.stock, f"part 1, {name}", prompts, run, patched))
        report.add(f"1 {len(ids)} + {num_new} tokens, {name}", [Pair(tuple(prompts), run, patched, differences)])
    report.expect("part 1, tokens computed without a cache", sum(range(len(ids), len(ids) + num_new)), without.computed)
    report.expect("part 1, tokens computed with a cache", len(ids) + num_new - 1, stock.computed)
    report.expect("part 1, tokens computed by the patched model", len(ids) + num_new - 1, patched.computed)


def ask_one_document(models: Models, prompts: Sequence[Prompt], report: Report) -> None:
    """Part 2: one document, its questions one after the other; the first is cold."""
    # One run of each model that is not measured, then an empty cache.
    models.run("warm-up", prompts[:1])
    models.forget()
    pairs = []
    for prompt in tqdm(prompts, desc="2 one document"):
        pair = models.run(f"part 2, {prompt.question!r}", [prompt])
        pairs.append(pair)
        tqdm.write(
            f"  {prompt.question}\n    {models.decode(pair.patched.answers[0])}\n"
            f"    tokens computed: {pair.stock.computed} unpatched, {pair.patched.computed} patched; "
            f"seconds: {pair.stock.seconds:.2f} and {pair.patched.seconds:.2f}"
        )
    report.add("2 one document, first question (cold)", pairs[:1], _describe_hits(pairs[:1]))
    if len(pairs) > 1:
        report.add(f"2 one document, {len(pairs) - 1} more (warm)", pairs[1:], _describe_hits(pairs[1:]))
    for pair in pairs[1:]:
        tail_len = len(pair.prompts[0].tokens) - pair.prompts[0].shared_len
        if pair.prompt_computed > tail_len:
            report.problems.append(
                f"part 2, {pair.prompts[0].question!r}: {pair.prompt_computed} prompt tokens computed, "
                f"though only the last {tail_len} are new"
            )
    _check_against_stats("part 2", models, pairs, report)


def shuffle_questions(models: Models, documents: Sequence[Sequence[Prompt]], report: Report) -> list[Prompt]:
    """Part 3: all documents, all questions, in an order shuffled with a fixed seed; returns that order."""
    prompts = [prompt for document in documents for prompt in document]
    random.Random(SHUFFLE_SEED).shuffle(prompts)
    models.forget()
    pairs = [models.run(f"part 3, {prompt.question!r}", [prompt]) for prompt in tqdm(prompts, desc="3 shuffled questions")]
    report.add(f"3 {len(documents)} documents, {len(prompts)} questions shuffled", pairs, _describe_hits(pairs))
    if _shares_enough(documents):
        report.expect("part 3, hits", len(prompts) - len(documents), sum(pair.is_hit for pair in pairs))
    _check_against_stats("part 3", models, pairs, report)
    return prompts


def ask_as_one_batch(models: Models, prompts: Sequence[Prompt], documents: Sequence[Sequence[Prompt]], report: Report) -> None:
    """Part 4: the questions of part 3 as one left-padded batch, on an empty cache."""
    models.forget()
    with tqdm(total=1, desc="4 one batch") as bar:
        pair = models.run("part 4", prompts)
        bar.update()
    stats = models.patched.radixkv.stats()
    report.add(f"4 the same {len(prompts)} as one batch", [pair], f"{stats.hits} of {len(prompts)} ({stats.hits / len(prompts):.0%})")
    if _shares_enough(documents):
        report.expect("part 4, hits", len(prompts) - len(documents), stats.hits)
    # Each document is computed once, by one of its rows; the other rows compute at most what is their own.
    most = sum(document[0].shared_len + sum(len(prompt.tokens) - prompt.shared_len for prompt in document) for document in documents)
    most += len(prompts) * (max(map(len, pair.patched.answers)) - 1)
    if pair.patched.computed > most:
        report.problems.append(f"part 4: {pair.patched.computed:,} tokens computed, though {most:,} do")
    report.expect("part 4, the library's own count of computed tokens", pair.patched.computed, stats.computed_tokens)


def _check_against_stats(part: str, models: Models, pairs: Sequence[Pair], report: Report) -> None:
    """The library's own counters must agree with the hook."""
    stats = models.patched.radixkv.stats()
    computed = sum(pair.patched.computed for pair in pairs)
    report.expect(f"{part}, the library's own count of computed tokens", computed, stats.computed_tokens)
    report.expect(f"{part}, the library's own count of hits", sum(pair.is_hit for pair in pairs), stats.hits)
    report.expect(f"{part}, the library's own count of requests", len(pairs), stats.requests)


def _shares_enough(documents: Sequence[Sequence[Prompt]]) -> bool:
    """Whether a prompt reuses half of itself from its own document, and not from another one's: only then is the number of hits known.

    A short document is outweighed by what the chat template puts before it.
    """
    prompts = [prompt for document in documents for prompt in document]
    firsts = [document[0].tokens for document in documents]
    across = max((len(commonprefix([one, other])) for i, one in enumerate(firsts) for other in firsts[:i]), default=0)
    return all(2 * prompt.shared_len >= len(prompt.tokens) > 2 * across for prompt in prompts)


def _describe_hits(pairs: Sequence[Pair]) -> str:
    hits = sum(pair.is_hit for pair in pairs)
    return f"{hits} of {len(pairs)} ({hits / len(pairs):.0%})"


def _describe_answers(num_answers: int, found: Sequence[Difference]) -> str:
    ties = sum(difference.is_tie for difference in found)
    parts = [f"{num_answers - len(found)} equal"]
    if ties:
        parts.append(f"{ties} tied")
    if len(found) > ties:
        parts.append(f"{len(found) - ties} DIFFERENT")
    return ", ".join(parts)
