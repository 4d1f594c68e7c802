"""What the tests of `PagedCache` share."""

from __future__ import annotations

from typing import Any

import torch

from radixkv.integration.paged_cache import PagedCache
from radixkv.integration.versions import held_cache

BLOCK = 16
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def forward(model: Any, ids: torch.Tensor, cache: Any, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **arguments).logits


def answer(model: Any, ids: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, PagedCache]:
    """The sequences of a generate() and the cache that it returns."""
    output = model.generate(ids, return_dict_in_generate=True, **{**GREEDY, **arguments})
    return output.sequences, held_cache(output)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
