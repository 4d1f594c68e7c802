"""K/V between pools and files, in pieces, token by token and not block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixkv.kv_file import FileReader, FileWriter
from radixkv.load_plan import LoadPlan
from radixkv.pool import BlockPool
from radixkv.progress import Advance, progress_bar
from radixkv.snapshot import Source

# What is in memory beside the pool while a layer's K or V is written or read.
CHUNK_BYTES = 4 << 20


class _Tokens(NamedTuple):
    """Where the K/V of tokens lies in a layer: the row of each token's first head, and the distance to the next head's, in rows."""

    first_rows: Tensor
    stride: int

    def rows(self, num_heads: int, begin: int, end: int) -> Tensor:
        """The rows of tokens [begin, end), all heads, of a layer seen as [rows, head_dim]."""
        heads = torch.arange(num_heads, device=self.first_rows.device) * self.stride
        return (self.first_rows[begin:end, None] + heads).reshape(-1)


def _tokens_at(pool: BlockPool, slots: np.ndarray) -> list[_Tokens]:
    """Where tokens lie in each layer, on its device; layers on one device share it."""
    blocks, offsets = np.divmod(slots, pool.block_size)
    first_rows = torch.from_numpy(blocks * (pool.num_kv_heads * pool.block_size) + offsets)
    by_device = {device: _Tokens(first_rows.to(device), pool.block_size) for device in dict.fromkeys(pool.devices)}
    return [by_device[device] for device in pool.devices]


def write_pools(file: FileWriter, sources: Sequence[Source], advance: Advance) -> None:
    """Writes the K/V of all tokens of the sources, layer by layer, K before V, the sources one after the other.

    `advance` is told of the bytes that are written.
    """
    places = [_tokens_at(pool, np.concatenate([np.zeros(0, np.int64), *slots])) for pool, slots in sources]
    pool = sources[0].pool
    chunk = _chunk_tokens(pool)
    for layer in range(pool.num_layers):
        for which in range(2):
            for source, tokens in zip(sources, places, strict=True):
                flat = (source.pool.keys, source.pool.values)[which][layer].view(-1, pool.head_dim)
                num_tokens = len(tokens[layer].first_rows)
                for begin in range(0, num_tokens, chunk):
                    rows = tokens[layer].rows(pool.num_kv_heads, begin, min(begin + chunk, num_tokens))
                    file.write(flat.index_select(0, rows).cpu().view(torch.uint8).numpy().data)
                    advance(len(rows) * pool.head_dim * pool.dtype.itemsize)


def read_pool(file: FileReader, pool: BlockPool, plan: LoadPlan, blocks: list[int], progress: bool | None) -> None:
    """Reads the K/V of all planned tokens, in the file's order, each to its slot of the given blocks; `progress` as in `progress_bar`."""
    saved_rows, slots = plan.tokens(np.asarray(blocks, np.int64), pool.block_size)
    order = np.argsort(saved_rows, kind="stable")
    saved_rows, tokens = saved_rows[order], _tokens_at(pool, slots[order])
    row_bytes = pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize
    chunk = _chunk_tokens(pool)
    # Runs of rows that lie within a chunk of each other, so that what is left out between them costs no memory.
    runs = []
    begin = 0
    while begin < len(saved_rows):
        end = int(np.searchsorted(saved_rows, saved_rows[begin] + chunk))
        runs.append((begin, end))
        begin = end
    buffer = torch.empty(chunk * row_bytes, dtype=torch.uint8, pin_memory=any(device.type == "cuda" for device in pool.devices))
    with progress_bar("load", 2 * pool.num_layers * len(saved_rows) * row_bytes, progress) as advance:
        for layer, pair in enumerate(pool.pools):
            for name, tensor in zip((f"keys.{layer}", f"values.{layer}"), pair, strict=True):
                flat = tensor.view(-1, pool.head_dim)
                for begin, end in runs:
                    first = int(saved_rows[begin])
                    data = buffer[: (int(saved_rows[end - 1]) - first + 1) * row_bytes]
                    file.read_into(data.numpy().data, name, first * row_bytes)
                    data = data.view(pool.dtype).view(-1, pool.num_kv_heads, pool.head_dim).to(tensor.device)
                    wanted = torch.from_numpy(saved_rows[begin:end] - first).to(tensor.device)
                    rows = tokens[layer].rows(pool.num_kv_heads, begin, end)
                    flat.index_copy_(0, rows, data.index_select(0, wanted).view(-1, pool.head_dim))
                    advance((end - begin) * row_bytes)


def _chunk_tokens(pool: BlockPool) -> int:
    return max(1, CHUNK_BYTES // (pool.num_kv_heads * pool.head_dim * pool.dtype.itemsize))
