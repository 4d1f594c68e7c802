"""The stage of a GPU check that runs whole models of random weights: equal tokens in fp32, and tokens per second in bf16."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

import radixkv
from radixkv.bench.gpu_report import OURS, Report
from radixkv.bench.gpu_timing import Deadline
from radixkv.bench.models import spread_weights
from radixkv.testing import kernel_device

# Of prompts and a number of new tokens.
Run = Callable[[torch.Tensor, int], torch.Tensor]
# Of Qwen2.5-1.5B.
QWEN_15B = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
DRY = {
    "vocab_size": 307,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def check_and_measure_model(report: Report, deadline: Deadline, *, seed: int, dry: bool) -> None:
    """Greedy tokens of a small fp32 model, then the speed of a 1.5B-shape one: unpatched, patched, with and without graphs."""
    small = DRY | ({} if dry else {"num_hidden_layers": 4, "hidden_size": 896, "num_attention_heads": 14})
    _check_tokens(report, random_model(small, torch.float32, seed), 3, 16 if dry else 300, 3 if dry else 32, seed)
    config, dtype = (DRY, torch.float32) if dry else (QWEN_15B, torch.bfloat16)
    model = random_model(config, dtype, seed)
    for num_rows, shared_len, own_len, new_tokens in ((2, 16, 4, 2),) if dry else ((8, 2000, 50, 64), (32, 4096, 64, 32)):
        prompts = _prompts(num_rows, shared_len, own_len, config["vocab_size"], seed)
        case = f"{num_rows} rows of {shared_len} shared + {own_len} own, {new_tokens} new"
        ways: dict[str, Callable[[], AbstractContextManager[Run]]] = {"generate, unpatched": lambda: _unpatched(model)}
        for name, extra in _patch_options().items():
            ways[f"{OURS} {name}, cold"] = partial(_patched, model, prompts, extra, warm=False)
            ways[f"{OURS} {name}, warm"] = partial(_patched, model, prompts, extra, warm=True)
        if not dry:
            # On a model of its own, because it leaves another attention behind.
            ways["generate_batch, unpatched"] = lambda: _batched(random_model(config, dtype, seed))
        for what, enter in ways.items():
            if deadline.left < 0:
                report.missing(case, what, "the stage's time is over")
                continue
            try:
                with enter() as run:
                    if not dry:
                        # What compiles, compiles now.
                        run(prompts, new_tokens)
                    _measure(report, case, what, run, prompts, new_tokens, 1 if dry else 2)
            except Exception as error:
                report.missing(case, what, f"{type(error).__name__}: {error}"[:300])
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def random_model(config: dict[str, int], dtype: torch.dtype, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights, made on the device, whose top two logits lie far apart."""
    torch.manual_seed(seed)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    settings = Qwen2Config(**config, max_position_embeddings=32768, tie_word_embeddings=False, **ids)
    with torch.device(kernel_device()):
        return spread_weights(Qwen2ForCausalLM(settings).to(dtype))


def _check_tokens(report: Report, model: Any, num_rows: int, shared_len: int, new_tokens: int, seed: int) -> None:
    """The patched model must return the unpatched model's tokens, cold and warm."""
    prompts = _prompts(num_rows, shared_len, 7, model.config.vocab_size, seed)
    # Beside the GPU's own noise between a padded and a packed product: rows of one length, so that nothing is padded.
    wanted = _generate(model, prompts, new_tokens)
    options = _patch_options()
    for name, extra in options.items():
        patched = radixkv.patch_model(model, backend="triton", num_blocks=64, **extra)
        try:
            for run in ("cold", "warm"):
                got = _generate(patched, prompts, new_tokens)
                equal = int((got == wanted).all(dim=1).sum())
                report.check(f"fp32 tokens, {name}, {run}", equal == num_rows, f"{equal} of {num_rows} rows equal")
        except Exception as error:
            report.check(f"fp32 tokens, {name}", False, f"{type(error).__name__}: {error}"[:500])
        finally:
            radixkv.unpatch_model(patched)


@contextmanager
def _unpatched(model: Any) -> Iterator[Run]:
    yield lambda prompts, new_tokens: _generate(model, prompts, new_tokens)


@contextmanager
def _patched(model: Any, prompts: torch.Tensor, extra: dict[str, Any], *, warm: bool) -> Iterator[Run]:
    """Generate with a prefix cache: emptied before each call (rows still share what they have in common), or filled before."""
    num_blocks = 2 * (prompts.shape[1] // 64 + 2) + 4 * prompts.shape[0]
    patched = radixkv.patch_model(model, backend="triton", num_blocks=num_blocks, **extra)

    def run(rows: torch.Tensor, new_tokens: int) -> torch.Tensor:
        if not warm:
            patched.radixkv.clear()
        return _generate(patched, rows, new_tokens)

    try:
        yield run
    finally:
        radixkv.unpatch_model(patched)


@contextmanager
def _batched(model: Any) -> Iterator[Run]:
    """transformers' own continuous batching over a paged cache."""

    def run(prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        done = model.generate_batch(prompts.tolist(), generation_config=config)
        lengths = {len(output.generated_tokens) for output in done.values()}
        if len(done) != prompts.shape[0] or lengths != {new_tokens}:
            raise RuntimeError(f"transformers {transformers.__version__} answered {len(done)} prompts with {sorted(lengths)} tokens")
        return torch.tensor([output.generated_tokens for output in done.values()])

    yield run


def _patch_options() -> dict[str, dict[str, Any]]:
    """The ways to patch, by name: with CUDA graphs and without where patch_model has a keyword for them."""
    keywords = [name for name in inspect.signature(radixkv.patch_model).parameters if "graph" in name]
    return {"graph": {}, "no graph": {keywords[0]: False}} if keywords else {"no graph": {}}


def _measure(report: Report, case: str, what: str, run: Run, prompts: torch.Tensor, new_tokens: int, num_runs: int) -> None:
    """Time whole calls, and calls for one token, the difference of which is decode."""

    def seconds(count: int) -> list[float]:
        taken = []
        for _ in range(num_runs):
            begin = time.perf_counter()
            run(prompts, count)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
        return sorted(taken)

    whole, first = seconds(new_tokens), statistics.median(seconds(1))
    middle, num_rows = statistics.median(whole), prompts.shape[0]
    decode_rate = num_rows * (new_tokens - 1) / max(middle - first, 1e-9)
    timing = {"us": middle * 1e6, "low_us": whole[0] * 1e6, "high_us": whole[-1] * 1e6, "num_runs": num_runs, "graph": True}
    rates = {"tokens_per_second": num_rows * new_tokens / middle, "decode_tokens_per_second": decode_rate}
    note = f"{rates['tokens_per_second']:.0f} tokens/s, decode alone {decode_rate:.0f}, first token {first * 1e3:.0f} ms"
    report.time(case, what, timing, **rates, first_token_us=first * 1e6, note=note)


def _generate(model: Any, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The new tokens of greedy search, exactly so many."""
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
    )[:, prompts.shape[1] :]


def _prompts(num_rows: int, shared_len: int, own_len: int, vocab_size: int, seed: int) -> torch.Tensor:
    """int64 `[num_rows, shared_len + own_len]` on the device, alike up to shared_len."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(3, vocab_size, (num_rows, shared_len + own_len), generator=generator)
    rows[:, :shared_len] = rows[0, :shared_len]
    # Unlike from the first own token on.
    rows[:, shared_len] = 3 + torch.arange(num_rows)
    return rows.to(kernel_device())
