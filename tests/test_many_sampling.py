"""generate_many with drawn tokens, penalties and stop strings: transformers' own processors, and nobody's luck but a prompt's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast

import radixkv
from radixkv.integration.sampling import Sampler, read_settings
from tests.many import LENGTH, answer_tokens, make_patched, questions
from tests.models import VOCAB_SIZE, assert_varied, new_tokens, prompt

DRAWN = GenerationConfig(do_sample=True, temperature=0.9, top_k=40, top_p=0.95, min_p=0.001, repetition_penalty=1.2, max_new_tokens=LENGTH)
ROWS = [prompt(24, seed=1), *questions(3, 40, 4), prompt(9, seed=2), prompt(24, seed=1)]


def own_processors(model: Any, config: GenerationConfig, row: torch.Tensor) -> LogitsProcessorList:
    """What generate() of the installed transformers makes of a config."""
    merged, _ = model._prepare_generation_config(config)
    model._prepare_special_tokens(merged, False, device="cpu")
    return model._get_logits_processor(
        generation_config=merged, input_ids_seq_length=len(row), encoder_input_ids=row[None], logits_processor=LogitsProcessorList()
    )


def draw_alone(model: Any, row: torch.Tensor, config: GenerationConfig, seed: int, number: int) -> list[int]:
    """The tokens of one prompt by the plainest loop: the whole prompt again for each, transformers' processors, one number a token."""
    processors = own_processors(model, config, row)
    state = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    ids = row[None]
    for _ in range(LENGTH):
        with torch.no_grad():
            scores = processors(ids, model(ids, use_cache=False).logits[:, -1].float())
        below = torch.softmax(scores, -1).double().cumsum(-1)[0]
        draw = torch.rand((), dtype=torch.float64, generator=generator) * below[-1]
        ids = torch.cat([ids, (below <= draw).sum().view(1, 1)], 1)
    return ids[0, len(row) :].tolist()


def test_drawn_tokens_are_those_of_a_plain_loop(reference):
    model = make_patched(100)
    expected = [draw_alone(reference, row, DRAWN, 7, number) for number, row in enumerate(ROWS)]
    assert_varied(torch.tensor(expected))
    assert expected[0] != expected[-1], "the same prompt under another number draws other tokens"
    assert answer_tokens(model.radixkv.generate_many(ROWS, generation_config=DRAWN, seed=7)) == expected
    assert answer_tokens(model.radixkv.generate_many(ROWS, generation_config=DRAWN, seed=8)) != expected


@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [(100, {"order": "given"}), (100, {"max_batch_tokens": 2}), (6, {}), (5, {"order": "given"}), (100, {"max_batch_tokens": 50})],
    ids=["given order", "two rows at a time", "preempted", "preempted in given order", "small steps"],
)
def test_drawn_tokens_do_not_depend_on_order_batch_mates_or_preemption(num_blocks, options):
    roomy, model = make_patched(100), make_patched(num_blocks)
    expected = answer_tokens(roomy.radixkv.generate_many(ROWS, generation_config=DRAWN, seed=3))
    assert answer_tokens(model.radixkv.generate_many(ROWS, generation_config=DRAWN, seed=3, **options)) == expected
    model.radixkv.check()


def test_the_seed_comes_from_torch_if_none_is_given():
    model = make_patched(100)
    got = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        got.append(answer_tokens(model.radixkv.generate_many(ROWS[:2], generation_config=DRAWN)))
    assert got[0] == got[1] != got[2]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_of_greedy_tokens(reference, penalty):
    model = make_patched(100)
    config = GenerationConfig(repetition_penalty=penalty, max_new_tokens=LENGTH)
    expected = [new_tokens(reference.generate(row[None], generation_config=config), row[None])[0].tolist() for row in ROWS]
    free = answer_tokens(model.radixkv.generate_many(ROWS, LENGTH))
    assert expected != free
    assert answer_tokens(model.radixkv.generate_many(ROWS, generation_config=config)) == expected


def test_what_the_call_leaves_out_is_the_models_own(reference):
    model = make_patched(100)
    model.generation_config.repetition_penalty = reference.generation_config.repetition_penalty = 1.3
    try:
        expected = [new_tokens(reference.generate(row[None], max_new_tokens=LENGTH), row[None])[0].tolist() for row in ROWS[:3]]
    finally:
        reference.generation_config.repetition_penalty = 1.0
    assert answer_tokens(model.radixkv.generate_many(ROWS[:3], LENGTH)) == expected


def test_a_rows_tokens_are_drawn_as_often_as_they_are_likely(reference):
    """4,000 draws from four tokens lie within five standard deviations of their shares."""
    settings = read_settings(reference, GenerationConfig(do_sample=True, top_k=0, max_new_tokens=1), None)
    sampler = Sampler(settings, 0, torch.device("cpu"))
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    numbers = list(range(4000))
    for number in numbers:
        sampler.open(number, np.array([1], dtype=np.int32))
    drawn = torch.tensor(sampler.next_tokens(numbers, shares.log().expand(4000, 4)))
    for token, share in enumerate(shares.tolist()):
        assert abs((drawn == token).sum().item() - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5


def test_an_impossible_token_is_never_drawn(reference):
    settings = read_settings(reference, GenerationConfig(do_sample=True, top_k=0, max_new_tokens=1), None)
    sampler = Sampler(settings, 0, torch.device("cpu"))
    scores = torch.full((64, 50), float("-inf"))
    scores[:, 17] = 0.0
    for number in range(64):
        sampler.open(number, np.array([1], dtype=np.int32))
    assert sampler.next_tokens(range(64), scores) == [17] * 64


UNSUPPORTED = {
    "num_beams": 3, "num_return_sequences": 2, "typical_p": 0.5, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3, "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]], "min_new_tokens": 3, "min_length": 9, "suppress_tokens": [5], "begin_suppress_tokens": [5],
    "forced_bos_token_id": 5, "forced_eos_token_id": 5, "sequence_bias": [[[5], 1.0]], "guidance_scale": 1.5, "renormalize_logits": True,
    "remove_invalid_values": True, "exponential_decay_length_penalty": (3, 1.1), "encoder_repetition_penalty": 1.2, "max_time": 5.0,
    "penalty_alpha": 0.5, "prompt_lookup_num_tokens": 3, "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
    "use_cache": False, "cache_implementation": "static", "token_healing": True, "length_penalty": 2.0, "an_invention": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_every_other_setting_is_refused_by_name(reference, name):
    config = GenerationConfig(max_new_tokens=5)
    setattr(config, name, UNSUPPORTED[name])
    with pytest.raises(ValueError, match=f"generate_many: {name}="):
        read_settings(reference, config, None)


def test_defaults_and_what_is_switched_off_are_not_refused(reference):
    config = GenerationConfig(
        max_new_tokens=5, num_beams=1, output_scores=False, renormalize_logits=False, use_cache=True, pad_token_id=3, bos_token_id=4
    )
    assert read_settings(reference, config, None).max_new_tokens == 5
    assert read_settings(reference, config, 9).max_new_tokens == 9


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token, over the model's whole vocabulary; transformers wants a to f to be among the letters."""
    letters = {"abcdef"[i] if i < 6 else chr(0x4E00 + i): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_strings_stop_strings_and_texts(reference):
    """A stop string of two tokens, one that ends where the answer begins, and one that never comes."""
    tokenizer, model = letter_tokenizer(), make_patched(100)
    rows = ROWS[:4]
    free = [new_tokens(reference.generate(row[None], max_new_tokens=LENGTH, do_sample=False), row[None])[0] for row in rows]
    stops = [tokenizer.decode(free[0][4:6]), tokenizer.decode([int(rows[1][-1]), int(free[1][0])]), "bbb"]
    config = GenerationConfig(stop_strings=stops, max_new_tokens=LENGTH)
    expected = [
        new_tokens(reference.generate(row[None], generation_config=config, tokenizer=tokenizer), row[None])[0].tolist() for row in rows
    ]
    assert [len(tokens) for tokens in expected[:3]] == [6, 1, LENGTH]
    got = model.radixkv.generate_many([tokenizer.decode(row) for row in rows], generation_config=config, tokenizer=tokenizer)
    assert answer_tokens(got) == expected
    assert [answer.finish_reason for answer in got[:3]] == ["stop", "stop", "length"]
    assert [answer.text for answer in got] == [tokenizer.decode(tokens) for tokens in expected]
    model.radixkv.tokenizer = tokenizer  # attached
    (short,) = model.radixkv.generate_many(["f"], generation_config=config)
    assert short.prompt_tokens == 1 and len(short.text or "") == len(short.tokens)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["text"], {}, "need tokenizer="),
        ("text", {}, "must be a list of"),
        ([1, 2, 3], {}, "wrap them in a list"),
        (torch.tensor([1, 2, 3]), {}, "wrap them in a list"),  # was an error for each token
        (np.array([1, 2, 3]), {}, "wrap them in a list"),
        (np.array(7), {}, "must be a list of"),
        (7, {}, "must be a list of"),
        ([[1]], {"max_new_tokens": None}, "max_new_tokens must be an int"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be an int"),
        ([[1]], {"max_batch_tokens": 0}, "max_batch_tokens must be an int"),
        ([[1]], {"order": "random"}, "order must be one of"),
        ([[1]], {"seed": -1}, "seed must be an int"),
        ([[1]], {"namespace": ["a"]}, "namespace must be a tuple"),
        ([[1]], {"generation_config": {"do_sample": True}}, "must be a GenerationConfig"),
        ([[1]], {"generation_config": GenerationConfig(stop_strings=["a"])}, "stop_strings need the tokenizer"),
    ],
)
def test_mistakes_of_the_caller_are_refused_at_once(prompts, options, message):
    model = make_patched(10)
    with pytest.raises(ValueError, match=message):
        model.radixkv.generate_many(prompts, **{"max_new_tokens": 3, **options})
    model.radixkv.check()


def test_a_model_that_is_training_or_not_patched_any_more_is_refused():
    model = make_patched(10).train()
    with pytest.raises(ValueError, match="training mode"):
        model.radixkv.generate_many([[1]], 3)
    handle = model.eval().radixkv
    radixkv.unpatch_model(model)
    with pytest.raises(ValueError, match="not patched any more"):
        handle.generate_many([[1]], 3)
