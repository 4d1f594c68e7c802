"""The command line of the demo."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import radixkv
from radixkv.demo.documents import Prompt, build_prompts, choose_documents
from radixkv.demo.errors import DemoError
from radixkv.demo.table import render_table

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of the demo."""
    parser.add_argument("--model", metavar="NAME_OR_PATH", help="a Qwen2 checkpoint (default: the demo's SmolLM2-135M-Instruct)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="of weights and cache (default: %(default)s)")
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto", help="of parts 1 to 4 (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=_positive, default=24, metavar="N", help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--document", metavar="FILE", help="a text file to ask about instead of the first shipped document")
    parser.add_argument("--question", nargs="+", action="extend", default=[], metavar="TEXT", help="what to ask about the first document")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write an HTML page that shows the cache at the end of part 4")


def run(options: argparse.Namespace) -> int:
    """Run the demo.

    Args:
        options: As `add_options` defines them.

    Returns:
        The exit status: 0 when every answer is equal (or tied, in half precision) and every count right, else 1.

    Raises:
        DemoError: Something that the caller can mend.
    """
    _check_report(options.report)
    documents = choose_documents(options.document, options.question)
    device = _choose_device(options.device)
    # Both are read once, when transformers, which imports Triton, is imported: the shipped model needs no network, and without a GPU the
    # kernels of part 5 run in Triton's interpreter.
    if options.model is None:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        from radixkv.demo import kernels, models, parts
    except ImportError as error:
        raise DemoError(f"the demo needs the package {error.name}: pip install 'radixkv[demo]'") from error
    model, tokenizer = _load(options, device)
    print(f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:,.0f} million parameters, {options.dtype}, {device}")
    prompts = [build_prompts(document, tokenizer) for document in documents]
    _check_lengths(prompts, model, options.max_new_tokens)

    twin = models.share_weights(model)
    try:
        radixkv.patch_model(twin, backend=options.backend)
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise DemoError(f"cannot patch the model: {error}") from error
    pair = parts.Models(model, twin, tokenizer, options.max_new_tokens)
    report = parts.Report()
    try:
        parts.show_kv_cache(pair, report)
        parts.ask_one_document(pair, prompts[0], report)
        shuffled = parts.shuffle_questions(pair, prompts, report)
        parts.ask_as_one_batch(pair, shuffled, prompts, report)
    except radixkv.OutOfBlocks as error:
        raise DemoError(f"the model's cache is too small for this: {error}") from error
    if options.report is not None:
        try:
            print(f"wrote {twin.radixkv.report(options.report, tokenizer=tokenizer)}")
        except OSError as error:
            raise DemoError(str(error)) from error
    radixkv.unpatch_model(twin)
    kernels.run_kernels(model.config, DTYPES[options.dtype], device, report)
    print("\n" + render_table(report.rows))
    for line in [*map(str, report.differences), *report.problems]:
        print(line)
    return 0 if report.is_good else 1


def _load(options: argparse.Namespace, device: torch.device) -> tuple[Any, Any]:
    import transformers

    from radixkv.demo import models

    transformers.logging.set_verbosity_error()
    print(f"loading {options.model or 'SmolLM2-135M-Instruct (about 20 seconds)'}", file=sys.stderr, flush=True)
    dtype = DTYPES[options.dtype]
    return models.load_checkpoint(options.model, dtype, device) if options.model else models.load_embedded(dtype, device)


def _check_report(path: Path | None) -> None:
    """Refuse what could not be written before minutes are spent on it."""
    if path is not None and (path.exists() and not path.is_file() or not path.resolve().parent.is_dir()):
        raise DemoError(f"--report: {path} must be a file in a folder that exists")


def _choose_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DemoError(f"--device: {name} is no device that PyTorch knows") from error
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"--device: {name} is not supported; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DemoError(f"--device: {name} is not there; PyTorch sees {torch.cuda.device_count()} GPUs")
    return device


def _check_lengths(prompts: Sequence[Sequence[Prompt]], model: Any, max_new_tokens: int) -> None:
    longest = max(len(prompt.tokens) for document in prompts for prompt in document) + max_new_tokens
    limit = model.config.max_position_embeddings
    if longest > limit:
        raise DemoError(f"document, question and answer take {longest:,} tokens; the model's limit is {limit:,}")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
