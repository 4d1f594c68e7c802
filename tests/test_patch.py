"""patch_model and unpatch_model: what they accept, what they leave alone, and which calls take the model's own path."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2ForCausalLM

import radixkv
from tests.models import counted_tokens, left_pad, new_tokens, prompt, tiny_qwen2

GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def patched():
    return radixkv.patch_model(tiny_qwen2(), num_blocks=200, block_size=16)


def test_unpatch_leaves_the_instance_as_it_was():
    model = tiny_qwen2()
    ids, mask = left_pad([prompt(30, 1), prompt(12, 2)])
    attributes, cls, implementation = set(vars(model)), type(model), model.config._attn_implementation
    config = model.config.to_dict()
    logits = model(ids, attention_mask=mask).logits
    assert radixkv.patch_model(model, num_blocks=20) is model
    assert isinstance(model, Qwen2ForCausalLM)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)
    assert model.config.to_dict() == config
    assert radixkv.unpatch_model(model) is model
    assert type(model) is cls
    assert set(vars(model)) == attributes
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids, attention_mask=mask).logits, logits)
    with pytest.raises(ValueError, match="not patched"):
        radixkv.unpatch_model(model)
    radixkv.unpatch_model(radixkv.patch_model(model, num_blocks=20))


def test_another_model_is_never_touched():
    """Two models may even share one configuration object."""
    config = tiny_qwen2().config
    first, second = Qwen2ForCausalLM(config).eval(), Qwen2ForCausalLM(config).eval()
    ids = prompt(30, 3)[None]
    before = second(ids).logits
    expected = second.generate(ids, **GREEDY)
    radixkv.patch_model(first, num_blocks=20)
    inside = []
    first.model.layers[0].register_forward_hook(lambda *_: inside.append(second(ids).logits))
    first.generate(ids, **GREEDY)
    assert all(torch.equal(logits, before) for logits in inside) and len(inside) == 10  # even in the middle of a packed forward
    assert torch.equal(second(ids).logits, before)
    assert torch.equal(second.generate(ids, **GREEDY), expected)
    assert type(second) is Qwen2ForCausalLM
    assert not hasattr(second, "radixkv")


def test_refusals():
    model = tiny_qwen2()
    radixkv.patch_model(model, num_blocks=20)
    with pytest.raises(ValueError, match="already patched"):
        radixkv.patch_model(model)
    handle = model.radixkv
    assert handle is model.radixkv
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(TypeError, match="GPT2LMHeadModel is not supported; supported classes: Qwen2ForCausalLM"):
        radixkv.patch_model(gpt2)
    for not_a_model in (torch.nn.Linear(2, 2), None, "Qwen2ForCausalLM"):
        with pytest.raises(TypeError, match="not supported"):
            radixkv.patch_model(not_a_model)
    fresh = tiny_qwen2()
    cases: list[tuple[dict, str]] = [
        ({"block_size": 24}, "block_size must be a power of two"),
        ({"block_size": 8}, "block_size must be a power of two"),
        ({"block_size": 0}, "block_size must be a power of two"),
        ({"block_size": "64"}, "block_size must be a power of two"),
        ({"num_blocks": 2.5}, "num_blocks must be an int"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": -3}, "num_blocks"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"namespace": "tenant"}, "namespace must be a tuple"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            radixkv.patch_model(fresh, **arguments)
        assert type(fresh) is Qwen2ForCausalLM and not hasattr(fresh, "radixkv")
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        radixkv.patch_model(tiny_qwen2(dtype=torch.float64))
    spread = tiny_qwen2()
    spread.lm_head.to("meta")
    with pytest.raises(NotImplementedError, match="the weights lie on cpu, meta, and nothing brings them together"):
        radixkv.patch_model(spread)


def test_default_pool_on_cpu():
    """A quarter of the memory but at most 65,536 tokens, and none of it touched before use."""
    model = radixkv.patch_model(tiny_qwen2())
    assert model.radixkv.pool.num_blocks * model.radixkv.pool.block_size == 65_536
    assert model.radixkv.backend.name == "torch"


def test_the_handle_prints_what_it_holds(patched):
    num_blocks = f"{patched.radixkv.num_blocks:,}"
    assert repr(patched.radixkv) == f"<ModelCache: 0 tokens cached, {num_blocks} of {num_blocks} blocks of 16 tokens free>"
    patched.generate(prompt(40, seed=1)[None], max_new_tokens=2, do_sample=False)
    assert repr(patched.radixkv).startswith("<ModelCache: 41 tokens cached, ")


def test_a_misspelt_keyword_raises_as_unpatched(reference, patched):
    ids = prompt(20, 4)[None]
    messages = []
    for model in (reference, patched):
        with pytest.raises(ValueError) as raised:
            model.generate(ids, max_new_tokenz=3)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    patched.radixkv.check()


def test_a_patched_model_as_an_assistant(reference, patched):
    """Of an unpatched model; its prompt is stored, the drafts of later rounds are not."""
    ids = prompt(20, 6)[None]
    for cached in (0, 19):
        before = patched.radixkv.stats()
        assert torch.equal(reference.generate(ids, assistant_model=patched, **GREEDY), reference.generate(ids, **GREEDY))
        after = patched.radixkv.stats()
        assert after.stock_calls == 0 and after.cached_tokens - before.cached_tokens >= cached
        gc.collect()
        patched.radixkv.check()


def test_training_takes_the_stock_path(patched):
    ids = prompt(20, 9)[None]
    patched.train()
    loss = patched(ids, labels=ids).loss
    loss.backward()
    assert patched.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0
    assert patched.radixkv.stats().stock_calls == 1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementation_may_change(patched, implementation):
    """The pool's attention is used whatever the model's own is, before and after a change."""
    ids = prompt(40, 10)[None]
    expected = patched.generate(ids, **GREEDY)
    patched.set_attn_implementation(implementation)
    assert torch.equal(patched.generate(ids, **GREEDY), expected)
    assert patched.config._attn_implementation == implementation
    assert patched.radixkv.stats().cached_tokens == 39


def test_a_deepcopy_runs_its_own_weights(patched):
    ids = prompt(40, 11)[None]
    expected = patched.generate(ids, **GREEDY)
    twin = copy.deepcopy(patched)
    assert twin.radixkv is not patched.radixkv
    assert twin.radixkv.stats().requests == 0
    with torch.no_grad():
        twin.lm_head.weight.copy_(-twin.lm_head.weight)
    reference = radixkv.unpatch_model(copy.deepcopy(twin))
    assert torch.equal(twin.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))
    assert not torch.equal(twin.generate(ids, **GREEDY), expected)
    assert torch.equal(patched.generate(ids, **GREEDY), expected)


def test_save_load_and_pickle_are_of_the_model_alone(patched, tmp_path):
    ids = prompt(30, 12)[None]
    expected = patched.generate(ids, **GREEDY)
    patched.save_pretrained(tmp_path)
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    assert "radixkv" not in (tmp_path / "config.json").read_text()
    unpickled = pickle.loads(pickle.dumps(patched))
    for model in (loaded, unpickled):
        assert type(model) is Qwen2ForCausalLM and not hasattr(model, "radixkv")
        assert torch.equal(model.generate(ids, eos_token_id=None, **GREEDY), expected)


def changed_in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def optimizer_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = prompt(20, 13)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def loaded_state(model):
    model.load_state_dict(tiny_qwen2(seed=77).state_dict())


def replaced_parameter(model):
    weight = model.model.layers[1].self_attn.v_proj.weight
    model.model.layers[1].self_attn.v_proj.weight = torch.nn.Parameter(weight.detach() * 0.5)


def replaced_data(model):
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = weight.data * 0.5


@pytest.mark.parametrize("change", [changed_in_place, optimizer_step, loaded_state, replaced_parameter, replaced_data])
def test_changed_weights_never_serve_stale_blocks(patched, change):
    ids = prompt(50, 14)[None]
    before = patched.generate(ids, **GREEDY)
    lease = patched.radixkv.match_prefix(ids[0])
    change(patched)
    fresh = radixkv.unpatch_model(copy.deepcopy(patched))
    got = patched.generate(ids, **GREEDY)
    assert torch.equal(got, fresh.generate(ids, **GREEDY))
    assert not torch.equal(got, before)
    with pytest.raises(ValueError, match="namespace"):
        patched.generate(ids, prefix_cache=lease, **GREEDY)
    lease.release()
    patched.radixkv.check()


def test_cast_after_patching(patched):
    ids = prompt(50, 15)[None]
    patched.generate(ids, **GREEDY)
    patched.to(torch.bfloat16)
    expected = radixkv.unpatch_model(copy.deepcopy(patched)).generate(ids, **GREEDY)
    assert torch.equal(patched.generate(ids, **GREEDY), expected)
    assert patched.radixkv.pool.dtype == torch.bfloat16
    patched.to(torch.float32)
    patched.generate(ids, **GREEDY)
    patched.radixkv.check()


def test_patched_under_inference_mode(reference):
    ids = prompt(50, 16)[None]
    with torch.inference_mode():
        model = radixkv.patch_model(tiny_qwen2(), num_blocks=20)
        inside = model.generate(ids, **GREEDY)
    assert torch.equal(inside, reference.generate(ids, **GREEDY))
    assert torch.equal(model.generate(ids, **GREEDY), inside)


def test_namespaces_do_not_cross(patched):
    ids = prompt(50, 17)[None]
    patched.generate(ids, **GREEDY)
    for namespace, length in [((), 50), (("tenant",), 0), ((("tenant", 1),), 0)]:
        with patched.radixkv.match_prefix(ids[0], namespace=namespace) as lease:
            assert lease.length == length
    other = radixkv.patch_model(tiny_qwen2(), num_blocks=20, namespace=("a", "b"))
    other.generate(ids, **GREEDY)
    assert other.radixkv.full_namespace() != patched.radixkv.full_namespace()


def test_out_of_blocks_names_what_is_missing_and_loses_nothing(reference):
    model = radixkv.patch_model(tiny_qwen2(), num_blocks=6, block_size=16)
    kept = prompt(40, 18)[None]
    expected = model.generate(kept, **GREEDY)
    cached = model.radixkv.stats().blocks_cached
    with pytest.raises(radixkv.OutOfBlocks, match=r"need 13 blocks of 16 tokens; \d free, \d evictable, 0 leased"):
        model.generate(prompt(200, 19)[None], **GREEDY)
    model.radixkv.check()
    stats = model.radixkv.stats()
    assert (stats.blocks_leased, stats.blocks_cached, stats.evicted_tokens) == (0, cached, 0)
    with counted_tokens(model) as rows:
        assert torch.equal(model.generate(kept, **GREEDY), expected)
    assert rows[0] == 1
    # In the middle: the prompt fits, the answer does not.
    with pytest.raises(radixkv.OutOfBlocks, match="need 1 blocks"):
        model.generate(prompt(80, 20)[None], max_new_tokens=40, do_sample=False)
    model.radixkv.check()
    assert model.radixkv.stats().blocks_leased == 0
    with counted_tokens(model) as rows:
        got = model.generate(prompt(80, 20)[None], **GREEDY)
    assert rows[0] == 1
    assert torch.equal(got, reference.generate(prompt(80, 20)[None], **GREEDY))


@pytest.mark.parametrize(("length", "computed"), [(80, 1), (95, 15)])
def test_a_pool_that_just_fits(reference, length, computed):
    """A partly matched block is copied, so for a moment it takes two; where there is no room for that, its tokens are computed again."""
    model = radixkv.patch_model(tiny_qwen2(), num_blocks=6, block_size=16)
    ids = prompt(96, 29)[None]
    model.generate(ids, max_new_tokens=1, do_sample=False)
    assert model.radixkv.stats().blocks_cached == 6
    with counted_tokens(model) as rows:
        got = model.generate(ids[:, :length], max_new_tokens=96 - length, do_sample=False)
    assert rows[0] == computed
    assert torch.equal(got, reference.generate(ids[:, :length], max_new_tokens=96 - length, do_sample=False))
    model.radixkv.check()


def test_a_row_without_tokens(patched):
    ids, mask = left_pad([prompt(10, 21), prompt(6, 22)])
    mask[1] = 0
    mask[1, -1] = 1
    assert patched.generate(ids, attention_mask=mask, **GREEDY) is not None
    patched.radixkv.check()


def test_several_threads(reference, patched):
    """Four threads on one model: every answer right, nothing leaked."""
    document = prompt(60, 23)
    questions = [torch.cat([document, prompt(6, 100 + i)])[None] for i in range(12)]
    expected = [reference.generate(ids, **GREEDY) for ids in questions]
    answers: list = [None] * len(questions)

    def work(first: int) -> None:
        for i in range(first, len(questions), 4):
            answers[i] = patched.generate(questions[i], **GREEDY)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got, want) for got, want in zip(answers, expected, strict=True))
    patched.radixkv.check()
    assert patched.radixkv.stats().blocks_leased == 0


def test_one_prompt_hit_is_at_least_half(patched):
    """A shared header is not a hit: a request must reuse at least half of its prompt."""
    header, body = prompt(20, 24), prompt(40, 25)
    patched.generate(torch.cat([header, body])[None], **GREEDY)
    patched.radixkv.reset_stats()
    patched.generate(torch.cat([header, prompt(21, 26)])[None], **GREEDY)
    assert (patched.radixkv.stats().hits, patched.radixkv.stats().cached_tokens) == (0, 20)
    patched.generate(torch.cat([header, prompt(20, 27)])[None], **GREEDY)
    assert (patched.radixkv.stats().hits, patched.radixkv.stats().cached_tokens) == (1, 40)
    assert patched.radixkv.stats().hit_rate == 0.5
    assert patched.radixkv.stats().token_hit_rate == 40 / 81


def test_positional_input_and_streamer(reference, patched):
    class Collect:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    ids = prompt(30, 28)[None]
    ours, theirs = Collect(), Collect()
    got = patched.generate(ids, streamer=ours, **GREEDY)
    assert torch.equal(got, reference.generate(ids, streamer=theirs, **GREEDY))
    assert ours.tokens == theirs.tokens
    assert new_tokens(got, ids).shape[1] == 10
