"""Every way of decoding that generate() has, patched against unpatched in float32, cold and then warm, and which path it took."""

from __future__ import annotations

import copy
import itertools
import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinLengthLogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

import radixkv
from tests.models import EOS, PAD, VOCAB_SIZE, counted_tokens, left_pad, new_tokens, prompt, tiny_qwen2

BLOCK = 16
GREEDY = {"max_new_tokens": 20, "do_sample": False}
SAMPLING = {"max_new_tokens": 20, "do_sample": True, "top_k": 40, "temperature": 1.5}


class _Ban(LogitsProcessor):
    """A processor of the caller's own, which looks at the tokens so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores.scatter_(1, input_ids[:, -3:], -100.0)
        return scores


class _StopAt(StoppingCriteria):
    """Ends a row when it holds a token twice, by no token id."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([len(set(row[-6:].tolist())) < 5 for row in input_ids])


def words() -> PreTrainedTokenizerFast:
    """A tokenizer for stop strings: its tokens are one or two letters or digits."""
    letters = string.ascii_lowercase + string.digits
    pairs = list(itertools.product(letters, letters))[: VOCAB_SIZE - len(letters)]
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, pairs)])}
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def single() -> dict[str, Any]:
    return {"inputs": prompt(75, seed=1)[None]}


def repetitive() -> dict[str, Any]:
    """A prompt in which the lookup of drafts finds something."""
    ids = prompt(40, seed=2)
    return {"inputs": torch.cat([ids, ids, ids[:7]])[None]}


def ragged() -> dict[str, Any]:
    ids, mask = left_pad([prompt(length, seed=length) for length in (70, 33, 5, 48, 1)])
    return {"inputs": ids, "attention_mask": mask}


def draft_of(seed: int, patch: bool = False) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        draft = tiny_qwen2(seed, num_layers=1 if seed else 3)
        return {"assistant_model": radixkv.patch_model(draft, num_blocks=200, block_size=BLOCK) if patch else draft}

    return make


# Name: the prompts, and the call. Each value that is a function is called anew for every call of generate().
MODES: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "greedy": (single, GREEDY),
    "greedy, ragged": (ragged, GREEDY),
    "sampling": (single, SAMPLING),
    "sampling, ragged": (ragged, SAMPLING),
    "sampling, several sequences": (single, {**SAMPLING, "num_return_sequences": 3}),
    "top-p, min-p and penalties": (ragged, {**SAMPLING, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
    "beams": (single, {**GREEDY, "num_beams": 4}),
    "beams, ragged": (ragged, {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}),
    "beams that end early": (ragged, {**GREEDY, "num_beams": 3, "eos_token_id": list(range(100, 160)), "early_stopping": True}),
    "beam sampling": (ragged, {**SAMPLING, "num_beams": 3}),
    "prompt lookup": (repetitive, {**GREEDY, "prompt_lookup_num_tokens": 5, "eos_token_id": EOS}),
    "prompt lookup, sampling": (repetitive, {**SAMPLING, "prompt_lookup_num_tokens": 5, "eos_token_id": EOS}),
    "a draft that is always right": (single, {**GREEDY, "draft": draft_of(0)}),
    "a draft that is mostly wrong": (single, {**GREEDY, "draft": draft_of(7)}),
    "a patched draft": (single, {**GREEDY, "draft": draft_of(0, patch=True)}),
    "a patched draft, mostly wrong": (single, {**GREEDY, "draft": draft_of(7, patch=True)}),
    "a draft, sampling": (single, {**SAMPLING, "draft": draft_of(7)}),
    "chunked prefill": (single, {**GREEDY, "prefill_chunk_size": 16}),
    "chunked prefill off the blocks": (single, {**GREEDY, "prefill_chunk_size": 7}),
    "chunked prefill by single tokens": (single, {**GREEDY, "prefill_chunk_size": 1}),
    "logits of several tokens": (single, {**GREEDY, "logits_to_keep": 3}),
    "a streamer": (single, {**GREEDY, "streamer": lambda: _Collect()}),
    "stopping criteria": (ragged, {**GREEDY, "stopping_criteria": lambda: StoppingCriteriaList([_StopAt()])}),
    "no end in a criterion": (ragged, {**GREEDY, "stopping_criteria": lambda: StoppingCriteriaList([MaxTimeCriteria(1000.0)])}),
    "max_time": (single, {**GREEDY, "max_time": 1000.0}),
    "end of sequence": (ragged, {**GREEDY, "eos_token_id": list(range(100, 160))}),
    "pads and ends are one token": (ragged, {**GREEDY, "pad_token_id": 150, "eos_token_id": list(range(100, 160))}),
    "processors": (ragged, {**GREEDY, "logits_processor": lambda: LogitsProcessorList([_Ban(), MinLengthLogitsProcessor(5, EOS)])}),
    "guidance": (single, {**GREEDY, "guidance_scale": 1.5}),
    "guidance with a negative prompt": (single, {**GREEDY, "guidance_scale": 1.5, "negative_prompt_ids": lambda: prompt(9, seed=5)[None]}),
    "stop strings": (ragged, {**GREEDY, "stop_strings": ["k", "q3"], "tokenizer": words, "eos_token_id": EOS}),
}  # fmt: skip


class _Collect(TextStreamer):
    """A streamer that keeps what it is given; generate() is to give it the same tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def call(model: Any, mode: str) -> tuple[torch.Tensor, list[int]]:
    """The sequences that generate() gives in a mode, from a fixed seed, and what it streamed."""
    prompts, arguments = MODES[mode]
    given = {name: value() if callable(value) else value for name, value in arguments.items()}
    given |= given.pop("draft", {})
    torch.manual_seed(11)
    inputs = prompts()
    sequences = model.generate(inputs.pop("inputs"), **inputs, **given)
    draft: Any = given.get("assistant_model")
    if hasattr(draft, "radixkv"):
        draft.radixkv.check()
        assert draft.radixkv.stats().stock_calls == 0 < draft.radixkv.stats().requests
    return sequences, getattr(given.get("streamer"), "tokens", [])


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_same_tokens_and_reuses(reference, patched, mode):
    expected, streamed = call(reference, mode)
    assert new_tokens(expected, MODES[mode][0]()["inputs"]).unique().numel() >= 5, "a reference that says one thing proves nothing"
    for is_warm in (False, True):
        before = patched.radixkv.stats()
        got, got_streamed = call(patched, mode)
        assert torch.equal(got, expected)
        assert got_streamed == streamed
        after = patched.radixkv.stats()
        assert after.stock_calls == before.stock_calls
        # Of a chunk of one token nothing can be saved.
        if is_warm and MODES[mode][1].get("prefill_chunk_size") != 1:
            assert after.cached_tokens > before.cached_tokens
        patched.radixkv.check()


@pytest.mark.parametrize("mode", ["greedy", "greedy, ragged", "sampling, several sequences", "beams, ragged", "prompt lookup"])
def test_scores_and_logits_are_the_models_own(reference, patched, mode):
    prompts, arguments = MODES[mode]
    wanted = {**arguments, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}

    def run(model: Any) -> Any:
        torch.manual_seed(3)
        inputs = prompts()
        return model.generate(inputs.pop("inputs"), **inputs, **wanted)

    expected = run(reference)
    for _ in range(2):
        got = run(patched)
        assert torch.equal(got.sequences, expected.sequences)
        for name in ("scores", "logits"):
            for ours, theirs in zip(got[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-4)


def test_beams_share_their_prompt_and_copy_only_where_they_part(patched):
    """8 beams of a 160-token prompt: its 10 blocks once, and for each beam at most the blocks of its own tokens."""
    ids = prompt(160, seed=4)[None]
    most = 0

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal most
            most = max(most, patched.radixkv.stats().blocks_leased)
            return scores

    with counted_tokens(patched) as rows:
        patched.generate(ids, num_beams=8, max_new_tokens=15, do_sample=False, logits_processor=LogitsProcessorList([Watch()]))
    assert rows[0] == 160 + 7, "the prompt once, and of each further beam its last token"
    assert most <= 10 + 8 * 2


def test_a_chunked_prompt_takes_what_is_cached_in_every_chunk(reference, patched):
    ids = prompt(100, seed=5)[None]
    expected = reference.generate(ids, **GREEDY)
    with counted_tokens(patched) as cold:
        assert torch.equal(patched.generate(ids, prefill_chunk_size=30, **GREEDY), expected)
    with counted_tokens(patched) as warm:
        assert torch.equal(patched.generate(ids, prefill_chunk_size=30, **GREEDY), expected)
    num_chunks = len(cold) - 19
    assert sum(cold[:num_chunks]) == 100
    assert warm[:num_chunks] == [1] * num_chunks, "of a cached chunk only the token whose logits are returned"


def test_rejected_drafts_are_not_stored(patched):
    """What was drafted and rejected is in no prefix afterwards, and costs no block."""
    ids = prompt(40, seed=6)[None]
    output = patched.generate(ids, assistant_model=tiny_qwen2(9, num_layers=1), **GREEDY)
    assert patched.radixkv.match_prefix(output[0]).length >= len(output[0]) - 2
    assert patched.radixkv.stats().tree_tokens <= len(output[0])


# What the prefix cache cannot serve runs as it would unpatched.
STOCK: dict[str, dict[str, Any]] = {
    "use_cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "own cache": {"past_key_values": DynamicCache},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "early exit": {"assistant_early_exit": 1},
    "custom": {"custom_generate": lambda: _own_loop},
}


def _own_loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A decoding loop that somebody passes in as custom_generate."""
    for _ in range(4):
        input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], 1)
    return input_ids


@pytest.mark.parametrize("name", STOCK)
def test_the_stock_path_gives_what_unpatched_gives(reference, patched, name):
    """The same result to the bit, or the same error."""
    ids = prompt(30, seed=7)[None]

    def run(model: Any) -> Any:
        given = {key: value() if callable(value) else value for key, value in STOCK[name].items()}
        try:
            return model.generate(ids, **GREEDY, **given)
        except Exception as error:
            return type(error), str(error)

    # An early exit that fails leaves a model with fewer layers behind in some releases.
    expected = run(copy.deepcopy(reference))
    got = run(patched)
    if isinstance(expected, tuple):
        assert got == expected
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    else:
        assert torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.hidden_states[-1], expected.hidden_states[-1], strict=True))
    stats = patched.radixkv.stats()
    assert stats.requests == 0
    if not isinstance(expected, tuple):
        assert stats.stock_calls > 0


def test_a_pipeline_with_a_chat_template(patched):
    """transformers' text-generation pipeline, turn after turn of a conversation, against one of the unpatched model."""
    tokenizer = words()
    tokenizer.chat_template = "{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}assistant"
    chats = [[{"role": "user", "content": "tell" * 20}]]
    chats.append([*chats[0], {"role": "assistant", "content": "once" * 9}, {"role": "user", "content": "more" * 5}])
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    for number, chat in enumerate(chats):
        models = tiny_qwen2(), patched
        expected, got = (pipeline("text-generation", model=model, tokenizer=tokenizer)(chat, **arguments) for model in models)
        assert got == expected
        stats = patched.radixkv.stats()
        assert (stats.requests, stats.stock_calls, stats.cached_tokens > 0) == (number + 1, 0, number > 0)


def test_the_cache_consumes_no_random_numbers(patched):
    """Whatever is drawn after a generate() is what would be drawn after the unpatched one."""
    ids = prompt(30, seed=8)[None]
    states = []
    for model in (tiny_qwen2(), patched, patched):
        torch.manual_seed(5)
        model.generate(ids, **SAMPLING)
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])


class TestKeywords:
    """The keywords that generate() of a patched model has beside transformers' own."""

    def test_namespaces(self, reference, patched):
        ids = prompt(60, seed=9)[None]
        expected = reference.generate(ids, **GREEDY)
        for tenant in (("anna",), ("bert",), ("anna",)):
            before = patched.radixkv.stats().cached_tokens
            assert torch.equal(patched.generate(ids, namespace=tenant, **GREEDY), expected)
            gained = patched.radixkv.stats().cached_tokens - before
        assert gained == 59
        assert patched.radixkv.match_prefix(ids[0], namespace=("bert",)).length == 60
        assert patched.radixkv.match_prefix(ids[0]).length == 0
        with patched.radixkv.match_prefix(ids[0], namespace=("anna",)) as lease:
            with pytest.raises(ValueError, match="namespace"):
                patched.generate(ids, prefix_cache=lease, **GREEDY)
            assert torch.equal(patched.generate(ids, prefix_cache=lease, namespace=("anna",), **GREEDY), expected)

    def test_no_reuse_computes_everything(self, reference, patched):
        ids = prompt(60, seed=10)[None].repeat(2, 1)
        expected = reference.generate(ids, **GREEDY)
        for _ in range(2):
            with counted_tokens(patched) as rows:
                assert torch.equal(patched.generate(ids, reuse=False, **GREEDY), expected)
            assert rows[0] == 120
        with counted_tokens(patched) as rows:
            patched.generate(ids, **GREEDY)
        assert rows[0] == 2, "what was computed without reuse is stored all the same"

    def test_no_storing_leaves_nothing_behind(self, reference, patched):
        """Neither tokens, nor blocks, nor a use of what others have stored."""
        known = prompt(60, seed=11)
        patched.generate(known[None], **GREEDY)
        patched.generate(prompt(60, seed=12)[None], **GREEDY)
        tree = patched.radixkv.tree
        before = [(bytes(node.edge), node.stamp, node.hits) for node in tree.nodes()]
        queue, free = [bytes(node.edge) for node in tree.queue.nodes()], patched.radixkv.pool.num_free
        ids = torch.cat([known, prompt(9, seed=13)])[None]
        with counted_tokens(patched) as rows:
            assert torch.equal(patched.generate(ids, store=False, **GREEDY), reference.generate(ids, **GREEDY))
        assert rows[0] == 9, "it may use what is there"
        patched.radixkv.check()
        after = [(bytes(node.edge), node.stamp, node.hits) for node in tree.nodes()]
        # Holding a prefix may split the edge that it ends in, and nothing else.
        assert b"".join(sorted(edge for edge, _, _ in before)) == b"".join(sorted(edge for edge, _, _ in after)) or len(after) > len(before)
        assert {stamp for _, stamp, _ in after} == {stamp for _, stamp, _ in before}
        assert sum(hits for _, _, hits in after) == sum(hits for _, _, hits in before)
        assert patched.radixkv.pool.num_free == free
        assert [bytes(node.edge) for node in tree.queue.nodes()][-1] == queue[-1], "the order of eviction is as it was"
        assert patched.radixkv.match_prefix(ids[0]).length == 60

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"namespace": "anna"}, "namespace must be a tuple"),
            ({"reuse": 1}, "reuse must be True or False"),
            ({"store": None}, "store must be True or False"),
        ],
    )
    def test_wrong_values(self, patched, wrong, message):
        with pytest.raises(ValueError, match=message):
            patched.generate(prompt(9, seed=1)[None], **wrong, **GREEDY)

    def test_a_chosen_prefix_goes_with_neither(self, patched):
        ids = prompt(40, seed=14)[None]
        patched.generate(ids, **GREEDY)
        with patched.radixkv.match_prefix(ids[0]) as lease:
            for wrong in ({"reuse": False}, {"store": False}):
                with pytest.raises(ValueError, match="leave out reuse= and store="):
                    patched.generate(ids, prefix_cache=lease, **wrong, **GREEDY)


def test_pads_that_stand_in_a_prompt_are_tokens(reference, patched):
    """pad = eos = a token inside the prompt: rows end by the stopping criteria's verdict only."""
    ids = prompt(40, seed=15)
    ids[10] = ids[20] = ids[39] = 150
    batch, mask = left_pad([ids, prompt(12, seed=16)])
    batch[mask == 0] = 150
    arguments = {**GREEDY, "attention_mask": mask, "pad_token_id": 150, "eos_token_id": [150, *range(100, 140)]}
    expected = reference.generate(batch, **arguments)
    assert (new_tokens(expected, batch) == 150).any(), "no row has ended early"
    for _ in range(2):
        assert torch.equal(patched.generate(batch, **arguments), expected)


def test_a_copy_of_the_model_generates_in_every_mode(patched):
    copied = copy.deepcopy(patched)
    ids = prompt(30, seed=17)[None]
    for mode in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3, "eos_token_id": EOS, "pad_token_id": PAD}):
        assert torch.equal(copied.generate(ids, **GREEDY, **mode), patched.generate(ids, **GREEDY, **mode))
    copied.radixkv.check()
