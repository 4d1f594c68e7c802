"""What transformers asks of any cache, and the cache that the layers of one step write to.

Members differ between releases of transformers (4.57 to 5.24); each one here is read by some release.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from radixkv.step import Step


class BaseCache(Cache):
    """What all caches of radixkv answer. `Cache.__init__` is not called: its layer list is another one in every release."""

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
        return True

    def activate_past_recording(self) -> None:
        pass  # nothing is ever dropped

    @property
    def batch_size(self) -> int:
        return -1

    max_batch_size = max_cache_len = batch_size


class StepCache(BaseCache):
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
