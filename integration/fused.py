"""Rotating q and k and storing k and v in one launch, in place of a dozen: attention modules whose forward is known, in Triton only.

A module takes a subclass of its class by assignment, as the model does; whatever is not a packed forward runs its own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from radixkv.integration.attention import STEP_ARGUMENT
from radixkv.integration.subclass import BASE_CLASS, make_subclass
from radixkv.step import Step

# Attention classes of transformers that are these projections, the rotary embedding and attention, and nothing else.
FUSED_CLASSES = ("Qwen2Attention",)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def fuse_attention(model: torch.nn.Module) -> None:
    """Let the attention modules that allow it rotate and store in one launch; `unfuse_attention` takes it back."""
    for module in _own_modules(model):
        base: Any = type(module)
        known = base.__name__ in FUSED_CLASSES and base.__module__.startswith("transformers.models.") and not hasattr(base, BASE_CLASS)
        if known and tuple(module._modules) == PROJECTIONS:
            module.__class__ = _fused_class(base)


def unfuse_attention(model: torch.nn.Module) -> None:
    """Give every attention module its own class back."""
    for module in _own_modules(model):
        if hasattr(type(module), BASE_CLASS):
            module.__class__ = getattr(type(module), BASE_CLASS)


def _own_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules below a model, without those of other patched models among them."""
    pending = [model]
    while pending:
        for child in pending.pop().children():
            if "radixkv" not in child.__dict__:
                yield child
                pending.append(child)


@functools.cache
def _fused_class(base: type) -> type:
    @functools.wraps(base.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step: Step | None = kwargs.get(STEP_ARGUMENT)
        if step is None or not step.fuses_rotation:
            return base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        return _attend(self, step, *args, **kwargs)

    return make_subclass(base, {"forward": forward})


def _attend(
    module: Any, step: Step, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    heads = (hidden_states.shape[1], -1, module.head_dim)  # [T, heads, head_dim] of [1, T, hidden]
    query, key, value = (
        project(hidden_states).contiguous().view(heads) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    # What a hook or another kind of layer returns may be somebody's to keep.
    in_place = type(module.q_proj) is torch.nn.Linear and not module.q_proj._forward_hooks and not module.q_proj._forward_pre_hooks
    cos, sin = position_embeddings
    query = step.rotate_and_store(module.layer_idx, query, key, value, cos[0], sin[0], in_place=in_place)
    out = step.attend(
        module.layer_idx, query.transpose(0, 1)[None], scale=module.scaling, sliding_window=module.sliding_window, softcap=None
    )
    return module.o_proj(out.reshape(*hidden_states.shape[:2], -1)), None
