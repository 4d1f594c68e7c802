"""What must be set before a test module imports triton or transformers, what `make fuzz` may ask for, and small trees."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

# Triton reads this once, when it is imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# No test may wait for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests that run beside others have one core each.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-operations", type=int, default=400, help="random operations in each setting of the tree's long run")
    parser.addoption("--soak-calls", type=int, default=120, help="calls of generate() in a loop")


@pytest.fixture
def num_fuzz_operations(request: pytest.FixtureRequest) -> int:
    """Few in an ordinary run; `make fuzz` asks for more."""
    return request.config.getoption("--fuzz-operations")


@pytest.fixture(scope="module")
def reference():
    """The unpatched model that `patched` is to agree with."""
    from tests.models import tiny_qwen2

    return tiny_qwen2()


@pytest.fixture
def patched():
    """A patched model with blocks of 16 tokens; whatever the test did with it, all is conserved and nothing held in the end."""
    import radixkv
    from tests.models import tiny_qwen2

    model = radixkv.patch_model(tiny_qwen2(), num_blocks=400, block_size=16)
    yield model
    gc.collect()
    model.radixkv.check()
    assert model.radixkv.stats().blocks_leased == 0


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's real model and its tokenizer, saved once for all processes of a test run.

    From here they are loaded in a second, where the package's own file takes twenty.
    """
    from filelock import FileLock

    from radixkv.demo.models import load_model

    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name("smollm2-unfinished")
            for part in load_model():
                part.save_pretrained(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path):
    """The demo's real model, unpatched and in float32, and its tokenizer."""
    from radixkv.demo.models import load_checkpoint

    return load_checkpoint(str(smollm2_folder), torch.float32, torch.device("cpu"))


@pytest.fixture
def ids():
    """Fresh block ids."""
    from tests.small_tree import Ids

    return Ids()


@pytest.fixture
def tree():
    """An empty tree; what the test leaves of it must be whole."""
    from radixkv.tree import RadixTree
    from tests.small_tree import BLOCK

    tree = RadixTree(BLOCK)
    yield tree
    tree.check()


@pytest.fixture
def num_soak_calls(request: pytest.FixtureRequest) -> int:
    """Few in an ordinary run; `make soak` asks for more."""
    return request.config.getoption("--soak-calls")


@pytest.fixture
def any_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks for a peft that no index has yet; what it uses of it here, the present one has."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.0.0")
