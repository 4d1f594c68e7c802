"""Which kernels run, and one forward step as a layer sees it: store the new K/V, then attend to all of it in the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from importlib import import_module

import torch

from radixkv.kernels.configs import layout_for
from radixkv.kernels.items import Layout
from radixkv.kernels.torch_held import Held, gather_held, may_hold
from radixkv.kernels.work import Backend as Implementation
from radixkv.kernels.work import Work, build_work
from radixkv.plan import Phase, Plan
from radixkv.pool import BlockPool
from radixkv.sequence import Sequence

BACKENDS = ("auto", "torch", "triton")


class Backend:
    """The attention functions of one implementation, chosen once, with a count of what was launched.

    Args:
        name: "torch" or "triton" (see `resolve_backend` for "auto").
        num_heads: query heads of the model, for the tile sizes.

    Attributes:
        name: the implementation. launches: calls so far by function name; only ever grows, and is the caller's to reset.
    """

    def __init__(self, name: str, *, num_heads: int, pool: BlockPool):
        self.name: Implementation = "torch" if name == "torch" else "triton"
        self.launches: Counter[str] = Counter()
        self._layout: Layout | None = None
        if name == "torch":
            self._store = self._prefill = self._decode = import_module("radixkv.kernels.torch_ops")
            return
        self._store = import_module("radixkv.kernels.store")
        self._prefill = import_module("radixkv.kernels.prefill")
        self._decode = import_module("radixkv.kernels.decode")
        group = num_heads // pool.num_kv_heads
        self._layout = layout_for(pool.head_dim, group, pool.dtype, pool.block_size, pool.num_kv_heads)

    def build_work(
        self,
        phase: Phase,
        tables: list[list[int]],
        query_lens: list[int],
        seq_lens: list[int],
        carried: dict,
        device: torch.device,
    ) -> Work:
        """The work lists of one step, see `radixkv.kernels.work`; carried as `Work` describes it."""
        work = build_work(tables, query_lens, seq_lens, phases=phase, backend=self.name, layout=self._layout, device=device)
        return replace(work, carried=carried, round_as_sdpa=True)

    def holds(self, sequences: list[Sequence], device: torch.device) -> bool:
        """Whether the layers of a decode step of these rows keep what they gathered, see `HeldStep`."""
        return self.name == "torch" and len(sequences) == 1 and device.type == "cpu"

    def store_kv(self, k_pool, v_pool, key, value, slots, source_rows) -> None:
        self.launches["store_kv"] += 1
        self._store.store_kv(k_pool, v_pool, key, value, slots, source_rows)

    def copy_blocks(self, pools, src, dst, num_tokens) -> None:
        self.launches["copy_blocks"] += 1
        self._store.copy_blocks(pools, src, dst, num_tokens)

    def attend(self, plan: Plan, k_pool, v_pool, query, *, scale, sliding_window, softcap) -> torch.Tensor:
        options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "plan": plan.work}
        if plan.phase == "decode":
            self.launches["decode_attention"] += 1
            return self._decode.decode_attention(query, k_pool, v_pool, plan.block_table, plan.seq_lens, **options)[0]
        self.launches["prefill_attention"] += 1
        return self._prefill.prefill_attention(
            query, k_pool, v_pool, plan.block_table, plan.cu_query_lens, plan.seq_lens, **options
        )[0]


class Step:
    """One forward step over the pool; every layer calls `store` and then `attend`, each once.

    Tensors are as attention layers have them: `[1, heads, T, head_dim]` of T packed tokens.

    Args:
        pool: where K/V lives. backend: what runs. plan: what the step computes.
    """

    def __init__(self, pool: BlockPool, backend: Backend, plan: Plan):
        self.pool, self.backend, self.plan = pool, backend, plan
        self.num_tokens = plan.num_tokens
        self.positions = plan.positions

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the K and V rows `[1, num_kv_heads, T, head_dim]` that `layer` computed for the step's tokens into the pool."""
        plan, pool = self.plan, self.pool
        key, value = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
        self.backend.store_kv(pool.keys[layer], pool.values[layer], key, value, plan.slots, plan.source_rows)

    def attend(
        self, layer: int, query: torch.Tensor, *, scale: float, sliding_window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention output `[1, T, num_heads, head_dim]` of the step's queries over all stored tokens of their sequences."""
        out = self.backend.attend(
            self.plan,
            self.pool.keys[layer],
            self.pool.values[layer],
            query.squeeze(0).transpose(0, 1),
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
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
        self.num_tokens = 1
        self._position = sequence.num_tokens - 1
        self._blocks = sequence.blocks
        self._held, self._build_plan = held, build_plan
        self._index = torch.tensor([self._position, self._position % pool.block_size])
        self.positions, self._offset = self._index[:1], self._index[1:]

    @cached_property
    def plan(self) -> Plan:  # type: ignore[override]
        return self._build_plan()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
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
        self.backend.launches["decode_attention"] += 1
        held = self._held.get(keys.data_ptr())
        if held is None or held.num_keys != num_keys:  # a block has begun
            held = self._held[keys.data_ptr()] = gather_held(keys, self.pool.values[layer], self._blocks, num_keys)
        return held.attend(query, scale).transpose(1, 2)


def resolve_backend(name: str, device: torch.device) -> str:
    """The implementation that `name` means on `device`.

    Raises:
        ValueError: `name` is unknown, or cannot run on `device`.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name == "triton" and device.type != "cuda" and not _triton_interprets():
        raise ValueError(
            f"backend='triton' cannot run on device {device}: it needs a CUDA or ROCm device, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment before Triton is imported); use backend='torch' here"
        )
    return name


def _triton_interprets() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)


