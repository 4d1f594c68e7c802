"""Every way of decoding on every family, patched against unpatched in float32, cold and then warm, and which path it took."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TextStreamer

import radixkv
from tests.families import USABLE, tiny_model
from tests.mode_checks import assert_same, assert_same_and_reused
from tests.mode_parts import from_embeddings, short, stock_loop
from tests.modes import MODES, STOCK_MODES, Mode, ask, leaves

Pair = tuple[Any, Any]


@pytest.fixture(scope="module", params=USABLE)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A model of a family, and its like patched; whatever was asked of it, nothing is held in the end."""
    reference, patched = tiny_model(request.param), radixkv.patch_model(tiny_model(request.param), num_blocks=200, block_size=16)
    yield reference, patched
    gc.collect()
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_leased == 0


@pytest.fixture
def empty(pair: Pair) -> Pair:
    """The two, with nothing cached."""
    patched = pair[1]
    patched.radixkv.clear()
    patched.radixkv.reset_stats()
    return pair


@pytest.mark.parametrize("name", MODES)
def test_a_mode_gives_the_same_answer_and_reuses(empty: Pair, name: str) -> None:
    assert_same_and_reused(*empty, MODES[name])


def result_or_error(model: Any, mode: Mode) -> Any:
    num_layers = model.config.num_hidden_layers
    try:
        return ask(model, mode)
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        # An early exit that fails leaves a model with fewer layers behind in some releases.
        model.config.num_hidden_layers = num_layers


@pytest.mark.parametrize("name", STOCK_MODES)
def test_the_models_own_path_gives_what_unpatched_gives(empty: Pair, name: str) -> None:
    """The same result to the bit, or the same error; and a prefix chosen by hand is refused, not ignored."""
    (reference, patched), mode = empty, STOCK_MODES[name]
    free = patched.radixkv.stats().blocks_free
    expected = result_or_error(reference, mode)
    assert_same(result_or_error(patched, mode), expected, to_the_bit=True)
    stats = patched.radixkv.stats()
    assert (stats.requests, stats.computed_tokens, stats.blocks_free) == (0, 0, free)
    if isinstance(next(leaves(expected)), str):
        return
    if name == "early exit":  # which asks the model for drafts too
        assert stats.stock_calls > 1
    else:
        assert stats.stock_calls == (2 if mode.run is stock_loop else 1)
    if mode.run in (None, from_embeddings):
        with patched.radixkv.match_prefix([1]) as nothing, pytest.raises(ValueError, match="prefix_cache cannot be used in this call"):
            ask(patched, mode, prefix_cache=nothing)


class Countdown:
    """Ctrl-C at a step."""

    def __init__(self, step: int):
        self.steps_left = step

    def tick(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise KeyboardInterrupt("stop here")


class RaisingProcessor(Countdown, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tick()
        return scores


class RaisingCriterion(Countdown, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.tick()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RaisingStreamer(Countdown, TextStreamer):
    """A reader that has gone away."""

    def put(self, value: torch.Tensor) -> None:
        self.tick()


@pytest.fixture(scope="module")
def qwen2() -> Pair:
    return tiny_model("Qwen2"), radixkv.patch_model(tiny_model("Qwen2"), num_blocks=100, block_size=16)


def assert_whole(patched: Any) -> None:
    gc.collect()
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_leased == 0


INTERRUPTED = ["greedy, ragged", "several sequences", "beams, ragged", "beam sampling", "prompt lookup", "a draft that is mostly wrong",
               "chunked prefill, ragged", "guidance", "search, use and store by hand", "branches"]  # fmt: skip


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupted_mode_loses_nothing(qwen2: Pair, name: str) -> None:
    """Wherever it is interrupted, no block stays held, and the next call gives what it should."""
    (reference, patched), mode = qwen2, MODES[name]
    expected = ask(reference, mode)
    for step in (0, 3):
        patched.radixkv.clear()
        with pytest.raises(KeyboardInterrupt, match="stop here"):
            ask(patched, mode, logits_processor=LogitsProcessorList([RaisingProcessor(step)]))
        assert_whole(patched)
        assert_same(ask(patched, mode), expected, to_the_bit=False)


@pytest.mark.parametrize("argument", ["streamer", "stopping_criteria"])
def test_what_a_caller_brings_fails(qwen2: Pair, argument: str) -> None:
    reference, patched = qwen2
    failing = {"streamer": RaisingStreamer(3), "stopping_criteria": StoppingCriteriaList([RaisingCriterion(3)])}[argument]
    with pytest.raises(KeyboardInterrupt, match="stop here"):
        ask(patched, MODES["greedy"], **{argument: failing})
    assert_whole(patched)
    assert_same(ask(patched, MODES["greedy"]), ask(reference, MODES["greedy"]), to_the_bit=False)


@pytest.mark.parametrize("num_blocks", [3, 4], ids=["prompt", "answer"])
@pytest.mark.parametrize("name", ["greedy", "several sequences", "beams", "a draft that is always right", "chunked prefill", "guidance",
                                  "search, use and store by hand", "a loop of one's own", "branches"])  # fmt: skip
def test_a_pool_far_too_small(qwen2: Pair, name: str, num_blocks: int) -> None:
    """The prompt, or its answer, does not fit: an error that says how many blocks are missing, and the next prompt is answered."""
    model = radixkv.patch_model(tiny_model("Qwen2"), num_blocks=num_blocks, block_size=16)
    with pytest.raises(radixkv.OutOfBlocks, match=r"need \d+ blocks? of 16 tokens; \d+ free, \d+ evictable, \d+ leased"):
        ask(model, MODES[name])
    assert_whole(model)
    assert_same(ask(model, MODES["greedy"], short()), ask(qwen2[0], MODES["greedy"], short()), to_the_bit=False)
