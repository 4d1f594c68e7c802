"""The two caches that transformers sees: one that generate() carries from step to step, one that the layers of a step write to.

Members differ between releases of transformers (4.57 to 5.24); each one here is read by some release.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from radixkv.cache import PrefixCache
from radixkv.integration.graphs import DecodeGraphs
from radixkv.sequence import Batch
from radixkv.step import Step


def cache_argument(model_class: type) -> str:
    """The name under which a model's forward takes its cache: `cache` from transformers 5.23 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model_class.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


class _RadixCache(Cache):
    """What both caches answer. `Cache.__init__` is not called: its layer list is another one in every release."""

    is_compileable = False  # keeps generate() from compiling the model and from building masks ahead
    layer_class_to_replicate = None
    offloading = False

    def __init__(self, num_layers: int):
        self.layers: list = []
        self.num_layers = num_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError

    def __len__(self) -> int:
        return self.num_layers

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} columns)"

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        # 4.57 passes the positions of the new tokens, later releases their number.
        num_new = query.shape[0] if isinstance(query, torch.Tensor) and query.ndim else int(query)
        return self.get_seq_length() + num_new, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self.num_layers

    is_linear = is_dummy = is_sliding

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        return -1

    max_batch_size = max_cache_len = batch_size

    def _unsupported(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "radixkv does not support generation that reorders, crops or resizes its cache yet (beam search, assisted decoding): "
            "use greedy search or sampling, pass use_cache=False, or unpatch the model"
        )

    reorder_cache = batch_select_indices = batch_repeat_interleave = crop = reset = activate_past_recording = _unsupported


class GenerationCache(_RadixCache):
    """What generate() carries: the rows of one call. It claims to be empty at first, so that generate() sends the whole prompt.

    When it dies before its batch was stored or dropped, the batch goes back by itself.

    Attributes:
        batch: the rows, None before the first forward. num_columns: padded columns that generate() has sent.
        skips_finished: whether rows that have finished may be left out. finished: the rows that generate()'s stopping criteria have ended,
            bool [rows]; None when all are still computed. graphs: what decode steps are captured in; None: they run as they are.
        configs: the configurations that the model's layers read.
    """

    def __init__(self, prefix_cache: PrefixCache, num_layers: int, *, skips_finished: bool):
        super().__init__(num_layers)
        self.skips_finished = skips_finished
        self.prefix_cache = prefix_cache
        self.batch: Batch | None = None
        self.num_columns = 0
        self.finished: torch.Tensor | None = None
        self.graphs: DecodeGraphs | None = None
        self.configs: list[PretrainedConfig] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def take(self, batch: Batch) -> None:
        """Become the owner of an admitted batch."""
        self.batch = batch
        weakref.finalize(self, self.prefix_cache.returned.append, batch)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this cache belongs to the generate() call that made it and cannot be passed to a forward or another generate()")

    def __deepcopy__(self, memo: dict) -> GenerationCache:
        raise NotImplementedError("radixkv does not support copying its cache yet: call generate() again, the prefix is found by itself")


class StepCache(_RadixCache):
    """What the layers of one packed forward write to. Attention then reads the pool, not what `update` returns."""

    def __init__(self, step: Step, num_layers: int):
        super().__init__(num_layers)
        self.step = step

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.step.store(layer_idx, key, value)
        return key, value
