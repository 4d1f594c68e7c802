"""What a user of a GPU has beside us, on the same tensors: each peer turns a case into a function that returns the output.

Copies that a peer's own layout needs are made beforehand and are not timed. A peer that is not installed, or has no such case, says so.
Call signatures: flash-attn 2.8, FlashInfer 0.6, SGLang 0.5, vLLM 0.33; their functions are called by parameter name, which drifts least.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from radixkv.bench.gpu_cases import Case

Run = Callable[[], Tensor]
# Page of flex_attention's and flash-attn's layouts.
_FLEX_PAGE, _FLASH_PAGE = 128, 256
# K and V repeated for every query head in fp32, which SDPA's math path makes of them.
_MATH_BYTES = 32e9


class NotAtHand(Exception):
    """This peer is not installed, or does not have this case."""


def peers(case: Case) -> dict[str, Callable[[], Run]]:
    """Name each peer, and how it is made ready for a case."""
    return {
        "sdpa flash": partial(_sdpa, case, SDPBackend.FLASH_ATTENTION),
        "sdpa cudnn": partial(_sdpa, case, SDPBackend.CUDNN_ATTENTION),
        "sdpa math": partial(_sdpa, case, SDPBackend.MATH),
        "flash-attn": partial(_flash_attn, case),
        "flashinfer": partial(_flashinfer, case),
        "sglang triton": partial(_sglang, case),
        "vllm triton": partial(_vllm, case),
        # Last, because it compiles for tens of seconds.
        "flex paged": partial(_flex, case),
    }


def _sdpa(case: Case, backend: SDPBackend) -> Run:
    """Contiguous K and V, the heads of a group by enable_gqa."""
    query_len, seq_len, num_seqs = case.query_lens[0], case.seq_lens[0], len(case.seq_lens)
    expanded = 2 * 4 * num_seqs * seq_len * case.heads.num_heads * case.heads.head_dim + 8 * case.heads.num_heads * query_len * seq_len
    if backend == SDPBackend.MATH and expanded > _MATH_BYTES:
        raise NotAtHand(f"K, V and scores would be {expanded / 1e9:.0f} GB of fp32")
    query = _per_sequence(case)
    key, value = case.gather(case.k_pool), case.gather(case.v_pool)
    mask: Any = None
    if 1 < query_len < seq_len:
        flash = backend == SDPBackend.FLASH_ATTENTION
        positions = torch.arange(seq_len, device=query.device)
        mask = causal_lower_right(query_len, seq_len) if flash else positions <= positions[seq_len - query_len :, None]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=query_len == seq_len > 1, scale=case.scale, enable_gqa=True
            )
        return _packed(out)

    return run


def _flex(case: Case) -> Run:
    """flex_attention over pages in random order: a block mask of physical pages, and a causal mask where one is needed."""
    query_len, seq_len, num_seqs = case.query_lens[0], case.seq_lens[0], len(case.seq_lens)
    device = case.query.device
    num_pages = -(-seq_len // _FLEX_PAGE)
    pages = torch.randperm(num_seqs * num_pages, device=device, dtype=torch.int32).view(num_seqs, 1, 1, num_pages)
    paged = (_to_pages(case.gather(pool), pages, _FLEX_PAGE) for pool in (case.k_pool, case.v_pool))
    # [1, num_kv_heads, num_pages * page, head_dim]
    key, value = (pool.transpose(0, 1).flatten(1, 2)[None] for pool in paged)
    # Of each page its sequence, and its place in it.
    owner, place = (torch.empty(num_seqs * num_pages, dtype=torch.int32, device=device) for _ in range(2))
    owner[pages.flatten().long()] = torch.arange(num_seqs, dtype=torch.int32, device=device).repeat_interleave(num_pages)
    place[pages.flatten().long()] = torch.arange(num_pages, dtype=torch.int32, device=device).repeat(num_seqs)

    def visible(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        page = key_index // _FLEX_PAGE
        position = place[page] * _FLEX_PAGE + key_index % _FLEX_PAGE
        return (owner[page] == batch) & (position <= query_index + (seq_len - query_len))

    # Pages that all, or some, queries of a tile of queries see, by page number, those first that are seen.
    tiles = torch.arange(0, query_len, _FLEX_PAGE, device=device)
    num_full = ((tiles + seq_len - query_len + 1) // _FLEX_PAGE).int()
    num_any = -(-(torch.clamp(tiles + _FLEX_PAGE, max=query_len) + seq_len - query_len) // _FLEX_PAGE).int()
    # As many columns as there are pages, which BlockMask asks for; those past a tile's count are not looked at.
    table = torch.zeros((num_seqs, 1, len(tiles), num_seqs * num_pages), dtype=torch.int32, device=device)
    table[..., :num_pages] = pages
    partial_pages = torch.stack([table[:, :, i].roll(-int(num_full[i]), -1) for i in range(len(tiles))], dim=2)
    mask = BlockMask.from_kv_blocks(
        (num_any - num_full).expand(num_seqs, 1, -1).contiguous(),
        partial_pages.contiguous(),
        num_full.expand(num_seqs, 1, -1).contiguous(),
        table,
        BLOCK_SIZE=(_FLEX_PAGE, _FLEX_PAGE),
        mask_mod=visible,
        seq_lengths=(query_len, key.shape[2]),
    )
    # Each shape compiles anew; without a reset torch gives up after eight of them.
    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False) if device.type == "cuda" else flex_attention
    query = _per_sequence(case)
    return lambda: _packed(attend(query, key, value, block_mask=mask, scale=case.scale, enable_gqa=True))


def _flash_attn(case: Case) -> Run:
    """flash-attn's paged cache; pages of 256 tokens."""
    function = _load("flash_attn", "flash_attn_with_kvcache")
    num_pages = -(-case.seq_lens[0] // _FLASH_PAGE)
    pages = torch.randperm(len(case.seq_lens) * num_pages, device=case.query.device, dtype=torch.int32).view(-1, num_pages)
    # [num_pages, page, num_kv_heads, head_dim]
    key, value = (_to_pages(case.gather(pool), pages, _FLASH_PAGE).transpose(1, 2).contiguous() for pool in (case.k_pool, case.v_pool))
    query = _per_sequence(case).transpose(1, 2).contiguous()
    arguments = {"cache_seqlens": case.seq_lens_device, "block_table": pages, "softmax_scale": case.scale, "causal": True}
    return lambda: function(query, key, value, **arguments).flatten(0, 1)


def _flashinfer(case: Case) -> Run:
    """FlashInfer's wrappers over our own pool, planned beforehand."""
    module = _load("flashinfer")
    num_blocks = [-(-seq_len // case.block_size) for seq_len in case.seq_lens]
    device = case.query.device
    indptr = torch.tensor([0, *num_blocks], device=device).cumsum(0).int()
    indices = torch.cat([case.block_table[seq, :count] for seq, count in enumerate(num_blocks)])
    last = torch.tensor([(seq_len - 1) % case.block_size + 1 for seq_len in case.seq_lens], dtype=torch.int32, device=device)
    heads = (case.heads.num_heads, case.heads.num_kv_heads, case.heads.head_dim, case.block_size)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    options = {"q_data_type": case.query.dtype, "kv_data_type": case.query.dtype, "sm_scale": case.scale}
    if case.phase == "decode":
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *heads, **options)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(case.cu_query_lens, indptr, indices, last, *heads, causal=True, **options)
    pools = _clean(case.k_pool), _clean(case.v_pool)
    return lambda: wrapper.run(case.query, pools)


def _sglang(case: Case) -> Run:
    """SGLang's Triton kernels; its pool is one row per token."""
    name = "decode_attention" if case.phase == "decode" else "extend_attention"
    try:
        function = _load(f"sglang.srt.layers.attention.triton_ops.{name}", f"{name}_fwd")
    except NotAtHand:
        function = _load(f"sglang.kernels.ops.attention.{name}", f"{name}_fwd")
    device, num_seqs = case.query.device, len(case.seq_lens)
    # [num_blocks * block_size, num_kv_heads, head_dim]
    key, value = (_clean(pool).transpose(1, 2).flatten(0, 1).contiguous() for pool in (case.k_pool, case.v_pool))
    offsets = torch.arange(case.block_size, device=device, dtype=torch.int32)
    slots = (case.block_table[:, :, None] * case.block_size + offsets).flatten(1)
    stored = case.seq_lens if case.phase == "decode" else [s - q for s, q in zip(case.seq_lens, case.query_lens, strict=True)]
    out = torch.empty_like(case.query)
    known: dict[str, Any] = {
        "o": out,
        "o_extend": out,
        "k_buffer": key,
        "v_buffer": value,
        "kv_indptr": torch.tensor([0, *stored], device=device).cumsum(0).int(),
        "kv_indices": torch.cat([slots[seq, :length] for seq, length in enumerate(stored)]).long(),
        "sm_scale": case.scale,
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    if case.phase == "decode":
        # Two programs per multiprocessor of a large GPU, as near as its powers of two come.
        num_splits = min(64, max(8, 1 << (264 // (num_seqs * case.heads.num_kv_heads)).bit_length()))
        partials = (num_seqs, case.heads.num_heads, num_splits)
        known |= {
            "q": case.query,
            "attn_logits": torch.empty((*partials, case.heads.head_dim), dtype=torch.float32, device=device),
            "attn_lse": torch.empty(partials, dtype=torch.float32, device=device),
            "num_kv_splits": torch.full((num_seqs,), num_splits, dtype=torch.int32, device=device),
            "max_kv_splits": num_splits,
        }
    else:
        new = torch.cat([slots[seq, length:total] for seq, (length, total) in enumerate(zip(stored, case.seq_lens, strict=True))]).long()
        known |= {
            "q_extend": case.query,
            "k_extend": key[new],
            "v_extend": value[new],
            "qo_indptr": case.cu_query_lens,
            "custom_mask": None,
            "is_causal": True,
            "mask_indptr": None,
            "max_len_extend": max(case.query_lens),
        }
    call = _bind(function, known)
    return lambda: (call(), out)[1]


def _vllm(case: Case) -> Run:
    """vLLM's unified Triton kernel; its pool is `[num_blocks, block_size, num_kv_heads, head_dim]`."""
    function = _load("vllm.v1.attention.ops.triton_unified_attention", "unified_attention")
    key, value = (_clean(pool).transpose(1, 2).contiguous() for pool in (case.k_pool, case.v_pool))
    out, device = torch.empty_like(case.query), case.query.device
    num_segments, padded = 16, 1 << (case.heads.head_dim - 1).bit_length()
    segments = (case.query.shape[0] if case.phase == "decode" else 1, case.heads.num_heads, num_segments)
    known = {
        "q": case.query,
        "k": key,
        "v": value,
        "out": out,
        "cu_seqlens_q": case.cu_query_lens,
        "max_seqlen_q": max(case.query_lens),
        "seqused_k": case.seq_lens_device,
        "max_seqlen_k": max(case.seq_lens),
        "softmax_scale": case.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": case.block_table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        # Its split of long sequences in decode: by its own rule, for up to this many sequences.
        "seq_threshold_3D": 128 // case.heads.num_kv_heads,
        "num_par_softmax_segments": num_segments,
        "softmax_segm_output": torch.empty((*segments, padded), dtype=torch.float32, device=device),
        "softmax_segm_max": torch.empty(segments, dtype=torch.float32, device=device),
        "softmax_segm_expsum": torch.empty(segments, dtype=torch.float32, device=device),
    }
    call = _bind(function, known)
    return lambda: (call(), out)[1]


def _load(module: str, attribute: str | None = None) -> Any:
    """Import an optional package, or say that it is not here; what breaks in its import is an error of its own."""
    try:
        loaded = import_module(module)
    except ModuleNotFoundError as error:
        raise NotAtHand(f"not installed ({error.name})") from error
    return loaded if attribute is None else getattr(loaded, attribute)


def _bind(function: Callable[..., Any], known: dict[str, Any]) -> Callable[[], Any]:
    """Call a function with those of the known arguments that it takes; one that it needs and we do not know is an error."""
    parameters = inspect.signature(function).parameters
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if needed - known.keys():
        raise NotAtHand(f"this release also needs {sorted(needed - known.keys())}")
    return partial(function, **{name: value for name, value in known.items() if name in parameters})


def _clean(pool: Tensor) -> Tensor:
    """A pool with 0 where ours has NaN, which others may read and multiply by 0."""
    return torch.nan_to_num(pool, nan=0.0)


def _per_sequence(case: Case) -> Tensor:
    """The queries as `[num_seqs, num_heads, query_len, head_dim]`; all sequences must have as many."""
    if len(set(case.query_lens)) > 1 or len(set(case.seq_lens)) > 1:
        raise NotAtHand("needs sequences of one length")
    return case.query.unflatten(0, (len(case.seq_lens), -1)).transpose(1, 2).contiguous()


def _packed(out: Tensor) -> Tensor:
    """`[num_seqs, num_heads, query_len, head_dim]` as `[num_tokens, num_heads, head_dim]`."""
    return out.transpose(1, 2).flatten(0, 1)


def _to_pages(rows: Tensor, pages: Tensor, page: int) -> Tensor:
    """Lay `[num_seqs, num_kv_heads, seq_len, head_dim]` out as `[num_pages, num_kv_heads, page, head_dim]` in the order of `pages`."""
    num_seqs, num_kv_heads, seq_len, head_dim = rows.shape
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -seq_len % page))
    rows = rows.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    laid = torch.empty_like(rows)
    laid[pages.flatten().long()] = rows
    return laid
