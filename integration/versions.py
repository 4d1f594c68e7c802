"""What differs between the releases of transformers that radixkv runs on, 4.57 to 5.24, and takes more than a member to answer.

The members that each release asks of a cache stand together in hf_cache.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers

_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def cache_argument(model_class: type) -> str:
    """The name under which a model's forward takes its cache: `cache` from transformers 5.23 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


def held_cache(output: Any) -> Any:
    """The cache in an output of a model or of generate(), whose field was renamed with the argument; None if there is none."""
    return getattr(output, "cache", None) or getattr(output, "past_key_values", None)


def columns_after_crop(crop_to: int, num_columns: int) -> int:
    """How many columns `crop(crop_to)` leaves of a cache.

    A negative number drops columns from the end, a positive one says how many to keep; 0 keeps none in 4.57, and all from 5.0 on.

    Raises:
        ValueError: a positive number from 5.24 on, which its own caches refuse too.
    """
    if crop_to < 0:
        return max(0, num_columns + crop_to)
    if crop_to == 0:
        return 0 if _RELEASE < (5, 0) else num_columns
    if _RELEASE >= (5, 24):
        raise ValueError(f"crop takes the number of tokens to remove as a negative number in transformers 5.24 and later, got {crop_to}")
    return min(crop_to, num_columns)


def chunks_pass_by_calls(model: Any) -> bool:
    """Whether the chunks of `prefill_chunk_size` go to a model's forward of its own (that of accelerate's hooks), not to its call."""
    return _RELEASE < (5, 0) and "forward" in vars(model)


def mask_width(mask: Any, generation_config: Any) -> int | None:
    """How many columns generate() was told of, of which input_ids may be the last only; None if it was not told.

    A mask of ones is dropped from 5.24 on, and only its width is kept.
    """
    return getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
