"""Batches over a paged pool, made on the device: random, shuffled, with NaN where nothing may be read, with shared blocks if asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from radixkv.bench.gpu_timing import attention_flop, kv_bytes, row_bytes
from radixkv.kernels import configs, decode, prefill
from radixkv.kernels.items import Layout
from radixkv.kernels.tiles import current_arch
from radixkv.kernels.work import Capacity, Work, build_work
from radixkv.testing import kernel_device

Phase = Literal["prefill", "decode"]
# A sequence is a list of (name, tokens): sequences that name the same part share its blocks, which all but a last part must fill.
Parts = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Heads:
    """Query heads, K/V heads and head_dim of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} d{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        name: for the table. heads: of the model. phase: which attention runs.
        query: `[num_tokens, num_heads, head_dim]`. k_pool, v_pool: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        table: int32 `[num_seqs, max_blocks]` on the host, -1 past the end. query_lens, seq_lens: on the host.
        block_table, cu_query_lens, seq_lens_device: int32, on the device.
        num_unique: distinct cached tokens.
    """

    name: str
    heads: Heads
    phase: Phase
    query: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: np.ndarray
    query_lens: list[int]
    seq_lens: list[int]
    block_table: Tensor
    cu_query_lens: Tensor
    seq_lens_device: Tensor
    num_unique: int

    @property
    def block_size(self) -> int:
        return self.k_pool.shape[2]

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    @property
    def unique_bytes(self) -> int:
        """Bytes that must be moved: each cached token once, queries in, outputs out."""
        itemsize = self.query.element_size()
        cached = kv_bytes(self.num_unique, self.heads.num_kv_heads, self.heads.head_dim, itemsize)
        return cached + row_bytes(self.query.shape[0], self.heads.num_heads, self.heads.head_dim, itemsize)

    @property
    def flop(self) -> int:
        return attention_flop(self.query_lens, self.seq_lens, self.heads.num_heads, self.heads.head_dim)

    @cached_property
    def token_ends(self) -> Tensor:
        """int64 `[num_tokens, 2]` on the host: sequence of each token, and how many keys it sees."""
        rows = [
            (seq, seq_len - query_len + i + 1)
            for seq, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True))
            for i in range(query_len)
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)

    @property
    def layout(self) -> Layout:
        """What the item lists must fit here."""
        heads, device = self.heads, self.query.device
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
        return configs.layout_for(
            heads.head_dim, heads.group, self.query.dtype, self.block_size, heads.num_kv_heads, current_arch(self.query), num_sms
        )

    def work(self, *, exact: bool = False, capacity: Capacity | None = None, into: Work | None = None, tokens_ago: int = 0) -> Work:
        """The work list of this call for the Triton kernels, or the one that was built when the sequences were shorter."""
        return build_work(
            self.table,
            self.query_lens,
            [seq_len - tokens_ago for seq_len in self.seq_lens],
            phases=self.phase,
            backend="triton",
            layout=self.layout,
            exact=exact,
            capacity=capacity,
            into=into,
            device=self.query.device,
        )

    def attend(self, work: Work | None, out: Tensor | None = None, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run our kernel."""
        options: dict[str, Any] = {"scale": self.scale, "plan": work, "out": out, "lse": lse}
        pools = (self.query, self.k_pool, self.v_pool, self.block_table)
        if self.phase == "decode":
            return decode.decode_attention(*pools, self.seq_lens_device, **options)
        return prefill.prefill_attention(*pools, self.cu_query_lens, self.seq_lens_device, **options)

    def gather(self, pool: Tensor) -> Tensor:
        """Keys or values as `[num_seqs, num_kv_heads, seq_len, head_dim]`, contiguous; all sequences must be of one length."""
        assert len(set(self.seq_lens)) == 1
        num_blocks = -(-self.seq_lens[0] // self.block_size)
        blocks = pool[self.block_table[:, :num_blocks].long()]
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, : self.seq_lens[0]].contiguous()

    def exact_rows(self, tokens: Sequence[int]) -> Tensor:
        """Attention of some tokens by its definition, in float64: `[len(tokens), num_heads, head_dim]`."""
        rows = []
        for token in tokens:
            seq, end = self.token_ends[token].tolist()
            if not end:
                rows.append(torch.zeros((self.heads.num_heads, self.heads.head_dim), dtype=torch.float64, device=self.query.device))
                continue
            blocks = self.block_table[seq, : -(-end // self.block_size)].long()
            # [num_kv_heads, end, head_dim]
            key, value = (pool[blocks].transpose(0, 1).flatten(1, 2)[:, :end].double() for pool in (self.k_pool, self.v_pool))
            query = self.query[token].double().view(self.heads.num_kv_heads, self.heads.group, -1)
            weights = torch.softmax(query @ key.transpose(1, 2) * self.scale, dim=-1)
            rows.append((weights @ value).flatten(0, 1))
        return torch.stack(rows)


def build_case(
    name: str,
    sequences: Sequence[Parts],
    *,
    heads: Heads,
    phase: Phase,
    query_lens: Sequence[int] | None = None,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    spare_columns: int = 2,
    seed: int = 0,
) -> Case:
    """Make one batch.

    Args:
        name: for the table.
        sequences: the parts of each; every part but the last of a sequence must be a multiple of block_size.
        heads, phase, block_size, dtype: of the case.
        query_lens: new tokens per sequence; None: one each.
        spare_columns: columns of the block table past the longest sequence's.
        seed: of values and of the order of blocks.
    """
    device = kernel_device()
    part_blocks: dict[str, int] = {}
    part_lens: dict[str, int] = {}
    for parts in sequences:
        for index, (part, length) in enumerate(parts):
            assert index == len(parts) - 1 or length % block_size == 0, f"{name}: part {part} must fill its blocks"
            assert part_lens.setdefault(part, length) == length, f"{name}: part {part} has two lengths"
            part_blocks[part] = -(-length // block_size)
    order = np.random.default_rng(seed).permutation(sum(part_blocks.values()) + 3).astype(np.int32)
    begins = dict(zip(part_blocks, np.cumsum([0, *part_blocks.values()])[:-1].tolist(), strict=True))
    rows = [np.concatenate([order[begins[part] : begins[part] + part_blocks[part]] for part, _ in parts]) for parts in sequences]
    table = np.full((len(rows), max(map(len, rows)) + spare_columns), -1, dtype=np.int32)
    for row, blocks in zip(table, rows, strict=True):
        row[: len(blocks)] = blocks
    dead_blocks, dead_offsets = [order[-3:].repeat(block_size)], [np.tile(np.arange(block_size), 3)]
    for part, length in part_lens.items():
        offsets = np.arange((length - 1) % block_size + 1 if length else 0, block_size if length else 0)
        dead_blocks.append(np.full(len(offsets), order[begins[part] + max(part_blocks[part], 1) - 1]))
        dead_offsets.append(offsets)
    seq_lens = [sum(length for _, length in parts) for parts in sequences]
    query_lens = [1] * len(seq_lens) if query_lens is None else list(query_lens)

    generator = torch.Generator(device).manual_seed(seed)
    shape = (len(order), heads.num_kv_heads, block_size, heads.head_dim)
    k_pool, v_pool = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(2))
    dead = torch.from_numpy(np.concatenate(dead_blocks).astype(np.int64)), torch.from_numpy(np.concatenate(dead_offsets))
    for pool in (k_pool, v_pool):
        pool[dead[0].to(device), :, dead[1].to(device)] = float("nan")
    query_shape = (sum(query_lens), heads.num_heads, heads.head_dim)
    return Case(
        name=name,
        heads=heads,
        phase=phase,
        query=torch.randn(query_shape, generator=generator, device=device, dtype=dtype),
        k_pool=k_pool,
        v_pool=v_pool,
        table=table,
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_table=torch.from_numpy(table).to(device),
        cu_query_lens=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device),
        seq_lens_device=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        num_unique=sum(part_lens.values()),
    )


def flat(num_seqs: int, length: int) -> list[Parts]:
    """Sequences of one length that share nothing."""
    return [[(f"own {seq}", length)] for seq in range(num_seqs)]


def shared(num_seqs: int, shared_len: int, own_len: int) -> list[Parts]:
    """Sequences that begin alike."""
    return [[("shared", shared_len), (f"own {seq}", own_len)] for seq in range(num_seqs)]
