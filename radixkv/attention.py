"""Which kernels run, and one forward step as a layer sees it: store the new K/V, then attend to all of it in the pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from radixkv.kernels.configs import layout_for
from radixkv.kernels.items import Layout
from radixkv.kernels.work import Backend as Implementation
from radixkv.kernels.work import Work, build_work
from radixkv.plan import Phase, Plan
from radixkv.pool import BlockPool

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


@dataclass(frozen=True)
class Step:
    """One forward step over the pool; every layer calls `store` and then `attend`, each once."""

    pool: BlockPool
    backend: Backend
    plan: Plan

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the K and V rows [T, num_kv_heads, head_dim] that `layer` computed for the step's tokens into the pool."""
        plan = self.plan
        self.backend.store_kv(self.pool.keys[layer], self.pool.values[layer], key, value, plan.slots, plan.source_rows)

    def attend(
        self, layer: int, query: torch.Tensor, *, scale: float, sliding_window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention output [T, num_heads, head_dim] of the step's queries over all stored tokens of their sequences."""
        return self.backend.attend(
            self.plan,
            self.pool.keys[layer],
            self.pool.values[layer],
            query,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )


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


