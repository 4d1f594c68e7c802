"""Checks of a model whose layers lie on two devices, in a process of their own because they set up the second one.

Run as `python tests/several_devices_worker.py`; prints what came of each check as JSON, "" for a success.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules

import radixkv
from radixkv.several_devices import SpreadStep
from tests.models import left_pad, new_tokens, prompt, tiny_qwen2
from tests.second_device import CPU, OTHER, Elsewhere, second_device

GREEDY = {"max_new_tokens": 12, "do_sample": False}
LAYERS = ["cpu", OTHER, OTHER, "cpu"]
PARTS = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": OTHER, "lm_head": OTHER}


def reference() -> Any:
    return tiny_qwen2(num_layers=len(LAYERS))


def spread(layers: list[Any] = LAYERS, main_device: Any = "cpu", **options: Any) -> Any:
    """A patched model whose layers lie on two devices."""
    device_map = PARTS | {f"model.layers.{layer}": device for layer, device in enumerate(layers)}
    model = dispatch_model(reference(), device_map, main_device=main_device)
    return radixkv.patch_model(model, **{"num_blocks": 100, "block_size": 16, **options})


def check_tensors_lie_with_their_layers() -> None:
    model = spread()
    pool, devices = model.radixkv.pool, [CPU, OTHER, OTHER, CPU]
    for tensors in (pool.keys, pool.values):
        assert [tensor.device for tensor in tensors] == pool.devices == devices
    assert model.radixkv.graphs is None and model.radixkv.backend.name == "torch"
    steps: list[Any] = []
    model.model.layers[0].register_forward_pre_hook(lambda *args: steps.append(args[2]["radixkv_step"]), with_kwargs=True)
    ids, mask = left_pad([prompt(40, 1), prompt(20, 2)])
    model.generate(ids, attention_mask=mask, **GREEDY)
    assert len(steps) == 12
    for step in steps:
        assert isinstance(step, SpreadStep) and step.is_complete
        for layer, device in enumerate(devices):
            plan = step._by_layer[layer].plan
            tensors = [plan.positions, plan.slots, plan.block_table, plan.seq_lens, *plan.work(None).block_ids]
            assert {tensor.device for tensor in tensors} == {device}
    assert len({id(step._by_layer[layer].plan) for layer in range(4)}) == 2, "layers on one device share a plan"


def check_answers() -> None:
    model, plain = spread(), reference()
    ids, mask = left_pad([prompt(40, 1), torch.cat([prompt(40, 1)[:29], prompt(20, 2)]), prompt(5, 3)])
    for arguments in ({}, {"num_beams": 3}, {"do_sample": True}, {"num_return_sequences": 2, "num_beams": 2}):
        expected = []
        for call in (plain, model, model):
            torch.manual_seed(5)
            expected.append(call.generate(ids, attention_mask=mask, **{**GREEDY, **arguments}))
        assert torch.equal(expected[0], expected[1]) and torch.equal(expected[0], expected[2]), arguments
    model.radixkv.check()
    stats = model.radixkv.stats()
    assert stats.cached_tokens > 0 and stats.stock_calls == 0 and stats.blocks_leased == 0
    assert model.radixkv.last_change is None


def check_blocks_are_copied_on_each_device() -> None:
    model, plain = spread(), reference()
    ids = prompt(37, 4)
    backend, copies = model.radixkv.backend, list[tuple]()
    copy_blocks = backend.copy_blocks

    def counted(*arguments: Any) -> None:
        copies.append(arguments)
        copy_blocks(*arguments)

    backend.copy_blocks = counted  # type: ignore[method-assign]
    with model.radixkv.branch(ids) as branch:
        for number, fork in enumerate(branch.fork(3)):
            torch.manual_seed(number)
            got = model.generate(ids[None], past_key_values=fork, do_sample=True, max_new_tokens=9)
            torch.manual_seed(number)
            assert torch.equal(got, plain.generate(ids[None], do_sample=True, max_new_tokens=9))
    assert copies and backend.launches["copy_blocks"] == 2 * len(copies), "one launch for each device"


def check_host_memory_and_files() -> None:
    model, plain = spread(num_blocks=12, host_bytes=8 << 20), reference()
    ids, others = prompt(100, 5)[None], prompt(150, 6)[None]
    expected = plain.generate(ids, **GREEDY)
    model.generate(ids, **GREEDY)
    model.generate(others, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert model.radixkv.stats().restored_tokens > 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefixes.safetensors"
        model.radixkv.save(path)
        for other in (radixkv.patch_model(plain, num_blocks=40, block_size=16), spread([OTHER, "cpu", OTHER, "cpu"], num_blocks=40)):
            assert other.radixkv.load(path).loaded_tokens >= 111
            assert torch.equal(other.generate(ids, **GREEDY), expected)
            assert other.radixkv.stats().cached_tokens == 99


def check_own_loop_and_many() -> None:
    model, plain = spread(), reference()
    prompts = [prompt(30, 7), torch.cat([prompt(30, 7), prompt(6, 8)])]
    answers = model.radixkv.generate_many([ids.tolist() for ids in prompts], max_new_tokens=10)
    for ids, answer in zip(prompts, answers, strict=True):
        assert list(answer.tokens) == new_tokens(plain.generate(ids[None], max_new_tokens=10, do_sample=False), ids[None])[0].tolist()
    cache = model.radixkv.new_cache()
    with torch.no_grad():
        logits = model(prompts[1][None], past_key_values=cache).logits
        expected = plain(prompts[1][None]).logits
    assert not isinstance(logits, Elsewhere), "logits come back to the device of the input"
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def check_offload_to_the_cpu() -> None:
    """Everything computes on the other device, what is offloaded included."""
    model, plain = spread(["cpu", OTHER, "cpu", OTHER], main_device=OTHER), reference()
    assert set(model.radixkv.pool.devices) == {OTHER} and model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    ids = prompt(40, 9)[None]
    for cached in (0, 39, 78):
        assert torch.equal(model.generate(ids, **GREEDY), plain.generate(ids, **GREEDY))
        assert model.radixkv.stats().cached_tokens == cached


def check_a_device_map_that_changes() -> None:
    model, plain = spread(), reference()
    ids = prompt(40, 10)[None]
    expected = plain.generate(ids, **GREEDY)
    model.generate(ids, **GREEDY)
    remove_hook_from_submodules(model)
    device_map = PARTS | {f"model.layers.{layer}": OTHER for layer in range(4)}
    dispatch_model(model, device_map, main_device="cpu")
    for _ in range(2):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert set(model.radixkv.pool.devices) == {OTHER} and model.radixkv.stats().cached_tokens == 39


def main() -> None:
    results = {}
    with second_device():
        for name, check in [(name, value) for name, value in globals().items() if name.startswith("check_")]:
            try:
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
