"""`FollowingCache`: a `PrefixCache` whose namespaces, pool and captured steps follow one model's weights, adapters, type and devices."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from radixkv.attention import choose_backend
from radixkv.cache import PrefixCache
from radixkv.eviction import policy_maker
from radixkv.integration.adapters import adapters_in, numbered, unnumbered
from radixkv.integration.families import ModelShape, model_shape
from radixkv.integration.graphs import CudaCapture, DecodeGraphs, why_not_captured
from radixkv.integration.model_weights import Change, ModelWeights
from radixkv.pin import Pin, Pins
from radixkv.pool import BlockPool, default_num_blocks, describe_default, require_block_size
from radixkv.sequence import Batch
from radixkv.several_devices import AnyBackend, make_backend
from radixkv.token_key import namespace_of
from radixkv.tree import Lease

logger = logging.getLogger("radixkv")


@dataclass(frozen=True)
class CacheOptions:
    """What the user asked of `radixkv.patch_model`; see there."""

    num_blocks: int | None
    block_size: int
    backend: str
    namespace: tuple
    exact: bool
    cuda_graphs: bool
    eviction: str
    pin_budget: float
    host_bytes: int


class FollowingCache(PrefixCache):
    """The prefix cache of one model, as far as it depends on the model itself.

    Args:
        shape: the model's attention, devices and type.
        options: of `radixkv.patch_model`.

    Attributes:
        graphs: the captured decode steps; None where steps are not captured.
        last_change: what was last seen to have changed in the model's weights, in words; None if nothing has.
    """

    # The part of the namespace that says which adapters are switched on.
    _adapters: tuple = ()

    def __init__(self, shape: ModelShape, options: CacheOptions):
        for keyword in ("exact", "cuda_graphs"):
            if not isinstance(getattr(options, keyword), bool):
                raise ValueError(f"patch_model: {keyword} must be True or False, got {getattr(options, keyword)!r}")
        choices = [choose_backend(options.backend, device) for device in dict.fromkeys(shape.devices)]
        names = sorted({choice.name for choice in choices})
        self._backend_reason = "; ".join(dict.fromkeys(choice.reason for choice in choices))
        if options.exact and names != ["triton"]:
            name = names[0]
            raise ValueError(f"exact=True needs the Triton kernels, and the backend is {name!r}: leave it out, or use backend='triton'")
        require_block_size("patch_model", options.block_size)
        policy_maker("patch_model", options.eviction)
        Pins(options.pin_budget)
        self.shape, self.options = shape, replace(options, backend=names[0] if len(names) == 1 else options.backend)
        self.num_blocks = _default_num_blocks(shape, options.block_size) if options.num_blocks is None else options.num_blocks
        pool = self._make_pool(shape)
        super().__init__(pool, self._make_backend(shape, pool), options.namespace, options.eviction, options.pin_budget, options.host_bytes)
        self.graphs = self._make_graphs(shape)
        self._weights: ModelWeights | None = None
        self.last_change: str | None = None
        self._model: weakref.ref[PreTrainedModel] | None = None
        # What the model said of its type and device when its shape was read last.
        self._seen: tuple[torch.dtype, torch.device] | None = None

    def follow(self, model: PreTrainedModel) -> None:
        """See whether the model's weights, type or devices changed since the last call, and which adapters are switched on.

        Nothing that was computed with what has changed is served again; other adapters' K/V are found again when these are switched on.
        """
        with self.lock:
            self._model = weakref.ref(model)
            if (model.dtype, model.device) != self._seen:
                self._follow_shape(model)
            if self._weights is None:
                self._weights = ModelWeights(model)
            elif (change := self._weights.look(model)) is not None:
                self._drop_stale(change)
                # Not before: of a change that was taken in and then interrupted nobody would hear again.
                self._weights.take_in(model, change)
                if change.everything:  # layers may have got other devices
                    self._seen = None
                    self._follow_shape(model)
                self._log_change(change)
            self._adapters = self._weights.selection.namespace()

    def describe(self) -> str:
        """The choices that were made at patch time, and why, in one line."""
        pool = self.pool
        why = "as asked" if self.options.num_blocks is not None else describe_default(pool.device)
        captures = "captured" if self.graphs is not None else f"not captured ({self._why_not_captured(self.shape)})"
        return (
            f"backend {self.backend.name} ({self._backend_reason}); {pool.num_blocks} blocks of {pool.block_size} tokens, "
            f"{pool.num_blocks * pool.block_bytes / 2**30:.2f} GiB ({why}); eviction {self.options.eviction}; decode steps {captures}"
        )

    def match_prefix(self, token_ids: Any, namespace: tuple = (), priority: int | None = None) -> Lease:
        with self.lock:
            self._follow_again()
            return super().match_prefix(token_ids, namespace, priority)

    def pin(self, token_ids: Any, namespace: tuple = ()) -> Pin:
        with self.lock:
            self._follow_again()
            return super().pin(token_ids, namespace)

    match_prefix.__doc__, pin.__doc__ = PrefixCache.match_prefix.__doc__, PrefixCache.pin.__doc__

    def invalidate(self) -> None:
        super().invalidate()
        self._forget_graphs()

    def full_namespace(self, namespace: tuple = ()) -> tuple:
        weights, *others = super().full_namespace(namespace)
        return (weights, *self._adapters, *others)

    def is_current(self, namespace: tuple) -> bool:
        if not super().is_current(namespace):
            return False
        numbers = {} if self._weights is None else self._weights.numbers
        return all(numbers.get(name) == number for name, number in adapters_in(namespace))

    def to_saved(self, namespace: tuple) -> tuple:
        return unnumbered(super().to_saved(namespace))

    def from_saved(self, namespace: tuple) -> tuple:
        return super().from_saved(numbered(namespace, {} if self._weights is None else self._weights.numbers))

    def note_adapters(self, batch: Batch | None) -> None:
        """See that a batch still runs with the adapters that it was admitted with; if not, nothing of it will be stored."""
        if batch is not None and self._weights is not None:
            batch.is_mixed |= self._weights.selection.namespace() != batch.namespace[1:-2]

    def runs_under_autocast(self) -> bool:
        """Whether autocast is on for a device that the model computes on."""
        return any(torch.is_autocast_enabled(kind) for kind in {device.type for device in self.shape.devices})

    def names_adapters_per_row(self) -> bool:
        """Whether the rows of the present call name adapters of their own (`adapter_names` of peft)."""
        return self._weights is not None and self._weights.selection.is_per_row()

    def _require_model(self, what: str) -> PreTrainedModel:
        model = None if self._model is None else self._model()
        if model is None:
            raise RuntimeError(f"the model of this cache is gone, so nobody knows what its prefixes belong to: {what} while it lives")
        return model

    def _follow_again(self) -> None:
        model = None if self._model is None else self._model()
        if model is not None:
            self.follow(model)

    def _follow_shape(self, model: PreTrainedModel) -> None:
        shape = model_shape(model)
        if shape != self.shape:
            pool = self._make_pool(shape)
            self.replace_pool(pool, self._make_backend(shape, pool))
            self.shape, self.graphs = shape, self._make_graphs(shape)
            where = ", ".join(map(str, dict.fromkeys(shape.devices)))
            logger.info("the model was moved or cast to %s on %s: its cache starts over, empty", shape.dtype, where)
        self._seen = model.dtype, model.device

    def _drop_stale(self, change: Change) -> None:
        self.last_change = change.reason
        if change.everything:
            self.invalidate()
            return
        for tree in (self.tree,) if self.tier is None else (self.tree, self.tier.tree):
            for prefix in {namespace[:2] for namespace in map(namespace_of, tree.roots()) if self._uses(namespace, change)}:
                tree.retire(prefix)
        for pin in self._pins.all():
            if self._uses(pin.namespace, change):
                self._pins.let_go(pin)
        self._forget_graphs()

    @staticmethod
    def _log_change(change: Change) -> None:
        if change.everything:
            logger.info("the weights were changed: nothing that was computed before is served again: %s", change.reason)
        else:
            logger.info("the K/V of adapters %s is stale: %s", sorted(change.adapters), change.reason)

    @staticmethod
    def _uses(namespace: tuple, change: Change) -> bool:
        return not change.adapters.isdisjoint(adapters_in(namespace))

    def __deepcopy__(self, memo: dict) -> FollowingCache:
        # A copy of a model may go its own way, so its cache starts empty.
        return type(self)(self.shape, replace(self.options, num_blocks=self.num_blocks))

    def _forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _make_pool(self, shape: ModelShape) -> BlockPool:
        return BlockPool(
            self.num_blocks,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=self.options.block_size,
            dtype=shape.dtype,
            device=shape.devices,
        )

    def _make_graphs(self, shape: ModelShape) -> DecodeGraphs | None:
        return DecodeGraphs(CudaCapture(shape.device)) if self._why_not_captured(shape) is None else None

    def _why_not_captured(self, shape: ModelShape) -> str | None:
        if not self.options.cuda_graphs:
            return "cuda_graphs=False"
        if len(set(shape.devices)) > 1:
            return "the layers lie on several devices"
        return why_not_captured(self.options.backend, shape.device)

    def _make_backend(self, shape: ModelShape, pool: BlockPool) -> AnyBackend:
        return make_backend(self.options.backend, num_heads=shape.num_heads, pool=pool, exact=self.options.exact)


def _default_num_blocks(shape: ModelShape, block_size: int) -> int:
    """As many blocks as fit on the device that has least room for those of its layers."""
    layer_bytes = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize * block_size
    return min(default_num_blocks(device, count * layer_bytes, block_size) for device, count in Counter(shape.devices).items())
