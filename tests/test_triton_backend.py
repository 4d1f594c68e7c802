"""patch_model(model, backend="triton"): every attention of every layer and step runs in our kernels, and the tokens are the model's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import radixkv
from radixkv.kernels import advance, decode, prefill, store
from tests.models import HEAD_SHAPES, assert_varied, left_pad, new_tokens, prompt, tiny_qwen2

LAYERS, NEW = 2, 4
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def no_sdpa(monkeypatch):
    """Any attention outside our kernels fails. The stock eager path is matmul and softmax, so the model must not be on it either."""

    def refuse(*_, **__):
        raise AssertionError("scaled_dot_product_attention was called")

    def arm():
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)

    return arm


@pytest.fixture
def kernel_calls(monkeypatch):
    """Counts at the functions themselves, independent of the library's own counter."""
    calls: dict[str, int] = {}

    def count(module, name):
        original = getattr(module, name)

        def counted(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(store, "rope_store_kv")
    count(store, "copy_blocks")
    count(prefill, "prefill_attention")
    count(decode, "decode_attention")
    count(advance, "advance_rows")
    return calls


@pytest.mark.parametrize("name", ["small", *HEAD_SHAPES])
def test_every_attention_runs_in_our_kernels(name, no_sdpa, kernel_calls):
    model = tiny_qwen2(seed=5, num_layers=LAYERS, heads=HEAD_SHAPES.get(name, (6, 2, 32)))
    document = prompt(21, seed=1)
    rows = [torch.cat([document, prompt(3, seed=2)]), torch.cat([document[:18], prompt(1, seed=3)]), prompt(5, seed=4)]
    ids, mask = left_pad(rows)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert_varied(new_tokens(expected, ids))
    radixkv.patch_model(model, num_blocks=20, block_size=16, backend="triton")
    assert model.radixkv.backend.name == "triton"
    no_sdpa()
    for _ in range(2):
        kernel_calls.clear()
        model.radixkv.backend.launches.clear()
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
        attention = {"rope_store_kv": LAYERS * NEW, "prefill_attention": LAYERS}
        attention |= {"decode_attention": LAYERS * (NEW - 1), "advance_rows": NEW - 1}
        copies = kernel_calls.pop("copy_blocks", 0)
        assert kernel_calls == attention
        assert model.radixkv.backend.launches == {**attention, **({"copy_blocks": copies} if copies else {})}
    assert copies == 1  # the warm call copies its partly matched blocks, of all rows and layers, in one launch
    assert model.radixkv.stats().cached_tokens > 0
    model.radixkv.check()


@pytest.mark.parametrize("window", [5, 16])
def test_sliding_windows(window, no_sdpa):
    settings = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    model = tiny_qwen2(seed=6, num_layers=LAYERS, **settings)
    ids, mask = left_pad([prompt(30, seed=7), prompt(11, seed=8)])
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    radixkv.patch_model(model, num_blocks=20, block_size=16, backend="triton")
    no_sdpa()
    for _ in range(2):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)


def test_attention_modules_keep_their_class_but_while_patched():
    """Rotation and storing are one launch in a packed forward of a patched model, and nowhere else."""
    model = tiny_qwen2(seed=5, num_layers=LAYERS)
    ids = prompt(12, seed=1)[None]
    plain, expected = model(ids).logits, model.generate(ids, **GREEDY)
    own = [type(layer.self_attn) for layer in model.model.layers]
    radixkv.patch_model(model, num_blocks=8, block_size=16, backend="triton")
    assert all(issubclass(type(layer.self_attn), base) for layer, base in zip(model.model.layers, own, strict=True))
    assert [type(layer.self_attn) for layer in model.model.layers] != own
    assert torch.equal(model(ids).logits, plain)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(copied.generate(ids, **GREEDY), expected) and copied.radixkv.backend.launches["rope_store_kv"] == LAYERS * NEW
    assert [type(layer.self_attn) for layer in pickled.model.layers] == own and torch.equal(pickled(ids).logits, plain)
    radixkv.unpatch_model(model)
    assert [type(layer.self_attn) for layer in model.model.layers] == own
    assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_triton_without_a_gpu_or_the_interpreter_is_refused(monkeypatch):
    """Asking for what cannot run raises; nothing falls back silently."""
    monkeypatch.setattr("radixkv.attention._triton_interprets", lambda: False)
    with pytest.raises(ValueError, match="backend='triton' cannot run on device cpu"):
        radixkv.patch_model(tiny_qwen2(), num_blocks=20, backend="triton")
