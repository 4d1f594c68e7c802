"""Small random models with wide logit margins, padded batches of prompts, and a count of the tokens a model really computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM

from radixkv.bench.models import spread_weights

TRANSFORMERS_MAJOR = int(transformers.__version__.split(".")[0])
VOCAB_SIZE = 997
PAD, BOS, EOS = 0, 1, 2

# Query heads, K/V heads, head_dim of real models; hidden size is heads * head_dim.
HEAD_SHAPES = {
    "Qwen2.5-0.5B": (14, 2, 64),
    "DeepSeek-R1-Distill-Qwen-1.5B": (12, 2, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "SmolLM2-135M": (9, 3, 64),
}


def tiny_qwen2(
    seed: int = 0, *, num_layers: int = 3, heads: tuple[int, int, int] = (4, 2, 32), dtype: torch.dtype = torch.float32, **settings
) -> Qwen2ForCausalLM:
    """A Qwen2 of random weights whose greedy continuation varies and whose top two logits lie far apart."""
    num_heads, num_kv_heads, head_dim = heads
    config = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 2 * num_heads * head_dim,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        **settings,
    }
    torch.manual_seed(seed)
    return spread_weights(Qwen2ForCausalLM(Qwen2Config(**config))).to(dtype)


def prompt(length: int, seed: int) -> torch.Tensor:
    """Random token ids int64 [length], none of them special."""
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def left_pad(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and attention mask, int64 [rows, longest], padded on the left."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), PAD)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = row
        mask[i, longest - len(row) :] = 1
    return ids, mask


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """The packed or padded token rows given to layer 0 by each forward inside the block."""
    rows: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[:2].numel()), with_kwargs=True
    )
    try:
        yield rows
    finally:
        hook.remove()


def new_tokens(output: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return output[:, input_ids.shape[1] :]


def assert_varied(tokens: torch.Tensor, at_least: int = 8) -> None:
    """A reference that repeats one token proves nothing."""
    distinct = tokens.unique().numel()
    assert distinct >= at_least, f"the reference holds only {distinct} different tokens"
