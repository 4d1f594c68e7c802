"""The log: one logger, silent unless it is asked for, and never a slow path that it does not name."""

from __future__ import annotations

import ast
import copy
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import radixkv
from radixkv.errors import OutOfBlocks
from radixkv.integration import model_weights
from radixkv.integration.graphs import can_capture, why_not_captured
from tests.models import tiny_qwen2
from tests.small_cache import keep, small_cache

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted(path for folder in ("kernels", "integration", "radixkv") for path in ROOT.glob(f"{folder}/*.py"))
IDS = torch.arange(20)[None] + 3


def messages(caplog, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "radixkv" and record.levelno == level]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_library_logs_under_one_name_and_prints_nothing(path):
    prints = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
            assert [argument.value for argument in node.args if isinstance(argument, ast.Constant)] == ["radixkv"]
        prints += isinstance(node.func, ast.Name) and node.func.id == "print"
    # The command line's one line of an error, and TreeView.print().
    assert prints == {"__main__.py": 1, "tree_view.py": 1}.get(path.name, 0)


def test_silent_unless_logging_is_set_up():
    code = "import logging, radixkv; logging.getLogger('radixkv').error('something')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_patching_says_what_was_chosen_and_why(caplog):
    with caplog.at_level(logging.INFO, "radixkv"):
        radixkv.patch_model(tiny_qwen2(), num_blocks=8, block_size=16, backend="torch")
        radixkv.patch_model(tiny_qwen2())
    asked, chosen = messages(caplog, logging.INFO)
    assert asked.startswith("patched Qwen2ForCausalLM: backend torch (as asked); 8 blocks of 16 tokens, ")
    assert "GiB (as asked)" in asked and "decode steps not captured (the backend is torch)" in asked
    assert "backend torch (auto: the model lies on cpu" in chosen
    assert "GiB (25% of the memory that is available, at most 65,536 tokens)" in chosen


def test_a_slow_path_is_named_once_at_info_and_then_at_debug(patched, caplog):
    with caplog.at_level(logging.DEBUG, "radixkv"):
        for _ in range(2):
            patched.generate(IDS, max_new_tokens=1, use_cache=False)
            patched(IDS)
    told = [
        "a call takes the model's own path: use_cache=False",
        "a call takes the model's own path: the model was called without a cache that model.radixkv.new_cache() made",
    ]
    for level in (logging.INFO, logging.DEBUG):
        assert [message for message in messages(caplog, level) if "own path" in message] == told
    assert patched.radixkv.stats().stock_calls == 4


def test_the_first_eviction_and_an_exhausted_pool(caplog):
    cache = small_cache(4)
    with caplog.at_level(logging.INFO, "radixkv"):
        for first in range(0, 500, 100):
            keep(cache, range(first, first + 32))
        with pytest.raises(OutOfBlocks) as raised:
            keep(cache, range(100))
    full, *_, exhausted = messages(caplog, logging.INFO)
    assert full == "the pool of 4 blocks is full: from now on cached prefixes are evicted, policy lru"
    assert exhausted == f"the pool cannot give what is asked for: {raised.value}"


def test_a_model_that_is_cast_is_told(patched, caplog):
    with caplog.at_level(logging.INFO, "radixkv"):
        patched.to(torch.bfloat16).generate(IDS, max_new_tokens=1)
    assert messages(caplog, logging.INFO)[0] == "the model was moved or cast to torch.bfloat16 on cpu: its cache starts over, empty"


def test_why_steps_are_not_captured(caplog):
    assert why_not_captured("triton", torch.device("cuda")) is None or torch.version.hip
    assert why_not_captured("torch", torch.device("cuda")) == "the backend is torch"
    assert "CUDA device" in str(why_not_captured("triton", torch.device("cpu")))
    model = tiny_qwen2()
    assert can_capture(model, {"use_cache": True})
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.DEBUG, "radixkv"):
        assert not can_capture(model, {"use_cache": True})
        assert not can_capture(model, {"token_type_ids": IDS})
    first, second = messages(caplog, logging.DEBUG)
    assert first.endswith("module model.layers.0 has hooks or a forward of its own")
    assert second.endswith("tensors are passed to the model beside the tokens")


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside the block a handler of the log raises, as those do that do not catch their own errors."""

    class FullDisk(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left")

    logger, handler = logging.getLogger("radixkv"), FullDisk()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_handler_that_raises_makes_no_one_forget_that_the_weights_changed(patched, reference):
    """The change was noted, logged and only then acted upon: with the log's disk full every later answer was of the old weights."""
    other = copy.deepcopy(reference)
    patched.generate(IDS, max_new_tokens=8)
    with torch.no_grad():
        for model in (patched, other):
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1.5)
    with full_disk(), pytest.raises(OSError, match="no space left"):
        patched.generate(IDS, max_new_tokens=8)
    assert patched.generate(IDS, max_new_tokens=8).tolist() == other.generate(IDS, max_new_tokens=8).tolist()


def test_an_interrupt_while_a_change_is_looked_at_makes_no_one_forget_it(patched, reference, monkeypatch):
    """Ctrl-C in the middle of the look left a change noted that nothing had been done about."""
    other = copy.deepcopy(reference)
    patched.generate(IDS, max_new_tokens=8)
    with torch.no_grad():
        for model in (patched, other):
            model.model.layers[0].self_attn.v_proj.weight.mul_(-1.5)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model_weights, "Selection", interrupt)
        with pytest.raises(KeyboardInterrupt):
            patched.generate(IDS, max_new_tokens=8)
    assert patched.generate(IDS, max_new_tokens=8).tolist() == other.generate(IDS, max_new_tokens=8).tolist()


def test_a_handler_that_raises_loses_no_evicted_block():
    """Blocks that the tree had given up never came back to the pool."""
    cache = small_cache(4)
    with full_disk():
        for first in range(0, 500, 100):
            with suppress(OSError):
                keep(cache, range(first, first + 32))
    cache.check()
    keep(cache, range(64))
