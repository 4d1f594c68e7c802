"""radixkv: RadixAttention for Hugging Face models, over a paged K/V pool, a radix tree and Triton kernels.

`radixkv.patch_model(model)` is the whole of everyday use. Importing the package touches no device and needs neither Triton nor
transformers nor torch: each is imported by what uses it. The package logs under "radixkv", and says nothing unless logging is set up.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache
    from radixkv.errors import OutOfBlocks
    from radixkv.pin import Pin
    from radixkv.pool import BlockPool
    from radixkv.stats import CacheStats
    from radixkv.token_key import TokenKey
    from radixkv.tree import Lease, RadixTree

__version__ = "0.1.0"
__all__ = ["BlockPool", "CacheStats", "Lease", "OutOfBlocks", "Pin", "PrefixCache", "RadixTree", "TokenKey", "patch_model", "unpatch_model"]

# The module that each of these is imported from when it is first asked for.
_HOMES = {
    "BlockPool": "pool",
    "CacheStats": "stats",
    "Lease": "tree",
    "OutOfBlocks": "errors",
    "Pin": "pin",
    "PrefixCache": "cache",
    "RadixTree": "tree",
    "TokenKey": "token_key",
}

logging.getLogger("radixkv").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"radixkv.{_HOMES[name]}"), name)
    if not name.startswith("_") and find_spec(f"radixkv.{name}") is not None:
        return import_module(f"radixkv.{name}")
    raise AttributeError(f"module 'radixkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def patch_model(
    model: Any,
    *,
    num_blocks: int | None = None,
    block_size: int = 64,
    backend: str = "auto",
    namespace: tuple = (),
    exact: bool = False,
    cuda_graphs: bool = True,
    eviction: str = "slru",
    pin_budget: float = 0.5,
    host_bytes: int = 0,
) -> Any:
    """Give one model instance a prefix cache; `model.generate()` then computes only tokens it has never seen.

    The instance is changed in place (its class becomes a subclass of the same name) and its handle stands at `model.radixkv`. No other
    model is touched.

    The model may be used from several threads at once, with right tokens. One lock is held for each forward step, from its planning to the
    end of its last layer, and for each short operation of the cache (a lookup, storing, `stats()`), which waits for a running step; it is
    let go of between the steps of a generation, where generate() samples, stops and streams. So threads take turns step by step; to
    compute several prompts at once, pass them as one batch. Changing weights while other threads generate is up to the caller.

    Args:
        model: a transformers model of a supported class: Qwen2, Qwen2-MoE, Qwen3, Llama, Mistral, Gemma 2 or 3, each `...ForCausalLM`.
        num_blocks: blocks in the K/V pool, each of `block_size` tokens of all layers. None takes, on CPU, a quarter of the available
            memory but at most 65,536 tokens, and on a GPU half of the free memory; of several devices the one with least room decides.
        block_size: tokens in a block, a power of two of at least 16.
        backend: "triton", "torch", or "auto" (Triton on a CUDA or ROCm device, torch elsewhere; `model.radixkv.backend.name` says which).
            Each layer's K/V and attention are on the device that the layer computes on.
        namespace: a tuple that separates this model's prefixes from others' (a tenant, a salt); nothing crosses it.
        exact: Triton only: cut every row's keys at fixed positions, so that its attention is the same to the bit alone and in any batch,
            cached or computed. Otherwise the cuts follow the batch, which is faster and equal to rounding.
        cuda_graphs: capture decode steps and replay them, where the backend is Triton on a CUDA device. A model with hooks on its modules
            when generate() begins (those of accelerate, with `device_map`, too) is not captured, nor is one on several devices.
        eviction: what goes first when blocks are wanted: "slru" (least recently used, but what was never reused before what was), "lru",
            "lfu" (least often used), "fifo" (stored first), "priority" (lowest `priority=` of `match_prefix` and `insert`), or "cost"
            (cheapest to lose: tokens, times the cost of computing one at its depth, times its expected reuse). The default is what
            `bench/replay.py` says: over its traces 85.4 % of the prompt tokens are found, with "lru" 84.3 % and with "cost" 85.5 %, which
            takes longer; Belady's optimum is 89.5 %.
        pin_budget: the share of the pool's blocks that `model.radixkv.pin()` may hold, 0 to 1.
        host_bytes: host memory for blocks that are evicted from the pool; a hit brings them back. 0: none, they are lost.

    Returns:
        The same `model`.

    Raises:
        TypeError: the model's class is not supported.
        ValueError: an argument is wrong, the model is already patched, or the backend cannot run on the model's device.
        ImportError: transformers is not installed.
    """
    _require_transformers("patch_model")
    from radixkv.integration.following import CacheOptions
    from radixkv.integration.patch import patch_model as patch

    options = CacheOptions(num_blocks, block_size, backend, namespace, exact, cuda_graphs, eviction, pin_budget, host_bytes)
    return patch(model, options)


def unpatch_model(model: Any) -> Any:
    """Take the prefix cache off a model, leaving the instance as `patch_model` found it.

    Args:
        model: a model that `patch_model` changed; changed back in place.

    Returns:
        The same `model`.

    Raises:
        ValueError: the model is not patched.
    """
    _require_transformers("unpatch_model")
    from radixkv.integration.patch import unpatch_model as unpatch

    return unpatch(model)


def _require_transformers(function: str) -> None:
    if find_spec("transformers") is None:
        raise ImportError(f"{function} needs transformers 4.57 or newer, which is not installed: pip install 'radixkv[hf]'")
