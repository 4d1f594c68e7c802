"""Saving and loading as a model does it, and what the reports say."""

from __future__ import annotations

import copy
import gc
import json
import logging
import random
import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import radixkv
from radixkv.integration import handle as handle_module
from radixkv.integration.fingerprint import digest_weights
from radixkv.meter import PromptMeter
from tests.models import counted_tokens, prompt, tiny_qwen2
from tests.persisted import (
    filled,
    ids_of,
    make_cache,
    run_python,
)


# Reports ------------------------------------------------------------------------------------------------------------------------------
def test_reports_say_whether_loading_was_worth_it(tmp_path, caplog):
    cache, fresh = filled(), make_cache()
    with caplog.at_level(logging.INFO, "radixkv"):
        saved = cache.save(tmp_path / "prefixes")
        report = fresh.load(tmp_path / "prefixes")
    assert [record.getMessage() for record in caplog.records] == [str(saved), str(report)]
    assert saved.seconds > 0 and f"saved {saved.num_tokens} tokens in 0.1 MB" in str(saved)
    assert (report.computed_tokens_per_s, report.beats_recomputing, report.rate_is_saved) == (None, None, False)
    assert "whether that beats recomputing is not known" in str(report)
    assert report.loaded_tokens_per_s == report.loaded_tokens / report.seconds
    assert report.bytes_per_s == report.num_bytes / report.seconds

    batch = cache.admit([ids_of(400, 77).astype("<i4").tobytes()], [1])
    with cache.prompt_step(batch) as step:
        step.begin()
    cache.discard(batch)
    rate = cache.meter.tokens_per_s()
    assert rate is not None and rate > 0
    cache.save(tmp_path / "prefixes")
    cache.clear()
    here, there = cache.load(tmp_path / "prefixes"), make_cache().load(tmp_path / "prefixes")
    assert (here.computed_tokens_per_s, here.rate_is_saved) == (rate, False)
    assert (there.computed_tokens_per_s, there.rate_is_saved) == (rate, True)
    assert here.beats_recomputing == (here.loaded_tokens_per_s > rate)
    assert ("which beats" if here.beats_recomputing else "which does not beat") in str(here)
    assert str(there).endswith("tokens/s, as measured where the file was saved")


def test_the_meter_keeps_the_best_rate_of_steps_that_ended(monkeypatch):
    times = iter([0.0, 2.0, 10.0, 11.0, 20.0, 30.0])
    monkeypatch.setattr("radixkv.meter.time.perf_counter", lambda: next(times))
    meter = PromptMeter(torch.device("cpu"))
    assert meter.tokens_per_s() is None
    for _ in range(2):
        with meter.measure(100):
            pass
    assert meter.tokens_per_s() == 100.0
    with pytest.raises(KeyError), meter.measure(10_000):
        raise KeyError
    assert meter.tokens_per_s() == 100.0


# Models -------------------------------------------------------------------------------------------------------------------------------
def patched(seed: int = 0, **settings):
    options = {"num_blocks": 200, "block_size": 16, **settings.pop("options", {})}
    return radixkv.patch_model(tiny_qwen2(seed, **settings), **options)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A document's prefix as a model left it in a file, two questions, and what the model answers them."""
    model, path = patched(), tmp_path_factory.mktemp("saved") / "prefixes"
    document = prompt(300, 0)
    questions = [torch.cat([document, prompt(11, seed)])[None] for seed in (1, 2)]
    model.generate(document[None], max_new_tokens=1, do_sample=False)
    model.radixkv.save(path)
    return path, questions, [model.generate(ids, max_new_tokens=12, do_sample=False) for ids in questions]


@pytest.mark.parametrize("options", [{}, {"block_size": 64}], ids=["same blocks", "larger blocks"])
def test_after_loading_only_questions_are_computed(saved_model, options):
    path, questions, answers = saved_model
    model = patched(options=options)
    report = model.radixkv.load(path)
    assert report.loaded_tokens == 300 and report.beats_recomputing is not None
    for ids, answer in zip(questions, answers, strict=True):
        with counted_tokens(model) as rows:
            assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), answer)
        assert rows == [11] + [1] * 11
    model.radixkv.check()


def test_in_a_fresh_process_too(saved_model):
    path, questions, answers = saved_model
    code = (
        "import json, sys, torch, radixkv\n"
        "from tests.models import counted_tokens, tiny_qwen2\n"
        "torch.set_num_threads(1)\n"
        "model = radixkv.patch_model(tiny_qwen2(), num_blocks=200, block_size=32)\n"
        "model.radixkv.load(sys.argv[1])\n"
        "with counted_tokens(model) as rows:\n"
        "    output = model.generate(torch.tensor(json.loads(sys.argv[2])), max_new_tokens=12, do_sample=False)\n"
        "print(json.dumps([output.tolist(), rows]))\n"
    )
    output, rows = json.loads(run_python(code, path, json.dumps(questions[0].tolist())))
    assert output == answers[0].tolist()
    assert rows == [11] + [1] * 11


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models(tmp_path, dtype):
    model, other = patched(dtype=dtype), patched(dtype=dtype)
    ids = prompt(90, 3)[None]
    first = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.radixkv.save(tmp_path / "prefixes")
    again = model.generate(ids, max_new_tokens=6, do_sample=False)
    other.radixkv.load(tmp_path / "prefixes")
    assert other.radixkv.match_prefix(first[0]).length == first.shape[1] - 1
    assert torch.equal(other.generate(ids, max_new_tokens=6, do_sample=False), again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, r'nothing was loaded: weights is "[0-9a-f]+\.\.\. in the file and "[0-9a-f]+\.\.\. here$'),
        ({"rms_norm_eps": 1e-5}, "nothing was loaded: config.rms_norm_eps is 1e-06 in the file and 1e-05 here$"),
        ({"hidden_act": "gelu"}, 'nothing was loaded: config.hidden_act is "silu" in the file and "gelu" here$'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope.theta is 10000.0 in the file and 7.0 here"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            'rope.type is "default" in the file and "linear" here',
        ),
        ({"dtype": torch.bfloat16}, 'dtype is "float32" in the file and "bfloat16" here'),
        ({"num_layers": 2}, "num_layers is 3 in the file and 2 here"),
        ({"heads": (4, 4, 32)}, "num_kv_heads is 2 in the file and 4 here"),
        ({"heads": (4, 2, 16)}, "head_dim is 32 in the file and 16 here"),
        ({"options": {"namespace": ("tenant",)}}, r'namespace is \[\] in the file and \[\["str", "tenant"\]\] here'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_every_difference_of_models_is_named(saved_model, settings, message):
    other = patched(**settings)
    with pytest.raises(ValueError, match=message):
        other.radixkv.load(saved_model[0])
    assert other.radixkv.stats().blocks_free == 200


def test_one_bit_of_any_one_parameter_is_another_model():
    model = tiny_qwen2(num_layers=1, heads=(2, 1, 16))
    rng, seen = random.Random(0), {digest_weights(model)}

    def require_new() -> None:
        digest = digest_weights(model)
        assert digest not in seen
        seen.add(digest)

    for _, parameter in model.named_parameters():
        words = parameter.detach().view(-1).view(torch.int32)
        for place in {0, len(words) - 1, rng.randrange(len(words))}:
            for bit in {0, 31, rng.randrange(31)}:
                kept = words[place].clone()
                words[place] ^= torch.tensor(1, dtype=torch.int32) << bit
                require_new()
                words[place] = kept
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    original = weight.clone()
    weight[0, :2].neg_()  # the highest bits of two words of a row
    require_new()
    weight.copy_(original[[1, 0, *range(2, len(original))]])
    require_new()
    weight.copy_(original)
    weight[0] = original[0].roll(1)
    require_new()
    weight.copy_(original)
    assert digest_weights(model) in seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 2048), (1, 2049), (1025, 3)], ids=str)
def test_digests_of_any_tensor(dtype, shape):
    """Names, shapes, types and buffers count; strides and where the memory begins do not."""

    def digest(tensor: torch.Tensor, name: str = "a", *, buffer: bool = True) -> str:
        module = torch.nn.Module()
        if buffer:
            module.register_buffer(name, tensor)
        else:
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        return digest_weights(module)

    data = torch.testing.make_tensor(shape, dtype=dtype, device="cpu", low=0, high=2)
    found = digest(data)
    assert digest(data.clone()) == digest(data, buffer=False) == found
    shifted = torch.empty(data.numel() + 1, dtype=dtype)[1:].view(shape).copy_(data)
    assert digest(shifted) == found
    if data.ndim == 2:
        assert digest(data.t().contiguous().t()) == found
    others = [digest(data, "b"), digest(data[None])]
    if data.numel():
        changed = data.clone()
        changed.view(-1)[-1] = not changed.view(-1)[-1] if dtype == torch.bool else changed.view(-1)[-1] + 1
        others.append(digest(changed))
    assert found not in others and len(set(others)) == len(others)


def test_weights_are_digested_once_per_version(tmp_path, monkeypatch):
    model = patched()
    model.generate(prompt(20, 0)[None], max_new_tokens=1)
    calls = []

    def counted(model: torch.nn.Module, progress: bool | None) -> str:
        calls.append(model)
        return digest_weights(model, progress)

    monkeypatch.setattr(handle_module, "digest_weights", counted)
    model.radixkv.save(tmp_path / "prefixes")
    model.radixkv.load(tmp_path / "prefixes")
    assert len(calls) == 1
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1
    with pytest.raises(ValueError, match="weights is"):
        model.radixkv.load(tmp_path / "prefixes")
    assert len(calls) == 2
    assert model.radixkv.save(tmp_path / "prefixes").num_tokens == 0  # what was computed before is stale
    model.lm_head.weight.data[3, 3] += 1
    model.radixkv.invalidate()
    with pytest.raises(ValueError, match="weights is"):
        model.radixkv.load(tmp_path / "prefixes")
    assert len(calls) == 3


def test_stale_prefixes_that_are_leased_are_not_saved(tmp_path):
    model = patched()
    ids = prompt(40, 0)
    model.generate(ids[None], max_new_tokens=1)
    lease = model.radixkv.match_prefix(ids)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert model.radixkv.save(tmp_path / "prefixes").num_tokens == 0
    model.generate(ids[None], max_new_tokens=1)
    assert model.radixkv.save(tmp_path / "prefixes").num_tokens == 40
    lease.release()


def tokenizer(*words: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0], pad_token=words[0])


def test_the_tokenizer_counts_where_one_is_given(tmp_path):
    model, path = patched(), tmp_path / "prefixes"
    one, other = tokenizer("?", "a", "b"), tokenizer("?", "b", "a")
    model.generate(prompt(20, 0)[None], max_new_tokens=1)
    model.radixkv.save(path, tokenizer=one)
    one(["a b", "a"], padding=True)  # leaves its settings in the tokenizer
    model.radixkv.load(path, tokenizer=one)
    model.radixkv.load(path)
    with pytest.raises(ValueError, match='nothing was loaded: tokenizer is "'):
        model.radixkv.load(path, tokenizer=other)
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of transformers, got str"):
        model.radixkv.save(path, tokenizer="name")
    model.radixkv.save(path)
    with pytest.raises(ValueError, match="tokenizer is null in the file"):
        model.radixkv.load(path, tokenizer=one)


def test_facts_of_the_user_stand_beside_the_models(tmp_path):
    model, path = patched(), tmp_path / "prefixes"
    model.radixkv.save(path, fingerprint={"prompt format": 3})
    with pytest.raises(ValueError, match="prompt format is 3 in the file and 4 here"):
        model.radixkv.load(path, fingerprint={"prompt format": 4})
    with pytest.raises(ValueError, match="fingerprint: weights is taken by radixkv"):
        model.radixkv.save(path, fingerprint={"weights": "mine"})


def test_models_that_were_copied_moved_or_dropped(tmp_path):
    model, path = patched(), tmp_path / "prefixes"
    model.generate(prompt(20, 0)[None], max_new_tokens=1)
    model.radixkv.save(path)
    copied = copy.deepcopy(model)
    assert copied.radixkv.load(path).loaded_tokens == 20
    copied.to(torch.bfloat16)
    with pytest.raises(ValueError, match='dtype is "float32" in the file and "bfloat16" here'):
        copied.radixkv.load(path)
    handle = model.radixkv
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="the model of this cache is gone"):
        handle.save(path)


def test_generating_and_saving_in_two_threads(saved_model, tmp_path):
    path, questions, answers = saved_model
    model = patched()
    model.radixkv.load(path)
    done = threading.Event()
    reports = []

    def save() -> None:
        while not done.is_set():
            reports.append(model.radixkv.save(tmp_path / "prefixes"))
            patched_copy.radixkv.load(tmp_path / "prefixes")

    patched_copy = patched()
    saver = threading.Thread(target=save)
    saver.start()
    try:
        for _ in range(3):
            for ids, answer in zip(questions, answers, strict=True):
                assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), answer)
    finally:
        done.set()
        saver.join(60)
    assert len(reports) > 2
    model.radixkv.check()
    patched_copy.radixkv.check()
    for ids, answer in zip(questions, answers, strict=True):
        assert torch.equal(patched_copy.generate(ids, max_new_tokens=12, do_sample=False), answer)
