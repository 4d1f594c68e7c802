"""What tests of item lists need: block tables of forests, a model of the slots of a device, and attention computed list by list."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.bench.forests import Tree
from radixkv.kernels.items import Layout
from radixkv.kernels.work import Work
from radixkv.testing import PagedBatch

# (query heads, K/V heads, head_dim) of Qwen2.5-0.5B, 1.5B and 7B.
SHAPES = [(14, 2, 64), (12, 2, 128), (28, 4, 128)]
SHAPE_IDS = ["14-2-d64", "12-2-d128", "28-4-d128"]

@dataclass(frozen=True)
class Slots:
    """The units that each slot of a device runs, in keys: by a persistent grid with a stride, and each by who is free first."""

    stride: int
    greedy: int
    longest: int
    mean: float

    @classmethod
    def run(cls, item_keys: np.ndarray, num_kv_heads: int, num_slots: int) -> Slots:
        units = np.repeat(item_keys, num_kv_heads)
        padded = np.zeros(-(-len(units) // num_slots) * num_slots, dtype=np.int64)
        padded[: len(units)] = units
        free = [0] * num_slots
        for keys in units.tolist():
            heapq.heapreplace(free, free[0] + keys)
        return cls(int(padded.reshape(-1, num_slots).sum(0).max()), max(free), int(units.max()), float(units.sum() / num_slots))

    @property
    def unevenness(self) -> float:
        """The worse of both times, as a multiple of the least that is possible."""
        return max(self.stride, self.greedy) / max(self.longest, self.mean)


def random_trees(rng: np.random.Generator, depth: int = 4) -> list[Tree]:
    """Return a random forest: thin chains, bushes, requests that end inside, all of them short."""

    def grow(level: int) -> Tree:
        tokens = int(rng.integers(1, 120) if rng.random() < 0.7 else rng.integers(1, 900))
        if level == 0 or rng.random() < 0.25:
            return tokens, None
        return tokens, [grow(level - 1) for _ in range(rng.integers(1, 5))]

    return [grow(depth) for _ in range(rng.integers(1, 4))]


def chain(num_seqs: int, step: int) -> list[Tree]:
    """Return the trees of requests of which each shares a little more with the next than with the one before."""
    tree: Tree = (step, None)
    for _ in range(num_seqs - 1):
        tree = (step, [tree, (7, None)])
    return [tree]


def cached_slots(table: np.ndarray, lens: np.ndarray, block_size: int) -> set[int]:
    """Return the distinct slots that hold the tokens of a batch."""
    slots: set[int] = set()
    for row, length in zip(table, lens, strict=True):
        keys = np.arange(length)
        slots.update((row[keys // block_size] * block_size + keys % block_size).tolist())
    return slots


def forest_batch(
    table: np.ndarray,
    lens: np.ndarray,
    layout: Layout,
    *,
    query_lens: list[int] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """Return a float32 batch over the given block tables; every slot that holds no token is NaN."""
    generator = torch.Generator().manual_seed(seed)
    new = [1] * len(lens) if query_lens is None else query_lens
    num_heads = layout.group * layout.num_kv_heads
    shape = (int(table.max(initial=0)) + 1, layout.num_kv_heads, layout.block_size, layout.head_dim)
    pools = [torch.full(shape, float("nan")) for _ in range(2)]
    slots = torch.tensor(sorted(cached_slots(table, lens, layout.block_size)), dtype=torch.int64)
    for pool in pools:
        values = torch.randn((len(slots), layout.num_kv_heads, layout.head_dim), generator=generator)
        pool[slots // layout.block_size, :, slots % layout.block_size] = values
    empty = torch.zeros((0, layout.num_kv_heads, layout.head_dim))
    query = torch.randn((sum(new), num_heads, layout.head_dim), generator=generator)
    return PagedBatch(
        query=query.to(device),
        key=empty.to(device),
        value=empty.to(device),
        slots=torch.zeros(0, dtype=torch.int64, device=device),
        k_pool=pools[0].to(device),
        v_pool=pools[1].to(device),
        block_table=torch.from_numpy(table).to(device),
        cu_query_lens=torch.tensor([0, *new]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32).to(device),
        scale=layout.head_dim**-0.5,
    )


def attend_lists(work: Work, batch: PagedBatch, layout: Layout, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the tokens that a work's merge names, item by item and in float64; the other rows of the result are NaN.

    Raises:
        AssertionError: a partial that is merged is not written exactly once.
    """
    batch = batch.double()
    num_heads, head_dim = batch.query.shape[1:]
    ends = batch.seq_lens if work.ends is None else work.ends
    assert work.entry_tokens is not None and work.entry_partials is not None
    tokens, partials = work.entry_tokens.tolist(), work.entry_partials.tolist()
    part_out = torch.full((work.num_partials, num_heads, head_dim), float("nan"), dtype=torch.float64)
    part_lse = torch.full((work.num_partials, num_heads), float("nan"), dtype=torch.float64)
    writes = torch.zeros((work.num_partials, num_heads), dtype=torch.int64)
    for row_unit, split in ((layout.group, work.narrow), (1, work.wide)):
        for first, number, seq, first_key, end_key in [] if split is None else split.items[: int(split.count)].tolist():
            rows = range(first * row_unit, (first + number) * row_unit)
            for entry in range(rows.start // layout.group, -(-rows.stop // layout.group)):
                in_group = [row % layout.group for row in rows if row // layout.group == entry]
                heads = torch.tensor([kv * layout.group + head for kv in range(layout.num_kv_heads) for head in in_group])
                token, end = tokens[entry], min(end_key, int(ends[tokens[entry]]))
                begin = first_key if window is None else max(first_key, int(ends[token]) - window)
                keys = torch.arange(begin, max(begin, end))
                blocks = batch.block_table[seq].long()[keys // layout.block_size]
                key, value = (pool[blocks, :, keys % layout.block_size][:, heads // layout.group] for pool in (batch.k_pool, batch.v_pool))
                scores = torch.einsum("hd,khd->hk", batch.query[token, heads], key) * batch.scale
                lse = scores.logsumexp(-1)
                weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[:, None])
                part_out[partials[entry], heads] = torch.einsum("hk,khd->hd", weights, value)
                part_lse[partials[entry], heads] = lse
                writes[partials[entry], heads] += 1
    out, lse = torch.full_like(batch.query, float("nan")), torch.full(batch.query.shape[:2], float("nan"), dtype=torch.float64)
    assert work.merge_tokens is not None and work.merge_ranges is not None and work.merge_count is not None
    borders = work.merge_ranges.tolist()
    for place in range(int(work.merge_count)):
        begin, end, token = borders[place], borders[place + 1], int(work.merge_tokens[place])
        assert bool((writes[begin:end] == 1).all()), "each partial of a token must be written once"
        lse[token] = part_lse[begin:end].logsumexp(0)
        weights = torch.exp(part_lse[begin:end] - lse[token].masked_fill(lse[token] == float("-inf"), 0.0))
        out[token] = (weights[..., None] * part_out[begin:end]).sum(0)
    return out, lse
