"""The tile sizes and launch options of the Triton kernels: one table per kernel, a reason per row, nothing else chooses.

tile_rows and chunk depend on the head alone and never on the device, so a work list fits every device. What the rows
rest on was read from compiled code (registers, shared memory, spills), not from timings.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch

from radixkv.kernels.items import Layout

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# cuda: at least 160 KB of shared memory per program (A100, H100, B200); cuda_small: 99 KB (consumer cards); hip: 64 KB.
ARCHS = ("cuda", "cuda_small", "hip")

# Keys per range of the exact plan, a constant so that a row's ranges depend on nothing but positions. 256 keeps the fp32
# partials of a group of 8 under 7 % of the bytes of K and V, and cuts a sequence of 8,000 tokens in 32 items per K/V head.
CHUNK = 256
# Ranges of the default plan begin at multiples of this many keys, the largest tile of any kernel.
KV_TILE = 64


@dataclass(frozen=True)
class PrefillConfig:
    """How prefill_attention is tiled and launched.

    Attributes:
        tile_q: query tokens per tile; tile_q * group rows are used of tile_rows.
        tile_rows: (token, query head) rows per program, a power of two.
        tile_kv: keys per loop trip.
        tile_d: head_dim padded to a power of two.
        num_warps, num_stages: Triton's launch options.
    """

    tile_q: int
    tile_rows: int
    tile_kv: int
    tile_d: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ExtendConfig:
    """How launch_wide is tiled and launched; attributes as in PrefillConfig.

    Attributes:
        ctas: programs per multiprocessor of the persistent grid.
    """

    tile_rows: int
    tile_kv: int
    tile_d: int
    num_warps: int
    num_stages: int
    ctas: int


@dataclass(frozen=True)
class DecodeConfig:
    """How decode_attention is tiled and launched.

    Attributes:
        tile_rows: (token, query head) rows per program, a power of two; a larger group takes several programs per item.
        tile_kv: keys per loop trip.
        tile_d: head_dim padded to a power of two.
        splits: running softmaxes that share out the keys of a tile; a split has 16 keys, the
            smallest inner size of a dot, which lie in one block.
        num_warps, num_stages: Triton's launch options.
        ctas: programs per multiprocessor of the persistent grid.
        max_registers: registers per thread that ptxas may use; None: as many as it likes.
    """

    tile_rows: int
    tile_kv: int
    tile_d: int
    splits: int
    num_warps: int
    num_stages: int
    ctas: int
    max_registers: int | None


@dataclass(frozen=True)
class ConfigCase:
    """One compilation that a launcher can ask for.

    Attributes:
        kernel: "prefill", "extend" or "decode".
        arch, head_dim, group, dtype, block_size: what it is for.
        has_window: whether there is a sliding window; None: one compilation for both.
        config: what the launcher chooses.
    """

    kernel: str
    arch: str
    head_dim: int
    group: int
    dtype: torch.dtype
    block_size: int
    has_window: bool | None
    config: PrefillConfig | ExtendConfig | DecodeConfig


_Launches = dict[tuple[int, int], dict[str, tuple[int, int, int, int]]]

# Rows of a tile of prefill and extend, by (bytes per element, tile_d).
_TILE_ROWS = {(2, 64): 128, (2, 128): 128, (2, 256): 64, (4, 64): 32, (4, 128): 32, (4, 256): 16}

# Prefill without a window: (bytes per element, tile_d) -> {arch: (tile_kv, num_warps, num_stages, ctas)}
_PREFILL: _Launches = {
    # 128 rows to one warpgroup: each load feeds twice the rows, a fifth less to issue per FLOP than with two warpgroups. A key's
    # address comes from the block table, which costs the pipeline two of its stages: with 5 all of the loop runs under a load in
    # flight (sm_90), with 3 or 4 a tenth of it.
    (2, 64): {"cuda": (64, 4, 5, 2), "cuda_small": (64, 8, 3, 1), "hip": (64, 4, 2, 1)},
    # Two warpgroups of 64 rows: 180 to 207 registers per thread and 129 KB of shared memory on sm_90; 3 stages fit where there is less.
    (2, 128): {"cuda": (64, 8, 5, 1), "cuda_small": (32, 8, 3, 1), "hip": (64, 4, 1, 1)},
    # Half the rows and keys, or accumulator and scores outgrow the registers.
    (2, 256): {"cuda": (32, 4, 5, 1), "cuda_small": (32, 4, 1, 1), "hip": (32, 4, 1, 1)},
    # IEEE fp32 runs on the plain ALUs, whose operands sit in registers: the largest tiles that do not spill, no pipeline.
    (4, 64): {"cuda": (32, 8, 1, 1), "cuda_small": (32, 8, 1, 1), "hip": (32, 4, 1, 1)},
    # Half the keys: 126 to 128 registers, so that two programs run on a multiprocessor of sm_90; with 32 keys they are 192 to 214.
    (4, 128): {"cuda": (16, 8, 1, 1), "cuda_small": (16, 8, 1, 1), "hip": (32, 4, 1, 1)},
    (4, 256): {"cuda": (16, 8, 1, 1), "cuda_small": (16, 8, 1, 1), "hip": (16, 4, 1, 1)},
}

# Prefill and extend with a window: keys are masked at both ends of a range. What is not here is as above.
_WITH_WINDOW: _Launches = {
    # The masks of 128 rows in one warpgroup spill (Triton 3.9) and make a masked trip up to 1.45 times a whole one (3.6). Two with so
    # many registers run alone on a multiprocessor: 11 stages keep 64 KB of loads in flight.
    (2, 64): {"cuda": (64, 8, 11, 1), "cuda_small": (64, 8, 3, 1), "hip": (64, 4, 2, 1)},
    # Two warpgroups to 64 rows: one alone spills in its loops (Triton 3.6).
    (2, 256): {"cuda": (32, 8, 5, 1), "cuda_small": (32, 4, 1, 1), "hip": (32, 4, 1, 1)},
}

# Extend without a window. What is not here is as in prefill.
_EXTEND: _Launches = {
    # Two warpgroups to 64 rows: one alone spills, in its loops too (Triton 3.6 and 3.9).
    (2, 256): {"cuda": (32, 8, 5, 1), "cuda_small": (32, 4, 1, 1), "hip": (32, 4, 1, 1)},
}

# (bytes per element, tile_d) -> {arch: (tile_rows, tile_kv, splits, num_warps, num_stages, ctas, max_registers)}
_DECODE: dict[tuple[int, int], dict[str, tuple[int, int, int, int, int, int, int | None]]] = {
    # 16 rows and 16 keys per warp, the smallest tensor-core dot, each warp with its own softmax. Block ids are read a trip ahead, so
    # that 3 stages keep two tiles in flight (sm_90), and 168 registers leave room for three programs.
    (2, 64): {"cuda": (16, 64, 4, 4, 3, 3, 168), "cuda_small": (16, 64, 4, 4, 3, 2, None), "hip": (16, 64, 4, 4, 1, 2, None)},
    (2, 128): {"cuda": (16, 64, 4, 4, 3, 3, 168), "cuda_small": (16, 64, 4, 4, 3, 1, None), "hip": (16, 64, 4, 4, 1, 2, None)},
    # Two warps to a softmax: the accumulator of one alone takes half of a warp's registers, and spills.
    (2, 256): {"cuda": (16, 32, 2, 4, 3, 2, None), "cuda_small": (16, 32, 2, 4, 3, 1, None), "hip": (16, 32, 2, 4, 1, 2, None)},
    # IEEE fp32, see prefill: 4 rows and two splits shared by 8 warps do not spill, window and softcap included.
    (4, 64): {"cuda": (4, 32, 2, 8, 1, 1, None), "cuda_small": (4, 32, 2, 8, 1, 1, None), "hip": (4, 32, 2, 8, 1, 2, None)},
    (4, 128): {"cuda": (4, 32, 2, 8, 1, 1, None), "cuda_small": (4, 32, 2, 8, 1, 1, None), "hip": (4, 32, 2, 8, 1, 2, None)},
    (4, 256): {"cuda": (4, 32, 2, 8, 1, 1, None), "cuda_small": (4, 32, 2, 8, 1, 1, None), "hip": (4, 32, 2, 8, 1, 2, None)},
}


def prefill_config(
    head_dim: int, group: int, dtype: torch.dtype, block_size: int, arch: str = "cuda", *, has_window: bool = False
) -> PrefillConfig:
    """Return how prefill_attention runs for one kind of head.

    Args:
        head_dim: 16 to 256.
        group: query heads per K/V head.
        dtype: float32, float16 or bfloat16.
        block_size: tokens per block, a power of two from 16.
        arch: one of ARCHS; changes neither tile_q nor tile_rows, so that a work list fits every device.
        has_window: whether there is a sliding window; changes neither tile_q nor tile_rows.

    Raises:
        ValueError: no configuration for these.
    """
    key = _table_key("prefill_config", head_dim, dtype, block_size, arch)
    tile_rows = _TILE_ROWS[key]
    if not 1 <= group <= tile_rows:
        raise ValueError(f"prefill_config: group must be 1 to {tile_rows} at head_dim {head_dim}, got {group}")
    launch = _WITH_WINDOW.get(key, _PREFILL[key]) if has_window else _PREFILL[key]
    tile_kv, num_warps, num_stages, _ = launch[arch]
    return PrefillConfig(tile_rows // group, tile_rows, tile_kv, key[1], num_warps, num_stages)


def extend_config(head_dim: int, dtype: torch.dtype, block_size: int, arch: str = "cuda", *, has_window: bool = False) -> ExtendConfig:
    """Return how launch_wide runs; arguments and errors as in prefill_config, but any group runs alike."""
    key = _table_key("extend_config", head_dim, dtype, block_size, arch)
    tile_kv, num_warps, num_stages, ctas = (_WITH_WINDOW if has_window else _EXTEND).get(key, _PREFILL[key])[arch]
    return ExtendConfig(_TILE_ROWS[key], tile_kv, key[1], num_warps, num_stages, ctas)


def decode_config(head_dim: int, group: int, dtype: torch.dtype, block_size: int, arch: str = "cuda") -> DecodeConfig:
    """Return how decode_attention runs for one kind of head; arguments and errors as in prefill_config."""
    key = _table_key("decode_config", head_dim, dtype, block_size, arch)
    if group < 1:
        raise ValueError(f"decode_config: group must be at least 1, got {group}")
    tile_rows, tile_kv, splits, num_warps, num_stages, ctas, max_registers = _DECODE[key][arch]
    return DecodeConfig(tile_rows, tile_kv, key[1], splits, num_warps, num_stages, ctas, max_registers)


def layout_for(
    head_dim: int, group: int, dtype: torch.dtype, block_size: int, num_kv_heads: int, arch: str = "cuda", num_sms: int = 132
) -> Layout:
    """Return what the item lists of one kind of head must fit.

    Args:
        head_dim, group, dtype, block_size, arch: as in prefill_config.
        num_kv_heads: K/V heads of a layer.
        num_sms: multiprocessors of the device.

    Raises:
        ValueError: no configuration for these.
    """
    decode = decode_config(head_dim, group, dtype, block_size, arch)
    extend = extend_config(head_dim, dtype, block_size, arch)
    return Layout(
        group=group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        block_size=block_size,
        narrow_entries=max(1, decode.tile_rows // group),
        wide_rows=extend.tile_rows,
        tile_kv=KV_TILE,
        tile_q=prefill_config(head_dim, group, dtype, block_size, arch).tile_q,
        chunk=CHUNK,
        narrow_slots=num_sms * decode.ctas,
        wide_slots=num_sms * extend.ctas,
    )


def all_configs(group: int = 7) -> list[ConfigCase]:
    """List every attention compilation that the launchers can choose for one group size, over all named head dimensions."""
    cases = []
    for arch, head_dim, dtype, block_size in product(ARCHS, HEAD_DIMS, DTYPES, BLOCK_SIZES):
        about = (arch, head_dim, group, dtype, block_size)
        for has_window in (False, True):
            prefill = prefill_config(head_dim, group, dtype, block_size, arch, has_window=has_window)
            extend = extend_config(head_dim, dtype, block_size, arch, has_window=has_window)
            cases += [ConfigCase("prefill", *about, has_window, prefill), ConfigCase("extend", *about, has_window, extend)]
        cases.append(ConfigCase("decode", *about, None, decode_config(head_dim, group, dtype, block_size, arch)))
    return cases


def _table_key(function: str, head_dim: int, dtype: torch.dtype, block_size: int, arch: str) -> tuple[int, int]:
    """Return (bytes per element, padded head_dim), or raise for what no row covers."""
    if not 16 <= head_dim <= 256:
        raise ValueError(f"{function}: head_dim must be 16 to 256, got {head_dim}")
    if dtype not in DTYPES:
        raise ValueError(f"{function}: dtype must be float32, float16 or bfloat16, got {dtype}")
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"{function}: block_size must be a power of two from 16, got {block_size}")
    if arch not in ARCHS:
        raise ValueError(f"{function}: arch must be one of {ARCHS}, got {arch!r}")
    return dtype.itemsize, max(64, 1 << (head_dim - 1).bit_length())
