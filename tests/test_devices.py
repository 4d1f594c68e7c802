"""Models that accelerate spreads over devices or offloads: each layer's K/V lies with the layer, and changed weights are seen."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules

import radixkv
from radixkv.integration.fingerprint import digest_weights
from tests.models import TRANSFORMERS_MAJOR, left_pad, new_tokens, prompt, tiny_qwen2

GREEDY = {"max_new_tokens": 12, "do_sample": False}
ROOT = Path(__file__).resolve().parent.parent
DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "cpu",
    "model.norm": "cpu",
    "lm_head": "disk",
}


def device_map(settings: dict[str, Any]) -> dict[str, str]:
    # transformers does not load tied weights to two places.
    return DEVICE_MAP | ({"lm_head": "cpu"} if settings.get("tie_word_embeddings") else {})


def loaded(folder: Path, **settings: Any) -> Any:
    """As a user gets it: from a checkpoint, with a device map."""
    tiny_qwen2(**settings).save_pretrained(folder / "checkpoint")
    options = {"device_map": device_map(settings), "offload_folder": folder / "offload"}
    return transformers.Qwen2ForCausalLM.from_pretrained(folder / "checkpoint", **options)


OFFLOADED = {
    "dispatch_model": lambda folder, **settings: dispatch_model(tiny_qwen2(**settings), device_map(settings), offload_dir=folder),
    "from_pretrained": loaded,
    "cpu_offload": lambda folder, **settings: cpu_offload(tiny_qwen2(**settings), "cpu"),
    "cpu_offload with buffers": lambda folder, **settings: cpu_offload(tiny_qwen2(**settings), "cpu", offload_buffers=True),
    "disk_offload": lambda folder, **settings: disk_offload(tiny_qwen2(**settings), folder, "cpu"),
}


def patch(model: Any, **options: Any) -> Any:
    return radixkv.patch_model(model, **{"num_blocks": 100, "block_size": 16, **options})


@pytest.mark.parametrize("how", OFFLOADED)
def test_offloaded_models_answer_as_unpatched(how: str, tmp_path: Path) -> None:
    plain, model = (OFFLOADED[how](tmp_path / name) for name in ("plain", "patched"))
    patch(model)
    assert model.radixkv.pool.devices == [torch.device("cpu")] * 3 and model.radixkv.graphs is None
    ids, mask = left_pad([prompt(40, 1), torch.cat([prompt(40, 1)[:29], prompt(20, 2)]), prompt(5, 3)])
    modes: list[dict[str, Any]] = [{}, {"do_sample": True}, {"num_beams": 3}]
    if plain.device.type != "meta":  # there transformers itself makes its candidates
        modes.append({"prompt_lookup_num_tokens": 3})
    for arguments in modes:
        rows = slice(0, 1) if "prompt_lookup_num_tokens" in arguments else slice(None)
        answers = []
        for call in (plain, model, model):
            torch.manual_seed(5)
            answers.append(call.generate(ids[rows], attention_mask=mask[rows], **{**GREEDY, **arguments}))
        assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2]), arguments
    before = model.radixkv.stats()
    assert torch.equal(model.generate(ids[:1], **GREEDY), plain.generate(ids[:1], **GREEDY))
    after = model.radixkv.stats()
    assert (after.cached_tokens - before.cached_tokens, after.stock_calls) == (39, 0)
    assert model.radixkv.last_change is None, "hooks that bring and take weights change nothing"
    model.radixkv.check()
    radixkv.unpatch_model(model)
    assert torch.equal(model.generate(ids[:1], **GREEDY), plain.generate(ids[:1], **GREEDY))


@pytest.mark.parametrize("chunk", [7, 16])
def test_chunks_with_pads_of_an_offloaded_model(chunk: int, tmp_path: Path) -> None:
    """A chunk of pads has logits of the right kind although the output layer's weights are nowhere."""
    plain, model = tiny_qwen2(), patch(OFFLOADED["cpu_offload"](tmp_path))
    rows = [prompt(40, 4), prompt(40, 5)[:10]]
    ids, mask = left_pad(rows)
    got = new_tokens(model.generate(ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY), ids)
    calls = model.radixkv.stats().stock_calls
    if TRANSFORMERS_MAJOR < 5:
        # There chunks go to the forward that the hooks put over the class's, and the model's own path gets pads wrong.
        assert calls == 1
        return
    assert calls == 0
    for row, tokens in zip(rows, got, strict=True):
        assert torch.equal(tokens, new_tokens(plain.generate(row[None], **GREEDY), row[None])[0])


def test_own_loop_branch_copy_and_many(tmp_path: Path) -> None:
    plain, model = tiny_qwen2(), patch(OFFLOADED["dispatch_model"](tmp_path))
    ids = prompt(37, 6)[None]
    expected = plain.generate(ids, **GREEDY)
    cache = model.radixkv.new_cache()
    with torch.no_grad():
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, plain(ids).logits, atol=2e-4, rtol=1e-4)
    cache.store()
    with model.radixkv.branch(ids) as branch:
        for fork in branch.fork(2):
            assert torch.equal(model.generate(ids, past_key_values=fork, **GREEDY), expected)
    answers = model.radixkv.generate_many([ids[0].tolist()], max_new_tokens=12)
    assert list(answers[0].tokens) == new_tokens(expected, ids)[0].tolist() and answers[0].cached_tokens == 36
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(ids, **GREEDY), expected) and twin.radixkv.stats().requests == 1


def written_in_memory(model: Any, folder: Path) -> None:
    model.model.layers[1].mlp.up_proj._hf_hook.weights_map["weight"].mul_(1.5)


def replaced_in_memory(model: Any, folder: Path) -> None:
    hook = model.model.layers[1].mlp.up_proj._hf_hook
    hook.weights_map.dataset["model.layers.1.mlp.up_proj.weight"] = hook.weights_map["weight"] * 1.5


def written_to_a_file(model: Any, folder: Path) -> None:
    file = folder / "model.layers.1.mlp.up_proj.weight.dat"
    values = np.memmap(file, dtype="float32", mode="r+")
    values *= 1.5
    values.flush()
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def bias_removed(model: Any, folder: Path) -> None:
    model.model.layers[1].self_attn.k_proj.bias = None


CHANGES = {
    "memory is written to": ("cpu_offload", written_in_memory, "up_proj.weight was written to"),
    "a value is replaced in memory": ("cpu_offload", replaced_in_memory, "up_proj.weight was added, replaced or removed"),
    "a file is written to": ("disk_offload", written_to_a_file, "weight.dat was written to"),
    "a bias is removed": ("cpu_offload", bias_removed, "a weight of model.layers.1.self_attn.k_proj was added, cast or removed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_that_are_offloaded(change: str, tmp_path: Path) -> None:
    how, apply, reason = CHANGES[change]
    model = patch(OFFLOADED[how](tmp_path))
    ids = prompt(40, 7)[None]
    first = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), first) and model.radixkv.stats().cached_tokens == 39
    apply(model, tmp_path)
    got = model.generate(ids, **GREEDY)
    assert reason in model.radixkv.last_change and model.radixkv.stats().cached_tokens == 39
    assert torch.equal(got, model.generate(ids, use_cache=False, **GREEDY)) and not torch.equal(got, first)


@pytest.mark.parametrize("how", OFFLOADED)
def test_files_are_of_the_weights_wherever_they_are(how: str, tmp_path: Path) -> None:
    """With tied weights too, which hooks untie."""
    for tied in (False, True):
        plain = patch(tiny_qwen2(tie_word_embeddings=tied))
        model = patch(OFFLOADED[how](tmp_path / str(tied), tie_word_embeddings=tied))
        ids = prompt(40, 8)[None]
        expected = plain.generate(ids, **GREEDY)
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        assert digest_weights(model) == digest_weights(plain)
        plain.radixkv.save(tmp_path / "prefixes.safetensors")
        model.radixkv.invalidate()
        assert model.radixkv.load(tmp_path / "prefixes.safetensors").loaded_tokens == 51
        before = model.radixkv.stats().cached_tokens
        assert torch.equal(model.generate(ids, **GREEDY), expected) and model.radixkv.stats().cached_tokens == before + 39


def test_hooks_that_come_and_go_after_patching(tmp_path: Path) -> None:
    plain, model = tiny_qwen2(), patch(tiny_qwen2())
    ids = prompt(40, 9)[None]
    expected = plain.generate(ids, **GREEDY)
    model.generate(ids, **GREEDY)
    cpu_offload(model, "cpu")
    assert model.model.norm.weight.device.type == "meta"
    cached = 0
    for reused in (0, 39):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        cached += reused
        assert model.radixkv.stats().cached_tokens == cached
    remove_hook_from_submodules(model)
    assert model.model.norm.weight.device.type == "cpu"
    for reused in (0, 39):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        cached += reused
        assert model.radixkv.stats().cached_tokens == cached


def test_refusals() -> None:
    nowhere = tiny_qwen2()
    nowhere.lm_head.to("meta")
    with pytest.raises(NotImplementedError, match="weights lie on cpu, meta, and nothing brings them together: load the model with device"):
        radixkv.patch_model(nowhere)
    split = dispatch_model(tiny_qwen2(), {"": "cpu"}, force_hooks=True)
    split.model.layers[1].self_attn.o_proj.to("meta")
    with pytest.raises(NotImplementedError, match=r"o_proj.weight is on the device meta and nothing brings its values"):
        radixkv.patch_model(split)
    offloaded = cpu_offload(tiny_qwen2(), "cpu")
    offloaded.model.layers[1].self_attn.o_proj._hf_hook.execution_device = torch.device("cuda", 1)
    with pytest.raises(NotImplementedError, match="attention of layer 1 computes on cpu, cuda:1, and its K/V can lie on one only"):
        radixkv.patch_model(offloaded)
    assert type(offloaded) is transformers.Qwen2ForCausalLM


# Two devices --------------------------------------------------------------------------------------------------------------------------
CHECKS = (
    "tensors_lie_with_their_layers",
    "answers",
    "blocks_are_copied_on_each_device",
    "host_memory_and_files",
    "own_loop_and_many",
    "offload_to_the_cpu",
    "a_device_map_that_changes",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What came of each check in tests/several_devices_worker.py."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tests/several_devices_worker.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_check_has_a_test(outcomes: dict[str, str]) -> None:
    assert set(outcomes) == {f"check_{name}" for name in CHECKS}


@pytest.mark.parametrize("name", CHECKS)
def test_layers_on_two_devices(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[f"check_{name}"], outcomes[f"check_{name}"]
