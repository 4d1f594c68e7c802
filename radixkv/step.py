"""One forward step as a layer sees it: store the new K/V, then attend to all of it in the pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from radixkv.attention import Backend
from radixkv.decode_plan import DecodePlan
from radixkv.host_plan import HostDecodePlan
from radixkv.kernels.torch_held import Held, gather_held, may_hold
from radixkv.plan import Plan
from radixkv.pool import BlockPool
from radixkv.sequence import Sequence


class Step:
    """One forward step over the pool: `begin`, then every layer calls `store` and `attend`, each once.

    Tensors are as attention layers have them: `[1, heads, T, head_dim]` of T packed tokens.

    Args:
        pool: where K/V lives. backend: what runs. plan: what the step computes.
        reuses_outputs: of a decode plan: every layer's output is the same tensor, so that a captured step allocates nothing here.

    Attributes:
        positions: int64 [T], valid after `begin`.
        fuses_rotation: whether `rotate_and_store` may take the place of `store`.
        num_attended_layers: calls of `attend` since then.
    """

    plan: Plan | DecodePlan | HostDecodePlan

    def __init__(self, pool: BlockPool, backend: Backend, plan: Plan | DecodePlan | HostDecodePlan, *, reuses_outputs: bool = False):
        self.pool, self.backend, self.plan = pool, backend, plan
        self._reuses_outputs = reuses_outputs
        self.positions = plan.positions
        self.fuses_rotation = backend.name == "triton"
        self._stored: set[int] = set()
        self.num_attended_layers = 0

    @property
    def num_stored_layers(self) -> int:
        """Different layers that stored their K/V since `begin`."""
        return len(self._stored)

    @property
    def is_complete(self) -> bool:
        """Whether every layer has stored and attended, each once."""
        return len(self._stored) == self.num_attended_layers == self.pool.num_layers

    def begin(self) -> None:
        """On the device: what precedes the layers. It depends on nothing that the host knows, so that it can be captured with them."""
        self._stored.clear()
        self.num_attended_layers = 0
        if isinstance(self.plan, DecodePlan):
            self.plan.advance()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the K and V rows `[1, num_kv_heads, T, head_dim]` that `layer` computed for the step's tokens into the pool."""
        self._stored.add(layer)
        plan, pool = self.plan, self.pool
        key, value = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
        self.backend.store_kv(pool.keys[layer], pool.values[layer], key, value, plan.slots, plan.source_rows)

    def rotate_and_store(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        in_place: bool,
    ) -> torch.Tensor:
        """Rotate q and k, and store k and v, in one launch; return the rotated q, like query.

        Args:
            layer: which. query: `[T, num_heads, head_dim]`. key, value: `[T, num_kv_heads, head_dim]`. cos, sin: `[T, head_dim]`.
            in_place: whether query may be overwritten.
        """
        self._stored.add(layer)
        plan, pool = self.plan, self.pool
        out = query if in_place else None
        return self.backend.rope_store_kv(
            query, key, value, cos, sin, pool.keys[layer], pool.values[layer], plan.slots, plan.source_rows, out
        )

    def attend(
        self, layer: int, query: torch.Tensor, *, scale: float, sliding_window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention output `[1, T, num_heads, head_dim]` of the step's queries over all stored tokens of their sequences."""
        self.num_attended_layers += 1
        plan, query = self.plan, query.squeeze(0).transpose(0, 1)
        outputs = plan.outputs(query) if self._reuses_outputs and isinstance(plan, DecodePlan) else (None, None)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        out = self.backend.attend(
            plan, keys, values, query, *outputs, scale=scale, sliding_window=sliding_window, softcap=softcap
        )
        return out.unsqueeze(0)


class HeldStep(Step):
    """A decode step of a single sequence on a CPU, whose layers keep what they gathered of the pool from step to step.

    Where a layer cannot (a sliding window, a soft cap, too many tokens), it does what every step does.

    Args:
        pool: where K/V lives. backend: the torch one. sequence: the only row. held: by layer's K pool, see `radixkv.kernels.torch_held`;
            changed in place. build_plan: the plan of the step, for layers that need it.
    """

    def __init__(self, pool: BlockPool, backend: Backend, sequence: Sequence, held: dict[int, Held], build_plan: Callable[[], Plan]):
        self.pool, self.backend = pool, backend
        self._reuses_outputs = self.fuses_rotation = False
        self._stored = set()
        self.num_attended_layers = 0
        self._position = sequence.num_tokens - 1
        self._blocks = sequence.blocks
        self._held, self._build_plan = held, build_plan
        self._index = torch.tensor([self._position, self._position % pool.block_size])
        self.positions, self._offset = self._index[:1], self._index[1:]

    @cached_property
    def plan(self) -> Plan:  # type: ignore[override]
        return self._build_plan()

    def begin(self) -> None:
        # On the device there is nothing to do, the host has written all there is.
        self._stored.clear()
        self.num_attended_layers = 0

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._stored.add(layer)
        self.backend.launches["store_kv"] += 1
        keys = self.pool.keys[layer]
        held = self._held.get(keys.data_ptr())
        if held is not None and held.num_keys == self._position < held.capacity:
            held.append(key, value, self.positions, self._offset)
            return
        block = self._blocks[-1]
        keys.narrow(0, block, 1).index_copy_(2, self._offset, key)
        self.pool.values[layer].narrow(0, block, 1).index_copy_(2, self._offset, value)

    def attend(
        self, layer: int, query: torch.Tensor, *, scale: float, sliding_window: int | None, softcap: float | None
    ) -> torch.Tensor:
        keys = self.pool.keys[layer]
        num_keys = self._position + 1
        if sliding_window is not None or softcap is not None or not may_hold(num_keys, keys):
            return super().attend(layer, query, scale=scale, sliding_window=sliding_window, softcap=softcap)
        self.num_attended_layers += 1
        self.backend.launches["decode_attention"] += 1
        held = self._held.get(keys.data_ptr())
        if held is None or held.num_keys != num_keys:  # a block has begun
            held = self._held[keys.data_ptr()] = gather_held(keys, self.pool.values[layer], self._blocks, num_keys)
        return held.attend(query, scale).transpose(1, 2)
