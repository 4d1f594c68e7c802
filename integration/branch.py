"""`Branch`: one prefix that is continued in several ways."""

from __future__ import annotations

import copy
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from radixkv.integration.versions import cache_argument
from radixkv.token_key import TOKEN_BYTES, token_key

if TYPE_CHECKING:
    from radixkv.integration.handle import ModelCache
    from radixkv.integration.paged_cache import PagedCache


class Branch:
    """A prefix, computed once, and its continuations, in the same blocks; what `model.radixkv.branch(token_ids)` returns.

    A context manager: leaving it stores the prefix for later prompts, like a generate() of it, and closes all continuations. To keep one
    of those, `store()` it before.

    Attributes:
        token_ids: the prefix, int64 [1, n] on the model's device.
        logits: what the model says of the token after it, [1, vocabulary].
    """

    def __init__(self, prefix_cache: ModelCache, model: Any, token_ids: Any, namespace: tuple):
        if isinstance(token_ids, torch.Tensor) and token_ids.ndim == 2:
            if len(token_ids) != 1:
                raise ValueError(f"branch: token_ids must be one prefix, [n] or [1, n], got {list(token_ids.shape)}")
            token_ids = token_ids[0]
        key = token_key(token_ids)
        if not key:
            raise ValueError("branch: token_ids holds no token")
        ids = torch.frombuffer(bytearray(key), dtype=torch.int32).to(torch.int64)
        assert len(ids) * TOKEN_BYTES == len(key)
        self.token_ids = ids[None].to(prefix_cache.shape.device)
        self._root = prefix_cache.new_cache(namespace)
        self._forks: weakref.WeakSet[PagedCache] = weakref.WeakSet()
        # generate() and a caller's loop run without gradients, and so does this.
        with torch.no_grad():
            output = model(self.token_ids, logits_to_keep=1, **{cache_argument(type(model)): self._root})
        self.logits: torch.Tensor = output.logits[:, -1]

    def fork(self, num_forks: int = 1) -> list[PagedCache]:
        """Caches that hold the prefix, each to be continued on its own: by `model(..., past_key_values=)` or by generate().

        Nothing is copied until one of them writes to the prefix's last block, if that is partly filled: then that block is.

        Raises:
            ValueError: num_forks is no int of at least 1. RuntimeError: the scope has ended.
        """
        if type(num_forks) is not int or num_forks < 1:
            raise ValueError(f"fork: num_forks must be an int of at least 1, got {num_forks!r}")
        if not self._root.is_open:
            raise RuntimeError("fork: the `with` block of this branch has ended; its prefix is found again by branch()")
        forks = [copy.deepcopy(self._root) for _ in range(num_forks)]
        self._forks.update(forks)
        return forks

    def close(self) -> None:
        """What leaving the `with` block does. Nothing happens if it was done before."""
        for fork in self._forks:
            fork.close()
        self._root.store()

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
