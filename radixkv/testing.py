"""What tests of paged attention need: poisoned, shuffled batches, and the one comparison that owns the tolerances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

# Largest |o - o64| / |o64| over (query, head), L2 norm over head_dim.
OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-4, torch.bfloat16: 8e-3}
# Largest |lse - lse64| in any dtype: LSE is computed in fp32 from the same rounded inputs.
LSE_TOLERANCE = 5e-5


@dataclass(frozen=True)
class PagedBatch:
    """Sequences in a paged pool, with everything that must not be read set to NaN.

    Attributes:
        query: `[num_tokens, num_heads, head_dim]`, the new tokens of every sequence one after the other.
        key, value: the new tokens' `[num_tokens, num_kv_heads, head_dim]`, already in the pool.
        slots: int64 `[num_tokens]`, where they are.
        k_pool, v_pool: `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`, -1 past each end, two columns more than the longest sequence has blocks.
        cu_query_lens: int32 `[num_seqs + 1]`.
        seq_lens: int32 `[num_seqs]`, new tokens included.
        scale: 1 / sqrt(head_dim).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_table: Tensor
    cu_query_lens: Tensor
    seq_lens: Tensor
    scale: float

    def double(self) -> PagedBatch:
        """Return the same batch, rounded values included, in float64."""
        return replace(
            self,
            query=self.query.double(),
            key=self.key.double(),
            value=self.value.double(),
            k_pool=self.k_pool.double(),
            v_pool=self.v_pool.double(),
        )

    def prefill_args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the positional arguments of prefill_attention."""
        return self.query, self.k_pool, self.v_pool, self.block_table, self.cu_query_lens, self.seq_lens

    def decode_args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the positional arguments of decode_attention, for a batch whose sequences have one query each."""
        return self.query, self.k_pool, self.v_pool, self.block_table, self.seq_lens


def kernel_device() -> torch.device:
    """Return where Triton kernels run in the tests: the GPU, or the CPU with the interpreter where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def untouched_pool(num_blocks: int) -> Tensor:
    """Return a float16 pool `[num_blocks, 1, 16, 64]` that takes no memory on a CPU until it is written."""
    shape, device = (num_blocks, 1, 16, 64), kernel_device()
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.float16))
    return torch.empty(shape, dtype=torch.float16, device=device)


def paged_batch(
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    seed: int = 0,
    sliding_window: int | None = None,
    key_bias: float = 0.0,
) -> PagedBatch:
    """Build sequences of prefix_lens[i] stored and query_lens[i] new tokens over blocks in random physical order.

    Args:
        query_lens: new tokens per sequence, 0 or more.
        prefix_lens: stored tokens per sequence; -1 with one new token makes a row that sees no key (sequence length 0).
        num_heads, num_kv_heads, head_dim, block_size: shapes.
        dtype: of query and pool; values are drawn in fp32 and rounded.
        device: where the tensors live; None: kernel_device().
        seed: of the values and of the order of blocks.
        sliding_window: stored keys that no new token sees are NaN as well.
        key_bias: every key gets +-key_bias in each channel, one sign per (K/V head, channel), as a large key bias in a model does.

    Returns:
        The batch; every slot that holds no visible token is NaN in both pools, and three blocks are in no table.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [prefix + new for prefix, new in zip(prefix_lens, query_lens, strict=True)]
    num_blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    sign = torch.randint(0, 2, (num_kv_heads, head_dim), generator=generator) * 2.0 - 1.0
    pool_shape = (len(order), num_kv_heads, block_size, head_dim)
    k_pool = torch.full(pool_shape, float("nan")).to(dtype)
    v_pool = k_pool.clone()
    block_table = torch.full((len(seq_lens), max(num_blocks, default=0) + 2), -1, dtype=torch.int32)
    slots: list[int] = []
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        block_ids = torch.tensor([order.pop() for _ in range(num_blocks[seq])], dtype=torch.int64)
        block_table[seq, : len(block_ids)] = block_ids.int()
        first_seen = 0 if sliding_window is None else max(0, seq_len - query_len - sliding_window + 1)
        positions = torch.arange(first_seen, max(seq_len, first_seen))
        rows, offsets = block_ids[positions // block_size], positions % block_size
        values = torch.randn((2, len(positions), num_kv_heads, head_dim), generator=generator)
        k_pool[rows, :, offsets] = (values[0] + key_bias * sign).to(dtype)
        v_pool[rows, :, offsets] = values[1].to(dtype)
        new_positions = torch.arange(max(0, seq_len - query_len), seq_len)
        slots += (block_ids[new_positions // block_size] * block_size + new_positions % block_size).tolist()
    query = torch.randn((sum(query_lens), num_heads, head_dim), generator=generator).to(dtype)
    slot_ids = torch.tensor(slots, dtype=torch.int64)
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).int()
    device = kernel_device() if device is None else device
    return PagedBatch(
        query=query.to(device),
        key=k_pool[slot_ids // block_size, :, slot_ids % block_size].to(device),
        value=v_pool[slot_ids // block_size, :, slot_ids % block_size].to(device),
        slots=slot_ids.to(device),
        k_pool=k_pool.to(device),
        v_pool=v_pool.to(device),
        block_table=block_table.to(device),
        cu_query_lens=cu_query_lens.to(device),
        seq_lens=torch.tensor([max(0, seq_len) for seq_len in seq_lens], dtype=torch.int32).to(device),
        scale=head_dim**-0.5,
    )


def attention_error(out: Tensor, ref_out: Tensor) -> float:
    """Return the largest |o - o64| / |o64| over (query, head), L2 norm over head_dim; an output of 0 must be met exactly."""
    distance = (out.double() - ref_out.double()).norm(dim=-1)
    size = ref_out.double().norm(dim=-1)
    relative = torch.where(distance == 0, 0.0, distance / size)
    return float(relative.max()) if relative.numel() else 0.0


def assert_attention_close(out: Tensor, lse: Tensor, ref_out: Tensor, ref_lse: Tensor, dtype: torch.dtype) -> None:
    """Assert that an attention result is as close to the float64 reference on the same inputs as its dtype allows.

    Args:
        out, lse: result, `[num_tokens, num_heads, head_dim]` and `[num_tokens, num_heads]`.
        ref_out, ref_lse: the float64 reference.
        dtype: dtype of query and pools.

    Raises:
        AssertionError: a NaN, a row that should be empty and is not, or an error above OUT_TOLERANCE or LSE_TOLERANCE.
    """
    assert out.shape == ref_out.shape and lse.shape == ref_lse.shape, f"{out.shape} {lse.shape}, not {ref_out.shape} {ref_lse.shape}"
    assert not out.isnan().any() and not lse.isnan().any(), "the result holds NaN"
    error = attention_error(out, ref_out)
    assert error <= OUT_TOLERANCE[dtype], f"output is off by {error:.2e} of its norm, allowed {OUT_TOLERANCE[dtype]:.0e} in {dtype}"
    empty = ref_lse == float("-inf")
    assert bool((lse[empty] == float("-inf")).all()), "a row without keys must have LSE -inf"
    # Beside the tolerance, the spacing of fp32 itself where the LSE is in the thousands: 1e-6 is 8 units in the last place.
    excess = (lse.double() - ref_lse.double()).abs() - 1e-6 * ref_lse.double().abs()
    worst = float(excess[~empty].max()) if bool((~empty).any()) else 0.0
    assert worst <= LSE_TOLERANCE, f"LSE is off by {worst:.2e}, allowed {LSE_TOLERANCE:.0e}"
