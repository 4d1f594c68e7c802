"""bench/gpu_peers.py: what is handed to packages that are not installed here, taken by stand-ins that follow their documented layouts."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from radixkv.bench.gpu_cases import Case, Heads, build_case, flat, shared
from radixkv.bench.gpu_peers import NotAtHand, peers
from radixkv.testing import attention_error

CASES: dict[str, dict[str, Any]] = {
    "decode": {"sequences": flat(3, 70), "query_lens": None, "phase": "decode"},
    "tree": {"sequences": shared(3, 32, 21), "query_lens": None, "phase": "decode"},
    "prefill": {"sequences": flat(1, 40), "query_lens": [40], "phase": "prefill"},
    "extension": {"sequences": flat(2, 50), "query_lens": [9, 9], "phase": "prefill"},
}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last rows: query `[n, heads, d]`, key and value `[keys, num_kv_heads, d]`."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), value)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    assert causal and k_cache.shape[1] == 256 and q.is_contiguous()
    rows = [
        attend(row, k_cache[pages.long()].flatten(0, 1)[:length], v_cache[pages.long()].flatten(0, 1)[:length], softmax_scale)
        for row, pages, length in zip(q, block_table, cache_seqlens.tolist(), strict=True)
    ]
    return torch.stack(rows)


def decode_attention_fwd(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    attn_logits: torch.Tensor,
    attn_lse: torch.Tensor,
    num_kv_splits: torch.Tensor,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    logit_cap: float = 0.0,
) -> None:
    assert attn_logits.shape == (*q.shape[:2], max_kv_splits, q.shape[2]) and attn_lse.shape == attn_logits.shape[:3]
    for seq, (begin, end) in enumerate(zip(kv_indptr[:-1].tolist(), kv_indptr[1:].tolist(), strict=True)):
        slots = kv_indices[begin:end]
        o[seq : seq + 1] = attend(q[seq : seq + 1], k_buffer[slots], v_buffer[slots], sm_scale * k_scale) * v_scale


def extend_attention_fwd(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: Any,
    is_causal: bool,
    mask_indptr: Any,
    max_len_extend: int,
    k_scale: float,
    v_scale: float,
    sm_scale: float | None = None,
) -> None:
    assert is_causal and custom_mask is None and mask_indptr is None and sm_scale is not None
    for seq in range(len(qo_indptr) - 1):
        new, slots = slice(*qo_indptr[seq : seq + 2].tolist()), kv_indices[slice(*kv_indptr[seq : seq + 2].tolist())]
        assert new.stop - new.start <= max_len_extend
        key, value = torch.cat([k_buffer[slots], k_extend[new]]), torch.cat([v_buffer[slots], v_extend[new]])
        o_extend[new] = attend(q_extend[new], key, value, sm_scale)


def unified_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    softcap: float,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    seq_threshold_3D: int | None = None,  # noqa: N803
    softmax_segm_output: torch.Tensor | None = None,
) -> None:
    assert causal and window_size == (-1, -1) and softcap == 0
    for seq, length in enumerate(seqused_k.tolist()):
        new = slice(*cu_seqlens_q[seq : seq + 2].tolist())
        blocks = block_table[seq, : -(-length // k.shape[1])].long()
        out[new] = attend(q[new], k[blocks].flatten(0, 1)[:length], v[blocks].flatten(0, 1)[:length], softmax_scale)


class PagedWrapper:
    """FlashInfer's paged wrappers: HND pages, lists of pages per sequence; prefill is also told where each sequence's queries begin."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool = False):
        assert layout == "HND" and workspace.dtype == torch.uint8

    def plan(self, *arguments: Any, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype, causal: bool = False) -> None:
        *borders, self.indptr, self.indices, self.last, num_heads, num_kv_heads, head_dim, page = arguments
        assert causal == bool(borders) and q_data_type == kv_data_type
        self.borders = borders[0] if borders else torch.arange(len(self.indptr))
        self.scale, self.shape = sm_scale, (num_kv_heads, page, head_dim)

    def run(self, query: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert pools[0].shape[1:] == self.shape
        rows = []
        for seq in range(len(self.last)):
            pages = self.indices[slice(*self.indptr[seq : seq + 2].tolist())].long()
            length = (len(pages) - 1) * self.shape[1] + int(self.last[seq])
            key, value = (pool[pages].transpose(1, 2).flatten(0, 1)[:length] for pool in pools)
            rows.append(attend(query[slice(*self.borders[seq : seq + 2].tolist())], key, value, self.scale))
        return torch.cat(rows)


STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash-attn": ("flash_attn", {"flash_attn_with_kvcache": flash_attn_with_kvcache}),
    "flashinfer": (
        "flashinfer",
        {"BatchDecodeWithPagedKVCacheWrapper": PagedWrapper, "BatchPrefillWithPagedKVCacheWrapper": PagedWrapper},
    ),
    "sglang triton": (
        "sglang.srt.layers.attention.triton_ops",
        {"decode_attention_fwd": decode_attention_fwd, "extend_attention_fwd": extend_attention_fwd},
    ),
    "vllm triton": ("vllm.v1.attention.ops.triton_unified_attention", {"unified_attention": unified_attention}),
}


def case_of(name: str) -> Case:
    """One of CASES in fp32."""
    return build_case(name, heads=Heads(6, 2, 64), block_size=16, dtype=torch.float32, **CASES[name])


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("peer", STAND_INS)
def test_peer_is_given_what_it_documents(peer: str, case_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, members = STAND_INS[peer]
    paths = [f"{path}.decode_attention", f"{path}.extend_attention"] if peer == "sglang triton" else [path]
    for each in paths:
        names = each.split(".")
        for count in range(1, len(names) + 1):
            module = ModuleType(".".join(names[:count]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        module.__dict__.update(members)
    case = case_of(case_name)
    out = peers(case)[peer]()()
    assert attention_error(out, case.exact_rows(range(case.query.shape[0]))) < 1e-5


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("peer", ["sdpa math", "flex paged"])
def test_peer_that_runs_on_a_cpu_computes_the_case(peer: str, case_name: str) -> None:
    case = case_of(case_name)
    out = peers(case)[peer]()()
    assert attention_error(out, case.exact_rows(range(case.query.shape[0]))) < 1e-5


@pytest.mark.parametrize("peer", STAND_INS)
def test_peer_that_is_not_installed_says_so(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, STAND_INS[peer][0].split(".")[0], None)
    with pytest.raises(NotAtHand, match="not installed"):
        peers(case_of("decode"))[peer]()


def test_release_that_needs_more_than_we_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unified(q: torch.Tensor, something_new: int) -> None:
        raise AssertionError("must not be called")

    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("vllm.v1.attention.ops.triton_unified_attention")
    module.__dict__["unified_attention"] = unified
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(NotAtHand, match="something_new"):
        peers(case_of("decode"))["vllm triton"]()


def test_pages_of_flex_attention_are_those_that_are_seen() -> None:
    """Eager flex_attention looks at the mask alone; compiled, it trusts the lists of pages."""
    heads, query_len, seq_len = Heads(6, 2, 64), 333, 900
    case = build_case("chunk", flat(2, seq_len), heads=heads, phase="prefill", query_lens=[query_len] * 2, dtype=torch.float32)
    masks: list[Any] = []

    def keep(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, **options: Any) -> torch.Tensor:
        masks.append(block_mask)
        return query

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.bench.gpu_peers.flex_attention", keep)
        patch.setattr("torch.compile", lambda function, **options: function)
        peers(case)["flex paged"]()()
    (mask,) = masks
    num_keys = mask.seq_lengths[1]
    batch, query, key = torch.meshgrid(torch.arange(2), torch.arange(query_len), torch.arange(num_keys), indexing="ij")
    visible = mask.mask_mod(batch, torch.zeros_like(batch), query, key)
    padded = torch.nn.functional.pad(visible, (0, 0, 0, -query_len % 128)).view(2, -1, 128, num_keys // 128, 128)
    assert torch.equal(mask.to_dense()[:, 0].bool(), padded.any(4).any(2))
    whole = torch.nn.functional.pad(visible, (0, 0, 0, -query_len % 128), value=True).view(2, -1, 128, num_keys // 128, 128).all(4).all(2)
    full = torch.zeros_like(whole)
    for seq, counts in enumerate(mask.full_kv_num_blocks[:, 0].tolist()):
        for tile, count in enumerate(counts):
            full[seq, tile, mask.full_kv_indices[seq, 0, tile, :count].long()] = True
    assert torch.equal(full, whole)
