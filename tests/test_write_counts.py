"""Writes to any of many tensors are noticed in one call, as the tensors' own counts tell them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from radixkv.integration.write_counts import WriteCounts


def parameters() -> list[torch.Tensor]:
    kinds = [torch.float32, torch.bfloat16, torch.int8]
    plain = [torch.zeros(3, 4, dtype=kinds[i % 3]) for i in range(6)]
    sparse = torch.eye(3).to_sparse()
    return [*plain, nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4, 4)), sparse, torch.zeros(())]


WRITES = {
    "in place": lambda tensor: tensor.zero_(),
    "through detach": lambda tensor: tensor.detach().zero_(),
    "in inference mode": lambda tensor: torch.inference_mode()(tensor.zero_)(),
    "a copy": lambda tensor: tensor.copy_(tensor.clone()),
    "nothing": lambda tensor: tensor.clone().zero_(),
    "read": lambda tensor: tensor.sum(),
    "other data": lambda tensor: setattr(tensor, "data", tensor.detach().clone()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("which", range(10))
def test_it_sees_what_the_counts_tell(which: int, write) -> None:
    tensors = parameters()
    counts = WriteCounts(tensors)
    before = [tensor._version for tensor in tensors]
    assert not counts.changed()
    with torch.no_grad():
        write(tensors[which])
    assert counts.changed() == (before != [tensor._version for tensor in tensors])
    assert not WriteCounts(tensors).changed()


def test_an_optimizers_step() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(20)]
    counts = WriteCounts(weights)
    torch.stack(list(weights)).sum().backward()
    assert not counts.changed()
    random.Random(0).shuffle(weights)
    torch.optim.SGD(weights[:1], lr=0.1).step()
    assert counts.changed()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_made_in_any_mode(mode) -> None:
    tensors = parameters()
    with mode():
        counts = WriteCounts(tensors)
        assert not counts.changed()
    with torch.no_grad():
        tensors[4].add_(1)
    assert counts.changed()


def test_made_where_hooks_take_part_in_saving() -> None:
    """Autograd compares no counts of what a hook has packed."""
    tensors = parameters()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        counts = WriteCounts(tensors)
    assert not counts.changed()
    with torch.no_grad():
        tensors[1].zero_()
    assert counts.changed()


def test_it_keeps_no_memory_and_no_hold_on_a_tensor() -> None:
    """Casting a model would have kept its old weights until the next call, and swap_tensors refuses tensors that somebody else holds."""
    weight, other = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.ones(1000))
    counts = WriteCounts([weight])
    storage = weight.untyped_storage()._weak_ref()
    weight.data = weight.data.half()
    assert torch.UntypedStorage._expired(storage) and not counts.changed()
    torch.UntypedStorage._free_weak_ref(storage)
    torch.utils.swap_tensors(weight, other)
    assert weight.sum() == 1000


def test_none_to_watch() -> None:
    assert not WriteCounts([]).changed()
