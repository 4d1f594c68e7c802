"""Which implementation of the kernels runs, and how it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from radixkv.decode_plan import DecodePlan
from radixkv.host_plan import HostDecodePlan
from radixkv.kernels.configs import layout_for
from radixkv.kernels.items import Layout
from radixkv.kernels.work import Backend as Implementation
from radixkv.kernels.work import Capacity, Work, build_work
from radixkv.plan import Plan
from radixkv.pool import BlockPool

BACKENDS = ("auto", "torch", "triton")


class Choice(NamedTuple):
    """A backend's name, and why it is that one."""

    name: str
    reason: str


class Backend:
    """The functions of one implementation, chosen once, with a count of what was launched.

    Args:
        name: "torch" or "triton" (see `choose_backend` for "auto").
        num_heads: query heads of the model.
        pool: where K/V lives; its shape and device decide the tile sizes.
        exact: use the exact plan: what a row attends to is cut at fixed positions, so that its result does not depend on the batch.

    Attributes:
        name: the implementation. launches: calls so far by function name; only ever grows, and is the caller's to reset.
    """

    def __init__(self, name: str, *, num_heads: int, pool: BlockPool, exact: bool = False):
        self.name: Implementation = "torch" if name == "torch" else "triton"
        self.exact = exact
        self.launches: Counter[str] = Counter()
        self._device = pool.device
        self._layout: Layout | None = None
        if name == "torch":
            self._store = self._prefill = self._decode = import_module("radixkv.kernels.torch_ops")
            return
        self._store, self._prefill, self._decode, self._advance = (
            import_module(f"radixkv.kernels.{module}") for module in ("store", "prefill", "decode", "advance")
        )
        import_module("radixkv.kernels.compile_cache").use_writable_cache()
        tiles, keys = import_module("radixkv.kernels.tiles"), pool.keys[pool.devices.index(pool.device)]
        self._layout = layout_for(
            pool.head_dim,
            num_heads // pool.num_kv_heads,
            pool.dtype,
            pool.block_size,
            pool.num_kv_heads,
            tiles.current_arch(keys),
            tiles.multiprocessors(keys),
        )

    def build_prompt_work(
        self, tables: list[list[int]], query_lens: list[int], seq_lens: list[int], window: int | None, carried: dict
    ) -> Work:
        """The work of a step of prompt tokens, see `radixkv.kernels.work.build_work`; carried as `Work` describes it."""
        return self._build("prefill", tables, query_lens, seq_lens, window, carried)

    def build_decode_work(
        self,
        tables: list[list[int]] | np.ndarray,
        seq_lens: list[int] | np.ndarray,
        window: int | None,
        *,
        carried: dict | None = None,
        max_len: int | None = None,
        into: Work | None = None,
    ) -> Work:
        """The work of a step of one generated token per row, as above.

        With max_len its tensors are of the size that serves all steps of as many rows up to that length; they are those of `into` if
        such a work is given.
        """
        capacity = None
        if max_len is not None:
            assert self._layout is not None, "only Triton's work has a capacity"
            capacity = Capacity.for_decode(len(seq_lens), max_len, self._layout, exact=self.exact)
        return self._build("decode", tables, [1] * len(seq_lens), seq_lens, window, carried, capacity, into)

    def growing_work(self, table: np.ndarray, lens: np.ndarray) -> Work:
        """The work of decode steps that `grow_work` moves on; torch backend only, table and lens as `Work` describes them."""
        return Work([1] * len(lens), lens.tolist(), [], table, lens, round_as_sdpa=True)

    def grow_work(self, work: Work, begun: Sequence[int]) -> None:
        """Move it on by a token of each sequence; begun: the sequences for which that is the first one of a block."""
        self._decode.grow_work(work, begun)

    def store_kv(self, k_pool, v_pool, key, value, slots, source_rows) -> None:
        self.launches["store_kv"] += 1
        self._store.store_kv(k_pool, v_pool, key, value, slots, source_rows)

    def rope_store_kv(self, query, key, value, cos, sin, k_pool, v_pool, slots, source_rows, out) -> torch.Tensor:
        self.launches["rope_store_kv"] += 1
        return self._store.rope_store_kv(query, key, value, cos, sin, k_pool, v_pool, slots, source_rows, out=out)

    def copy_blocks(self, pools, src, dst, num_tokens) -> None:
        self.launches["copy_blocks"] += 1
        self._store.copy_blocks(pools, src, dst, num_tokens)

    def advance_rows(self, positions, seq_lens, slots, block_table, block_size) -> None:
        self.launches["advance_rows"] += 1
        self._advance.advance_rows(positions, seq_lens, slots, block_table, block_size)

    def attend(
        self, plan: Plan | DecodePlan | HostDecodePlan, k_pool, v_pool, query, out=None, lse=None, *, scale, sliding_window, softcap
    ) -> torch.Tensor:
        work = plan.work(sliding_window)
        options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "plan": work, "out": out, "lse": lse}
        if isinstance(plan, Plan) and plan.phase == "prefill":
            self.launches["prefill_attention"] += 1
            return self._prefill.prefill_attention(
                query, k_pool, v_pool, plan.block_table, plan.cu_query_lens, plan.seq_lens, **options
            )[0]
        self.launches["decode_attention"] += 1
        return self._decode.decode_attention(query, k_pool, v_pool, plan.block_table, plan.seq_lens, **options)[0]

    def _build(self, phase, tables, query_lens, seq_lens, window, carried, capacity=None, into=None) -> Work:
        work = build_work(
            tables,
            query_lens,
            seq_lens,
            phases=phase,
            backend=self.name,
            layout=self._layout,
            window=window,
            exact=self.exact,
            capacity=capacity,
            into=into,
            device=self._device,
        )
        return replace(work, carried=carried, round_as_sdpa=True) if self.name == "torch" else work


def choose_backend(name: str, device: torch.device) -> Choice:
    """The implementation that `name` means on `device`, and why.

    Raises:
        ValueError: `name` is unknown, or cannot run on `device`.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    if name == "auto":
        if device.type == "cuda":
            return Choice("triton", f"auto: the model lies on {device}, where the Triton kernels run")
        return Choice("torch", f"auto: the model lies on {device}, and the Triton kernels need a CUDA or ROCm device")
    if name == "triton" and device.type != "cuda" and not _triton_interprets():
        raise ValueError(
            f"backend='triton' cannot run on device {device}: it needs a CUDA or ROCm device, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment before Triton is imported); use backend='torch' here"
        )
    return Choice(name, "as asked")


def _triton_interprets() -> bool:
    return bool(import_module("triton").knobs.runtime.interpret)


