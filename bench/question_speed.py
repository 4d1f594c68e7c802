"""How fast questions are answered: cold against plain `generate()`, warm against copying a prefix cache.

    python bench/question_speed.py [--pairs 13] [--max-new-tokens 16]

Baselines, on the same weights, inputs and machine: cold, the unpatched model's `generate()` on the whole prompt; warm, the recipe of
transformers' documentation: fill a DynamicCache with the document once, and give each `generate()` a `copy.deepcopy` of it. Runs come in
pairs, baseline and ours in alternating order; the first pair is discarded; each pair's answers must be equal.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

import radixkv
from radixkv.demo.documents import Prompt, build_prompts, shipped_documents
from radixkv.demo.measure import Generation, cache_keyword, compare_all, generate, prefill_cache, read_clock
from radixkv.demo.models import load_embedded, share_weights
from radixkv.progress import progress_bar


@dataclass(frozen=True)
class Speed:
    """Seconds of each pair that counts."""

    name: str
    baseline_seconds: tuple[float, ...]
    ours_seconds: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast ours is, pair by pair, ascending."""
        return sorted(slow / fast for slow, fast in zip(self.baseline_seconds, self.ours_seconds, strict=True))

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        low, high = (self.ratios[round(share * (len(self.ratios) - 1))] for share in (0.2, 0.8))
        return (
            f"{self.name}: {self.median_ratio:.3f} x the speed (20 % to 80 %: {low:.3f} to {high:.3f}; {len(self.ratios)} pairs; medians "
            f"{statistics.median(self.baseline_seconds):.3f} s and {statistics.median(self.ours_seconds):.3f} s)"
        )


def measure_cold(stock: Any, patched: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> Speed:
    """A question to a document never seen: the cache is emptied before each run.

    Args:
        stock: The unpatched model.
        patched: A patched model with the same weights.
        prompts: One for each pair.
        max_new_tokens: Most tokens of an answer.
    """

    def ask_patched(prompt: Prompt) -> Generation:
        patched.radixkv.clear()
        return generate(patched, [prompt.tokens], max_new_tokens)

    return _run_pairs("cold", stock, lambda prompt: generate(stock, [prompt.tokens], max_new_tokens), ask_patched, prompts)


def measure_warm(stock: Any, patched: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> Speed:
    """New questions to a document that has been asked about before.

    Args:
        stock: The unpatched model.
        patched: A patched model with the same weights.
        prompts: Different questions about one document, one for each pair.
        max_new_tokens: Most tokens of an answer.
    """
    prefix = prefill_cache(stock, prompts[0].tokens[: prompts[0].shared_len])
    keyword = cache_keyword(stock)

    def ask_with_copy(prompt: Prompt) -> Generation:
        start = read_clock(stock.device)
        cache = copy.deepcopy(prefix)
        copy_seconds = read_clock(stock.device) - start
        run = generate(stock, [prompt.tokens], max_new_tokens, **{keyword: cache})
        return replace(run, seconds=run.seconds + copy_seconds)

    patched.radixkv.clear()
    generate(patched, [prompts[0].tokens[: prompts[0].shared_len]], 1)
    return _run_pairs("warm", stock, ask_with_copy, lambda prompt: generate(patched, [prompt.tokens], max_new_tokens), prompts)


def number_questions(num_prompts: int, tokenizer: Any) -> list[Prompt]:
    """Different questions about the first shipped document; the number in front keeps even repeated ones apart."""
    documents = shipped_documents()
    known = [question for document in documents for question in document.questions]
    questions = tuple(f"Question {i + 1}: {known[i % len(known)]}" for i in range(num_prompts))
    return build_prompts(replace(documents[0], questions=questions), tokenizer)


def _run_pairs(
    name: str,
    stock: Any,
    baseline: Callable[[Prompt], Generation],
    ours: Callable[[Prompt], Generation],
    prompts: Sequence[Prompt],
) -> Speed:
    pairs = []
    with progress_bar(name, len(prompts), True, unit="question") as advance:
        for index, prompt in enumerate(prompts):
            if index % 2:
                ours_run = ours(prompt)
                baseline_run = baseline(prompt)
            else:
                baseline_run = baseline(prompt)
                ours_run = ours(prompt)
            for difference in compare_all(stock, f"{name}, {prompt.question!r}", [prompt], baseline_run, ours_run):
                if not difference.is_tie:
                    raise RuntimeError(f"the answers are not equal: {difference}")
            pairs.append((baseline_run.seconds, ours_run.seconds))
            advance(1)
    return Speed(name, tuple(pair[0] for pair in pairs[1:]), tuple(pair[1] for pair in pairs[1:]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of cold and warm questions on the demo's model.")
    parser.add_argument("--pairs", type=int, default=13, help="at least 12; the first is discarded (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of each answer (default: %(default)s)")
    options = parser.parse_args()
    if options.pairs < 12 or options.max_new_tokens < 1:
        parser.error("--pairs must be at least 12 and --max-new-tokens at least 1")
    stock, tokenizer = load_embedded(torch.float32, torch.device("cpu"))
    patched = radixkv.patch_model(share_weights(stock))
    prompts = number_questions(options.pairs, tokenizer)
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, radixkv {radixkv.__version__}; {datetime.date.today().isoformat()}; prompts of "
        f"{len(prompts[0].tokens)} tokens, {prompts[0].shared_len} of them shared, at most {options.max_new_tokens} new"
    )
    print(measure_cold(stock, patched, prompts, options.max_new_tokens))
    print(measure_warm(stock, patched, prompts, options.max_new_tokens))


if __name__ == "__main__":
    main()
