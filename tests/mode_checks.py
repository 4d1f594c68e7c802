"""How two models' answers in a mode are compared, and what a patched model must have done for its own."""

from __future__ import annotations

from typing import Any

import torch

from tests.mode_parts import Inputs
from tests.models import PAD, counted_tokens
from tests.modes import Mode, ask, leaves


def assert_same(got: Any, expected: Any, *, to_the_bit: bool) -> None:
    """Numbers to rounding, if not to the bit, and all else exactly."""
    ours, theirs = list(leaves(got)), list(leaves(expected))
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, torch.Tensor) and other.is_floating_point() and not to_the_bit:
            torch.testing.assert_close(one, other, atol=5e-4, rtol=2e-4)
        elif isinstance(other, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def assert_same_and_reused(reference: Any, patched: Any, mode: Mode, inputs: Inputs | None = None, **more: Any) -> None:
    """Ask the unpatched model once and the patched one, with nothing cached, twice.

    Both give the same tokens and numbers and draw as many random numbers for them. The patched model takes no path but its own, and the
    second time computes less, from what the first has left. Arguments are those of `ask`.
    """
    expected = ask(reference, mode, inputs, **more)
    random = torch.get_rng_state()
    _assert_tells_something(expected, mode, mode.inputs() if inputs is None else inputs)
    computed, cached = [], []
    for _ in range(2):
        before = patched.radixkv.stats()
        with counted_tokens(patched) as rows:
            assert_same(ask(patched, mode, inputs, **more), expected, to_the_bit=False)
        assert torch.equal(torch.get_rng_state(), random)
        after = patched.radixkv.stats()
        assert after.stock_calls == 0
        assert after.requests > before.requests
        computed.append(sum(rows))
        cached.append(after.cached_tokens - before.cached_tokens)
        patched.radixkv.check()
    if mode.reuses:
        assert cached[1] > cached[0] and computed[1] < computed[0]
    else:
        assert cached[1] == cached[0] and computed[1] == computed[0]


def _assert_tells_something(expected: Any, mode: Mode, inputs: Inputs) -> None:
    """A reference that says one thing, or whose rows all end together where they should not, proves nothing."""
    sequences = next(leaves(expected))
    if isinstance(sequences, torch.Tensor):
        tokens = sequences[:, inputs["input_ids"].shape[1] :]
        assert tokens.unique().numel() >= mode.num_distinct
        assert not mode.ends_early or len(set(_lengths(tokens, mode))) > 1


def _lengths(tokens: torch.Tensor, mode: Mode) -> list[int]:
    """Of each row the tokens before its end, or before the pads behind that."""
    ends = torch.tensor([PAD, *torch.tensor([mode.arguments.get("eos_token_id", [])]).flatten().tolist()])
    return [int((torch.isin(row, ends).int().cumsum(0) == 0).sum()) for row in tokens]
