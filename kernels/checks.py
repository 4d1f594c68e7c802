"""The one place where tensors handed to a kernel are checked: shape, dtype, device, layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ATTENTION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes that the arguments of one attention call agree on."""

    num_tokens: int
    num_seqs: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads per K/V head."""
        return self.num_heads // self.num_kv_heads


def describe(shape: Sequence[int | None]) -> str:
    """Write a shape the way error messages show it, `[4, *]`; None is any size."""
    return "[" + ", ".join("*" if size is None else str(size) for size in shape) + "]"


def dtype_name(dtype: torch.dtype) -> str:
    """Write a dtype without its module, `int64`."""
    return str(dtype).removeprefix("torch.")


def check_tensor(
    function: str,
    argument: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Raise unless one argument has the expected shape, dtype, device and layout.

    Args:
        function: name of the public function, for the message.
        argument: name of the argument, for the message.
        tensor: the argument.
        shape: expected sizes; None accepts any size.
        dtype: expected dtype; None accepts any.
        device: expected device; None accepts any.
        contiguous: whether the argument must be contiguous.

    Raises:
        ValueError: naming function, argument, what was expected and what came.
    """
    found = tensor.shape
    same_shape = found == shape
    if not same_shape and len(found) == len(shape):
        same_shape = True
        # A plain loop: this runs for every tensor of every layer, and a generator costs twice as much.
        for want, got in zip(shape, found, strict=True):
            if want is not None and want != got:
                same_shape = False
                break
    if not same_shape or (dtype is not None and tensor.dtype != dtype):
        wanted = f"{dtype_name(dtype)} {describe(shape)}" if dtype is not None else describe(shape)
        raise ValueError(f"{function}: {argument} must be {wanted}, got {dtype_name(tensor.dtype)} {describe(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{function}: {argument} must be on {device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{function}: {argument} must be contiguous, got strides {tuple(tensor.stride())} for {describe(tensor.shape)}")


def check_pools(
    function: str, k_pool: Tensor, v_pool: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> None:
    """Raise unless k_pool and v_pool are one contiguous floating point pair `[num_blocks, num_kv_heads, block_size, head_dim]`."""
    check_tensor(function, "k_pool", k_pool, (None, None, None, None), dtype=dtype, device=device, contiguous=True)
    check_tensor(function, "v_pool", v_pool, k_pool.shape, dtype=k_pool.dtype, device=k_pool.device, contiguous=True)
    if not k_pool.is_floating_point():
        raise ValueError(f"{function}: k_pool must be floating point, got {dtype_name(k_pool.dtype)}")


def check_attention(
    function: str,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_query_lens: Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> AttentionShape:
    """Check the arguments of prefill_attention or decode_attention and return the sizes they agree on.

    Args:
        function: name of the public function, for messages.
        query: float `[num_tokens, num_heads, head_dim]`, last axis contiguous.
        k_pool, v_pool: one layer's pool, dtype of query, `[num_blocks, num_kv_heads, block_size, head_dim]`.
        block_table: int32 `[num_seqs, max_blocks]`, last axis contiguous.
        seq_lens: int32 `[num_seqs]`.
        cu_query_lens: int32 `[num_seqs + 1]`, or None in decode, where num_tokens must equal num_seqs.
        sliding_window: at least 1, or None.
        softcap: above 0, or None.

    Raises:
        ValueError: for whatever does not fit.
    """
    check_tensor(function, "query", query, (None, None, None))
    device = query.device
    num_tokens, num_heads, head_dim = query.shape
    check_pools(function, k_pool, v_pool, dtype=query.dtype, device=device)
    num_kv_heads, block_size = k_pool.shape[1], k_pool.shape[2]
    check_tensor(function, "k_pool", k_pool, (None, None, None, head_dim))
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{function}: query heads must be a multiple of the {num_kv_heads} K/V heads, got {num_heads}")
    num_seqs = seq_lens.shape[0] if seq_lens.dim() == 1 else None
    check_tensor(function, "seq_lens", seq_lens, (num_seqs,), dtype=torch.int32, device=device, contiguous=True)
    assert num_seqs is not None
    check_tensor(function, "block_table", block_table, (num_seqs, None), dtype=torch.int32, device=device)
    if cu_query_lens is None:
        check_tensor(function, "query", query, (num_seqs, None, None))
    else:
        check_tensor(function, "cu_query_lens", cu_query_lens, (num_seqs + 1,), dtype=torch.int32, device=device, contiguous=True)
    for name, tensor in (("query", query), ("block_table", block_table)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{function}: {name} must be contiguous in its last axis, got strides {tuple(tensor.stride())}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{function}: sliding_window must be at least 1 or None, got {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{function}: softcap must be above 0 or None, got {softcap}")
    return AttentionShape(num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, block_size)


def check_outputs(function: str, query: Tensor, out: Tensor | None, lse: Tensor | None, lse_dtype: torch.dtype = torch.float32) -> None:
    """Raise unless out (like query) and lse `[num_tokens, num_heads]`, where given, can take the result."""
    if out is not None:
        check_tensor(function, "out", out, query.shape, dtype=query.dtype, device=query.device, contiguous=True)
    if lse is not None:
        check_tensor(function, "lse", lse, query.shape[:2], dtype=lse_dtype, device=query.device, contiguous=True)


def check_store(
    function: str, k_pool: Tensor, v_pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, source_rows: Tensor | None
) -> None:
    """Check the arguments of store_kv; see there for their shapes.

    Raises:
        ValueError: for whatever does not fit.
    """
    check_pools(function, k_pool, v_pool)
    num_rows = key.shape[0] if key.dim() == 3 else None
    row_shape = (num_rows, k_pool.shape[1], k_pool.shape[3])
    check_tensor(function, "key", key, row_shape, dtype=k_pool.dtype, device=k_pool.device)
    check_tensor(function, "value", value, row_shape, dtype=k_pool.dtype, device=k_pool.device)
    num_slots = num_rows if source_rows is None else None
    check_tensor(function, "slots", slots, (num_slots,), dtype=torch.int64, device=k_pool.device, contiguous=True)
    if source_rows is not None:
        check_tensor(function, "source_rows", source_rows, slots.shape, dtype=torch.int32, device=k_pool.device, contiguous=True)


def check_rope_store(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    source_rows: Tensor | None,
    out: Tensor | None,
) -> None:
    """Check the arguments of rope_store_kv; see there for their shapes.

    Raises:
        ValueError: for whatever does not fit.
    """
    check_store(function, k_pool, v_pool, key, value, slots, source_rows)
    num_tokens, _, head_dim = key.shape
    if head_dim % 2:
        raise ValueError(f"{function}: head_dim must be even, got {head_dim}")
    check_tensor(function, "query", query, (num_tokens, None, head_dim), dtype=key.dtype, device=key.device)
    check_tensor(function, "cos", cos, (num_tokens, head_dim), dtype=key.dtype, device=key.device)
    check_tensor(function, "sin", sin, (num_tokens, head_dim), dtype=key.dtype, device=key.device)
    if out is not None:
        check_tensor(function, "out", out, query.shape, dtype=query.dtype, device=query.device)


def check_copy(function: str, pools: Sequence[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor, num_tokens: Tensor) -> None:
    """Check the arguments of copy_blocks; see there for their shapes.

    Raises:
        ValueError: for whatever does not fit.
    """
    if not pools:
        raise ValueError(f"{function}: pools must hold at least one layer, got none")
    first = pools[0][0]
    for k_pool, v_pool in pools:
        check_pools(function, k_pool, v_pool, dtype=first.dtype, device=first.device)
        check_tensor(function, "k_pool", k_pool, first.shape)
    check_tensor(function, "src", src, (None,), dtype=torch.int64, device=first.device, contiguous=True)
    check_tensor(function, "dst", dst, src.shape, dtype=torch.int64, device=first.device, contiguous=True)
    check_tensor(function, "num_tokens", num_tokens, src.shape, dtype=torch.int32, device=first.device, contiguous=True)


def check_advance(function: str, positions: Tensor, seq_lens: Tensor, slots: Tensor, block_table: Tensor) -> None:
    """Check the arguments of advance_rows; see there for their shapes.

    Raises:
        ValueError: for whatever does not fit.
    """
    check_tensor(function, "positions", positions, (None,), dtype=torch.int64, contiguous=True)
    num_rows, device = positions.shape[0], positions.device
    check_tensor(function, "seq_lens", seq_lens, (num_rows,), dtype=torch.int32, device=device, contiguous=True)
    check_tensor(function, "slots", slots, (num_rows,), dtype=torch.int64, device=device, contiguous=True)
    check_tensor(function, "block_table", block_table, (num_rows, None), dtype=torch.int32, device=device)


def check_partials(function: str, out: Tensor, lse: Tensor) -> None:
    """Raise unless out `[num_partials, num_rows, head_dim]` and lse `[num_partials, num_rows]` are partials of the same rows."""
    check_tensor(function, "out", out, (None, None, None), contiguous=True)
    check_tensor(function, "lse", lse, out.shape[:2], dtype=out.dtype, device=out.device, contiguous=True)
    if not out.is_floating_point():
        raise ValueError(f"{function}: out must be floating point, got {dtype_name(out.dtype)}")
