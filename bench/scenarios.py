"""What radixkv is worth where prompts share their beginnings: six ways to use a model, each answered by all that transformers offers too.

    python bench/scenarios.py                       # a small version of each, a few minutes on 2 cores
    python bench/scenarios.py --full --csv rows.csv # the sizes that the claims are about, about an hour
    python -m radixkv scenarios --only rag chat

The model is the demo's, SmolLM2-135M-Instruct in float32. Request by request every way answers before any goes on to the next one, in an
order that rotates, each with a model over the same weights and a cache of its own. The answers are compared with plain generate()'s. The
time to the first token is noted within the very call whose whole time is measured. Tokens are counted by a hook on the first layer.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script, from anywhere and without an installation.
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402

import radixkv  # noqa: E402
from radixkv.bench.models import random_qwen2  # noqa: E402
from radixkv.bench.processor import processor_name  # noqa: E402
from radixkv.bench.scenario_cases import BUILDERS, FULL, QUICK, Request, Scenario, Sizes, Tokens, build_scenario  # noqa: E402
from radixkv.bench.scenario_methods import Answered, build_methods  # noqa: E402
from radixkv.bench.scenario_report import render  # noqa: E402
from radixkv.bench.scenario_results import BATCH, PLAIN, Row, append_row, provenance_path, read_rows  # noqa: E402
from radixkv.demo.errors import DemoError  # noqa: E402
from radixkv.demo.models import load_embedded  # noqa: E402

NUM_POOL_TOKENS = 32768


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the scenarios."""
    names = ", ".join(BUILDERS)
    parser.add_argument("--only", nargs="+", choices=tuple(BUILDERS), default=list(BUILDERS), metavar="NAME", help=f"some of {names}")
    parser.set_defaults(full=False)
    size = parser.add_mutually_exclusive_group()
    quick = "small versions, a few minutes on 2 cores (the default)"
    size.add_argument("--quick", dest="full", action="store_const", const=False, help=quick)
    size.add_argument("--full", action="store_true", help="the sizes that the claims are about, about an hour on 2 cores")
    parser.add_argument("--threads", type=_positive, metavar="N", help="of PyTorch (default: its own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of requests and of samples (default: %(default)s)")
    parser.add_argument("--no-generate-batch", action="store_true", help="leave transformers' continuous batching out")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="add each row to it as it is measured, and facts about the run beside it")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show how far it is (default: yes)")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the report.

    Args:
        options: As `add_options` defines them.

    Returns:
        The exit status: 0 when every answer that was compared is equal, else 1.

    Raises:
        DemoError: The model is not installed, or --csv cannot be written or holds rows of another size or seed.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    sizes = FULL if options.full else QUICK
    write = _writer(options.csv)
    facts = _facts(options, sizes)
    facts["earlier_runs"] = _earlier_runs(options.csv, facts)
    _note_facts(options.csv, facts)
    transformers.logging.set_verbosity_error()
    print("loading SmolLM2-135M-Instruct (about 20 seconds)", file=sys.stderr, flush=True)
    model, tokenizer = load_embedded(torch.float32, torch.device("cpu"))
    rows = []
    settings = {"seed": options.seed, "batch": not options.no_generate_batch, "progress": options.progress}
    for row in measure(model, tokenizer, sizes, options.only, **settings):
        rows.append(row)
        write(row)
    facts |= {"load_end": os.getloadavg()[0], "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    _note_facts(options.csv, facts)
    # Rows of other scenarios that the file has from before belong to the report too.
    print(render(rows if options.csv is None else read_rows(options.csv)))
    if not options.full:
        print("\nThe claims are about the sizes of --full: here, with few requests for each cold one, less is shared.")
    print(f"\n{_describe(facts)}")
    return 1 if any(row.equal is False for row in rows) else 0


def measure(
    model: Any, tokenizer: Any, sizes: Sizes, names: Sequence[str], *, seed: int = 0, batch: bool = True, progress: bool = False
) -> Iterator[Row]:
    """The rows of scenarios, each as soon as it is measured.

    Args:
        model: an unpatched one, in float32. tokenizer: its own, with a chat template. sizes: of everything. names: of the scenarios.
        seed: of what is drawn. batch: whether to measure generate_batch too. progress: whether to show a bar.
    """
    for name in names:
        scenario = build_scenario(name, tokenizer, sizes, seed)
        if scenario.fixed_len:
            # What is counted does not depend on the model, and the real one would take an hour for it.
            counted = replace(scenario, name=f"{name}-count", num_new=sizes.long_counted)
            yield from _measure_scenario(random_qwen2(len(tokenizer), hidden=64, num_layers=2), counted, seed, batch, progress)
        yield from _measure_scenario(model, scenario, seed, batch, progress)


def _measure_scenario(model: Any, scenario: Scenario, seed: int, batch: bool, progress: bool) -> Iterator[Row]:
    methods = build_methods(scenario, model, NUM_POOL_TOKENS, with_generate_batch=batch)
    answers: list[Tokens] = []
    try:
        for method in methods:
            method.begin(scenario)
        total = scenario.num_requests * len(methods)
        with tqdm(total=total, desc=scenario.name, disable=not progress, leave=False, file=sys.stderr) as bar:
            for arrival in range(scenario.num_requests):
                request = scenario.request(arrival, answers)
                _check_len(model, scenario, request)
                answered = {}
                first = arrival % len(methods)
                for method in methods[first:] + methods[:first]:
                    answered[method.name] = method.answer(scenario, request, seed + arrival)
                    bar.update()
                answers.append(tuple(answered[PLAIN].answers[0]))
                for method in methods:
                    yield _row(scenario, method.name, request, arrival, answered)
    finally:
        for method in methods:
            method.end()
        # A patched model and its cache know each other, and the next scenario makes a pool of its own.
        del methods, method
        gc.collect()


def _row(scenario: Scenario, method: str, request: Request, arrival: int, answered: dict[str, Answered]) -> Row:
    one, plain = answered[method], answered[PLAIN]
    num_prompt = len(request.prompt) * scenario.num_samples
    is_drawn_apart = method == BATCH and scenario.num_samples > 1
    return Row(
        *(scenario.name, method, 0, request.number, arrival, num_prompt),
        one.computed if scenario.fixed_len else one.prompt_computed,
        num_prompt - one.prompt_computed,
        *(one.first_token_seconds, one.seconds, sum(map(len, one.answers))),
        None if is_drawn_apart else one.answers == plain.answers,
    )


def _check_len(model: Any, scenario: Scenario, request: Request) -> None:
    longest, limit = len(request.prompt) + scenario.num_new, model.config.max_position_embeddings
    if longest > limit:
        raise ValueError(f"{scenario.name}: prompt and answer take {longest:,} tokens; the model's limit is {limit:,}")


def _writer(path: Path | None) -> Callable[[Row], None]:
    """Appends rows to a CSV file, or does nothing."""
    if path is None:
        return lambda _row: None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            read_rows(path)
        with path.open("a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:
        raise DemoError(f"--csv: cannot write {path}: {error}") from error
    return lambda row: append_row(path, row)


def _facts(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Where, when and with what this is measured."""
    return {
        "machine": platform.machine(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "radixkv": radixkv.__version__,
        "commit": _commit(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "seed": options.seed,
        "size": "full" if options.full else "quick",
        "scenarios": list(options.only),
        "sizes": asdict(sizes),
        "load_start": os.getloadavg()[0],
    }


def _earlier_runs(path: Path | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Facts about the runs that wrote to the same file before.

    Raises:
        DemoError: One of them had requests of another size or seed, which must not be mixed with these.
    """
    if path is None or not (place := provenance_path(path)).exists():
        return []
    before = _read_facts(place)
    if any(before[name] != facts[name] for name in ("size", "seed")):
        was = f"{before['size']} size, seed {before['seed']}"
        raise DemoError(f"--csv: {path} holds rows of {was}, and these would be of {facts['size']} size, seed {facts['seed']}")
    return [*before.pop("earlier_runs", []), before]


def _note_facts(path: Path | None, facts: dict[str, Any]) -> None:
    """Write facts about the run beside its rows."""
    if path is not None:
        provenance_path(path).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _read_facts(place: Path) -> dict[str, Any]:
    try:
        facts = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DemoError(f"--csv: cannot read {place}: {error}; name another file, or move both away") from error
    if not isinstance(facts, dict) or not {"size", "seed"} <= facts.keys():
        raise DemoError(f"--csv: {place} does not say what the rows beside it are of: name another file, or move both away")
    return facts


def _commit() -> str | None:
    """The commit of the clone that this file lies in, with a mark if files were changed; None outside of one."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _describe(facts: dict[str, Any]) -> str:
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, load {facts['load_start']:.1f} to "
        f"{facts['load_end']:.1f}; Python {facts['python']}, torch {facts['torch']}, transformers {facts['transformers']}, radixkv "
        f"{facts['radixkv']}; {facts['model']}, {facts['dtype']}, {facts['size']} size, seed {facts['seed']}; {facts['started']} to "
        f"{facts['finished']}"
    )


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """The scenarios from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="What radixkv is worth where prompts share beginnings, beside what transformers offers.")
    add_options(parser)
    try:
        return run(parser.parse_args(arguments))
    except DemoError as error:
        print(f"scenarios: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
