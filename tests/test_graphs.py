"""Captured decode steps, as far as they go without a GPU: what is captured reads everything that changes on the device.

A stand-in captures by keeping the function, and replays by running it again over the same buffers: rows, lengths, blocks and work lists
of a later step reach it only through tensors. What it would do that a CUDA graph must not is refused: reading a value on the host,
allocating, copying from the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

import radixkv
from radixkv.integration.graphs import DecodeGraphs, can_capture
from radixkv.step import Step
from tests.models import left_pad, new_tokens, prompt, tiny_qwen2

LAYERS = 2
MOST_ROWS, VOCAB_SIZE = 8, 997


class Recorded:
    """Captures by keeping the function; a replay writes into the tensor that the capture returned."""

    def __call__(self, region: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = torch.full((MOST_ROWS, VOCAB_SIZE), float("nan"))  # capturing computes nothing

        def replay() -> None:
            logits = region()
            result[: len(logits)] = logits

        return replay, result


def graphed_model(**options: Any) -> Any:
    model = tiny_qwen2(seed=3, num_layers=LAYERS)
    radixkv.patch_model(model, num_blocks=64, block_size=16, backend="triton", **options)
    model.radixkv.graphs = DecodeGraphs(Recorded())
    return model


def test_short_then_long_then_short() -> None:
    """A graph captured over few tokens serves many, and fewer again."""
    model, stock = graphed_model(), tiny_qwen2(seed=3, num_layers=LAYERS)
    for num_tokens, num_new in ((9, 4), (270, 9), (40, 3)):
        ids = prompt(num_tokens, seed=num_tokens)[None]
        options = {"max_new_tokens": num_new, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    graphs = model.radixkv.graphs
    assert graphs.num_captures == 1 and graphs.num_replays == 3 + 8 + 2 - 1  # the very first decode step ran as it was
    model.radixkv.check()


def test_any_batch_up_to_the_capacity_with_any_sharing() -> None:
    model, stock = graphed_model(), tiny_qwen2(seed=3, num_layers=LAYERS)
    document = prompt(50, seed=1)
    batches = [
        [torch.cat([document, prompt(n, seed=n)]) for n in (3, 8, 20)],
        [prompt(n, seed=n) for n in (5, 30, 70, 17)],
        [torch.cat([document[:34], prompt(n, seed=n)]) for n in (3, 8, 20)],
    ]
    for rows in batches:
        ids, mask = left_pad(rows)
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    assert model.radixkv.graphs.num_captures == 1
    model.radixkv.check()


def test_rows_that_end_move_to_a_smaller_capacity() -> None:
    model, stock = graphed_model(), tiny_qwen2(seed=3, num_layers=LAYERS)
    ids, mask = left_pad([prompt(n, seed=n) for n in (12, 25, 33)])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    tokens = new_tokens(stock.generate(ids, **options), ids)
    options |= {"eos_token_id": [int(tokens[0][2]), int(tokens[1][4])], "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    model.radixkv.check()


def test_changed_weights_are_captured_anew() -> None:
    model = graphed_model()
    ids, options = prompt(20, seed=2)[None], {"max_new_tokens": 4, "do_sample": False}
    model.generate(ids, **options)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1.0)
    stock = tiny_qwen2(seed=3, num_layers=LAYERS)
    stock.load_state_dict(model.state_dict())
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    assert model.radixkv.graphs.num_captures == 2


def test_an_interrupted_step_is_not_gone_on_from() -> None:
    model, stock = graphed_model(), tiny_qwen2(seed=3, num_layers=LAYERS)
    ids, options = prompt(20, seed=2)[None], {"max_new_tokens": 6, "do_sample": False}
    model.generate(ids, **options)
    calls = []

    def interrupt(region: Callable[[], torch.Tensor]) -> Any:
        calls.append(region)
        raise KeyboardInterrupt

    model.radixkv.graphs = DecodeGraphs(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(30, seed=4)[None], **options)
    assert len(calls) == 1
    model.radixkv.check()
    model.radixkv.graphs = DecodeGraphs(Recorded())
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


def test_hooks_and_replaced_forwards_are_never_captured() -> None:
    model = graphed_model()
    assert can_capture(model, {"use_cache": True})
    assert not can_capture(model, {"labels": torch.zeros(1)})
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert not can_capture(model, {})
    model.generate(prompt(9, seed=1)[None], max_new_tokens=5, do_sample=False)
    assert len(seen) == 5 and model.radixkv.graphs.num_captures == 0
    handle.remove()
    assert can_capture(model, {})
    model.model.norm.forward = model.model.norm.forward
    assert not can_capture(model, {})


def test_the_cpu_never_captures_and_the_keyword_turns_it_off() -> None:
    model = tiny_qwen2(seed=3, num_layers=1)
    assert radixkv.patch_model(model, num_blocks=8, backend="triton").radixkv.graphs is None


class NothingButKernels(TorchDispatchMode):
    """Refuses what a captured region must not do, and lists what it did."""

    REFUSED = ("_local_scalar_dense", "item", "empty", "zeros", "ones", "full", "_to_copy", "clone", "nonzero", "copy_", "cat", "arange")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.seen.append(name)
        if name.startswith(self.REFUSED):
            raise AssertionError(f"{name} in what is captured")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 24])
def test_our_part_of_a_captured_step_allocates_copies_and_reads_nothing(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graphed_model()
    cache = model.radixkv
    shape = cache.shape
    batch = cache.admit([prompt(n, seed=n).numpy().astype("<i4").tobytes() for n in (40, 70, 20)], [1, 1, 1])
    rows = 4
    query = torch.randn(1, shape.num_heads, rows, shape.head_dim)
    key = torch.randn(1, shape.num_kv_heads, rows, shape.head_dim)

    def region(step: Step) -> None:
        step.begin()
        for layer in range(LAYERS):
            step.store(layer, key, key)
            step.attend(layer, query, scale=0.1, sliding_window=window, softcap=None)

    with cache.decode_step(batch, [0, 1, 2], [5, 6, 7], rows) as step:
        region(step)  # makes work lists and partials
    with cache.decode_step(batch, [0, 1, 2], [5, 6, 7], rows) as step:
        launches = exempt_interpreter(monkeypatch)
        with NothingButKernels() as mode:
            region(step)
    assert mode.seen and len(launches) == 1 + LAYERS * 4  # advance; store, narrow items, wide items, merge
    cache.discard(batch)


def exempt_interpreter(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a launch in the interpreter, which copies tensors to and fro, do as it likes; return the names of what is launched."""
    launches: list[str] = []
    original = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(self.fn.__name__)
        with _disable_current_modes():
            original(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return launches
