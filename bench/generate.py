"""How fast many questions on few documents are answered, by everything that transformers offers and by radixkv, and what it computes.

    python bench/generate.py [--repeats 3] [--cases a b c d] [--zipf-repeats 1] [--max-new-tokens 16] [--models demo random]
    python bench/generate.py --quick          # a dry run on a tiny model, in a minute

All ways run in one process on the same prompts, in an order that changes from round to round; each round has documents of its own, so that
nothing is warm from the one before. The answers of each way are compared with those of plain generate(). Times are medians; tokens are
those that entered the first layer, padding included, counted by a hook.

Beside the table: the share of the best possible hit rate of case d in a pool that holds a third of the documents, in cache order and in
the given one; and what the bookkeeping of a decode step of generate_many costs, with a model that computes nothing.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script, from anywhere and without an installation.
    sys.path.insert(0, str(ROOT))

import radixkv  # noqa: E402
from radixkv.bench.generate_cases import Case, RandomDocuments, TextDocuments, build_cases  # noqa: E402
from radixkv.bench.generate_methods import build_methods, has_generate_batch, no_end  # noqa: E402
from radixkv.bench.models import random_qwen2  # noqa: E402
from radixkv.demo.measure import Generation  # noqa: E402
from radixkv.demo.models import load_embedded, share_weights  # noqa: E402

CPU = torch.device("cpu")


@dataclass
class Line:
    """What one way did with one case, in all rounds."""

    case: str
    method: str
    seconds: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    num_equal: int = 0
    num_answers: int = 0

    def add(self, run: Generation, expected: Sequence[Sequence[int]]) -> None:
        self.seconds.append(run.seconds)
        self.computed.append(run.computed)
        self.num_equal += sum(list(answer) == list(other) for answer, other in zip(run.answers, expected, strict=True))
        self.num_answers += len(run.answers)


def measure(stock: Any, source: RandomDocuments | TextDocuments, options: argparse.Namespace) -> list[Line]:
    """Every way with every case.

    Args:
        stock: an unpatched model. source: of prompts. options: of the command line.
    """
    patched = radixkv.patch_model(no_end(share_weights(stock)))
    batching = no_end(share_weights(stock)) if has_generate_batch() and not options.no_generate_batch else None
    methods = build_methods(stock, patched, batching, options.max_new_tokens)
    lines: dict[tuple[str, str], Line] = {}
    for round_number in range(options.repeats):
        for case in build_cases(source, round_number, num_questions=options.questions, num_zipf=options.zipf):
            letter = case.name[0]
            if letter not in options.cases or (letter == "d" and round_number >= options.zipf_repeats):
                continue
            serving = [method for method in methods if method.serves(case)]
            runs = {}
            # Plain generate() is always among the first and never twice at the same place, like all others.
            for method in serving[round_number % len(serving) :] + serving[: round_number % len(serving)]:
                model = patched if method.name.startswith("radixkv") else batching if "batch()" in method.name else stock
                runs[method.name] = method.counted(model, case)
                print(f"  {case.name}; {method.name}: {runs[method.name].seconds:.2f} s", file=sys.stderr, flush=True)
            expected = runs[methods[0].name].answers
            for method in serving:
                lines.setdefault((case.name, method.name), Line(case.name, method.name)).add(runs[method.name], expected)
    if batching is not None:
        batching.destroy_cached_continuous_batching_manager()
    return sorted(lines.values(), key=lambda line: line.case)


def render(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table, times beside plain generate()'s, one by one, of the same prompts."""
    plain: dict[str, float] = {}
    for line in lines:
        plain.setdefault(line.case, statistics.median(line.seconds))  # the first line of a case is plain generate()
    table = ["| case | way | tokens computed | seconds | x plain | answers equal to plain |", "|---|---|---:|---:|---:|---:|"]
    for line in lines:
        seconds = statistics.median(line.seconds)
        cells = (
            *(line.case, line.method, f"{statistics.median(line.computed):,.0f}", f"{seconds:.2f}"),
            *(f"{plain[line.case] / seconds:.2f}", f"{line.num_equal} of {line.num_answers}"),
        )
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table)


def hit_shares(case: Case) -> dict[str, float]:
    """What of the best possible hit rate (every document computed once) each order reaches, in a pool of a third of the documents."""
    block_size, shares = 16, {}
    num_blocks = -(-sum(map(len, case.documents)) // 3 // block_size)
    for order in ("cache", "given"):
        # What is found depends on tokens alone, so the least model will do.
        model = random_qwen2(max(map(max, case.prompts)) + 1, hidden=32, num_layers=1)
        radixkv.patch_model(model, num_blocks=num_blocks, block_size=block_size)
        answers = model.radixkv.generate_many(case.prompts, 2, order=order, progress=False)  # type: ignore[attr-defined]
        shares[order] = sum(answer.cached_tokens for answer in answers) / case.num_shared
    return shares


def step_microseconds(num_rows: int, num_tokens: int, num_steps: int) -> list[float]:
    """CPU time of this thread from one forward to the next, for each decode step of rows of so many tokens, ascending.

    The model computes nothing, but its layers store and attend, as every forward does; that is not counted.
    """
    model = random_qwen2(1000, hidden=256, num_layers=1)
    block_size = 64
    radixkv.patch_model(model, num_blocks=num_rows * ((num_tokens + num_steps) // block_size + 2), block_size=block_size)
    spent: dict[str, list[float]] = defaultdict(list)
    left = [0.0]

    def forward(**inputs: Any) -> CausalLMOutputWithPast:
        entered = time.thread_time()
        step, kept = inputs["radixkv_step"], inputs["logits_to_keep"]
        length = inputs["input_ids"].shape[1]
        key = torch.zeros(1, step.pool.num_kv_heads, length, 64)
        step.store(0, key, key)
        if isinstance(kept, int):
            spent["decode"].append(entered - left[0])
            # The first layer makes or moves on what the step attends to, the others find it made.
            started = time.thread_time()
            step.plan.work(None)
            spent["decode"][-1] += time.thread_time() - started
            step.attend(0, torch.zeros(1, 4, length, 64), scale=1.0, sliding_window=None, softcap=None)
        else:
            step.num_attended_layers = 1
        output = CausalLMOutputWithPast(logits=torch.zeros(1, length if isinstance(kept, int) else len(kept), 1000))
        left[0] = time.thread_time()
        return output

    model.forward = forward  # type: ignore[assignment]
    rows = [torch.randint(3, 1000, (num_tokens + i,), generator=torch.Generator().manual_seed(i)) for i in range(num_rows)]
    model.radixkv.generate_many(rows, num_steps, progress=False)  # type: ignore[attr-defined]
    return sorted(1e6 * seconds for seconds in spent["decode"][3:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Many questions on few documents, by everything that transformers offers and by radixkv.")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=tuple("abcd"), default=list("abcd"), help="which (default: all)")
    parser.add_argument("--zipf-repeats", type=int, default=1, help="how many of them have the long case d (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="of each answer (default: %(default)s)")
    parser.add_argument("--models", nargs="+", choices=("demo", "random"), default=["demo", "random"], help="which (default: both)")
    parser.add_argument("--no-generate-batch", action="store_true", help="leave transformers' continuous batching out")
    parser.add_argument("--quick", action="store_true", help="a dry run on a tiny model, whose times say nothing")
    options = parser.parse_args(arguments)
    options.questions, options.zipf = (2, 6) if options.quick else (6, 100)
    if options.quick:
        options.repeats, options.max_new_tokens, options.models, options.no_generate_batch = 1, 3, ["tiny"], True
    rounds = f"medians of {options.repeats} rounds, case d of {min(options.repeats, options.zipf_repeats)}"
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}, radixkv {radixkv.__version__}; {datetime.date.today().isoformat()}"
        f"; float32, {options.max_new_tokens} new tokens, {rounds}"
    )
    for name in options.models:
        if name == "demo":
            model, tokenizer = load_embedded(torch.float32, CPU)
            source: RandomDocuments | TextDocuments = TextDocuments(tokenizer)
        else:
            model = random_qwen2(500, hidden=64, num_layers=1) if options.quick else random_qwen2(16384, hidden=768, num_layers=12)
            source = RandomDocuments(model.config.vocab_size, *((40, 6) if options.quick else (500, 20)))
        no_end(model).generation_config = GenerationConfig(pad_token_id=0)
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"\n{name}: {type(model).__name__}, {size:,.0f} million parameters\n\n{render(measure(model, source, options))}")
        case = build_cases(source, 0, num_questions=options.questions, num_zipf=options.zipf)[-1]
        shares = ", ".join(f"{share:.1%} in {order} order" for order, share in hit_shares(case).items())
        print(f"\nof the best possible hit rate of case d, in a pool that holds a third of its documents: {shares}")
    for num_tokens in (64, 128) if options.quick else (512, 4096):
        times = step_microseconds(32, num_tokens, 12 if options.quick else 100)
        low, middle, high = (times[round(share * (len(times) - 1))] for share in (0.2, 0.5, 0.8))
        print(f"bookkeeping of a decode step of 32 rows of {num_tokens} tokens: {middle:.0f} us (20 % to 80 %: {low:.0f} to {high:.0f})")


if __name__ == "__main__":
    main()
