"""One patched model, many threads: every call returns the tokens that it returns alone, and nothing is lost or held for good."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import radixkv
from radixkv.events import CacheEvent
from tests.models import left_pad, new_tokens, prompt, tiny_qwen2
from tests.small_cache import keep, small_cache
from tests.test_events import Mirror

NUM_THREADS, NEW = 8, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(autouse=True)
def hasty_threads():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


class Boom(Exception):
    pass


class RaiseAt(LogitsProcessor):
    """Fails in the middle of a generation."""

    def __init__(self, step: int) -> None:
        self.steps_left = step

    def __call__(self, input_ids, scores):
        if not self.steps_left:
            raise Boom
        self.steps_left -= 1
        return scores


def prompts_of_documents(lengths: list[int], num_questions: int) -> list[torch.Tensor]:
    """Questions of 1 to 20 tokens behind each of some documents."""
    found = []
    for document, length in enumerate(lengths):
        stem = prompt(length, seed=100 + document)
        found += [torch.cat([stem, prompt(1 + (7 * q) % 20, seed=200 + 10 * document + q)]) for q in range(num_questions)]
    return found


def run_together(work: Callable[[int], None], num_threads: int = NUM_THREADS) -> None:
    """Runs work(0), work(1), ... at once; raises what one of them raises."""
    start = threading.Barrier(num_threads)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(num_threads) as pool:
        for done in [pool.submit(begin, number) for number in range(num_threads)]:
            done.result()


@pytest.mark.parametrize("eviction", ["lru", "slru", "cost"])
def test_right_tokens_under_load(eviction):
    """Batches and single prompts of mixed lengths, documents in common, a pool that evicts all the time, failures, and onlookers."""
    reference = tiny_qwen2(num_layers=2)
    prompts = prompts_of_documents([70, 33, 48, 16, 5], num_questions=6)
    alone = [new_tokens(reference.generate(row[None], **GREEDY), row[None])[0] for row in prompts]
    # Everything that is cached would take more than 50 blocks, and what 8 threads run up to 96; who finds none is told.
    model = radixkv.patch_model(tiny_qwen2(num_layers=2), num_blocks=36, block_size=16, eviction=eviction)
    handle = model.radixkv
    mirror = Mirror()
    misheard: list[BaseException] = []

    def listen(event: CacheEvent) -> None:
        try:
            mirror(event)
        except BaseException as error:
            misheard.append(error)

    handle.on_event(listen)
    failures, refused = [], []

    def work(number: int) -> None:
        rng = random.Random(number)
        for turn in range(6):
            chosen = rng.sample(range(len(prompts)), rng.choice([1, 1, 2]))
            ids, mask = left_pad([prompts[i] for i in chosen])
            try:
                if rng.random() < 0.25:
                    with pytest.raises(Boom):
                        broken = LogitsProcessorList([RaiseAt(rng.randrange(4))])
                        model.generate(ids, attention_mask=mask, **GREEDY, logits_processor=broken)
                    failures.append(number)
                    continue
                output = model.generate(ids, attention_mask=mask, **GREEDY)
            except radixkv.OutOfBlocks as error:
                refused.append(error)
                continue
            assert torch.equal(new_tokens(output, ids), torch.stack([alone[i] for i in chosen])), f"thread {number}, turn {turn}"
            look = rng.randrange(5)
            if look == 0:
                stats = handle.stats()
                assert stats.blocks_free + stats.blocks_cached + stats.blocks_leased == handle.pool.num_blocks
            elif look == 1:
                assert "tokens" in str(handle.explain(prompts[chosen[0]]))
            elif look == 2:
                assert "namespace" in str(handle.tree()) and handle.metrics()["radixkv_requests_total"]
            elif look == 3:
                handle.check()
            else:
                with handle.match_prefix(prompts[chosen[0]]) as lease:
                    assert len(lease.blocks) == -(-lease.length // 16)

    run_together(work)
    handle.check()
    stats = handle.stats()
    assert stats.blocks_leased == 0 and failures and not misheard
    assert stats.cached_tokens > 0 and stats.evicted_blocks > 0 and len(refused) < 6 * NUM_THREADS // 2
    mirror.assert_mirrors(handle)
    for row, expected in zip(prompts[:3], alone, strict=False):
        assert torch.equal(new_tokens(model.generate(row[None], **GREEDY), row[None])[0], expected)


def test_the_pool_evicts_under_load():
    """The pool holds the running rows and little else; who finds no block is told, and the others go on with right tokens."""
    reference = tiny_qwen2(num_layers=1)
    prompts = [torch.cat([prompt(30, seed=1), prompt(1 + 5 * i, seed=10 + i)]) for i in range(16)]
    alone = [new_tokens(reference.generate(row[None], **GREEDY), row[None])[0] for row in prompts]
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=26, block_size=16)
    refused = []

    def work(number: int) -> None:
        for turn in range(8):
            i = (5 * number + 3 * turn) % len(prompts)
            try:
                output = model.generate(prompts[i][None], **GREEDY)
            except radixkv.OutOfBlocks as error:
                refused.append(str(error))
                continue
            assert torch.equal(new_tokens(output, prompts[i][None])[0], alone[i])

    run_together(work)
    model.radixkv.check()
    stats = model.radixkv.stats()
    assert stats.evicted_blocks > 20 and stats.blocks_leased == 0
    assert len(refused) < 32 and all("blocks of 16 tokens" in message for message in refused)


def test_the_stock_path_beside_the_cache():
    """Calls without a cache read the configuration that packed forwards switch, at the same time."""
    reference = tiny_qwen2(num_layers=2)
    rows = [prompt(20 + i, seed=i) for i in range(NUM_THREADS)]
    alone = [reference.generate(row[None], **GREEDY) for row in rows]
    logits = [reference(row[None]).logits for row in rows]
    model = radixkv.patch_model(tiny_qwen2(num_layers=2), num_blocks=80, block_size=16)

    def work(number: int) -> None:
        row = rows[number][None]
        for turn in range(4):
            if (number + turn) % 3 == 0:
                assert torch.equal(model(row).logits, logits[number])
            else:
                assert torch.equal(model.generate(row, **GREEDY, use_cache=(number + turn) % 3 == 1), alone[number])

    run_together(work)
    model.radixkv.check()
    assert model.config._attn_implementation == reference.config._attn_implementation


def test_two_models_in_two_threads():
    """Each has its own lock; what transformers shares between them stays right."""
    references = [tiny_qwen2(seed=seed, num_layers=2) for seed in (0, 1)]
    models = [radixkv.patch_model(tiny_qwen2(seed=seed, num_layers=2), num_blocks=40, block_size=16) for seed in (0, 1)]
    models[1].config = models[0].config
    ids = prompt(40, seed=3)[None]
    expected = [reference.generate(ids, **GREEDY) for reference in references]

    def work(number: int) -> None:
        for _ in range(4):
            assert torch.equal(models[number % 2].generate(ids, **GREEDY), expected[number % 2])

    run_together(work, num_threads=4)
    for model in models:
        model.radixkv.check()


def test_changed_weights_while_others_generate():
    """Whoever calls generate() after the change gets the new weights' tokens, and what the old ones computed is not served."""
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=80, block_size=16)
    rows = [torch.cat([prompt(30, seed=9), prompt(3, seed=i)]) for i in range(NUM_THREADS)]

    def change() -> None:
        torch.nn.init.normal_(model.lm_head.weight, std=0.1)

    changed = threading.Barrier(NUM_THREADS, action=change)
    reference = tiny_qwen2(num_layers=1)
    outputs: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        model.generate(rows[number][None], **GREEDY)
        changed.wait()
        outputs[number] = model.generate(rows[number][None], **GREEDY)

    run_together(work)
    reference.load_state_dict(model.state_dict())
    for number, output in outputs.items():
        assert torch.equal(output, reference.generate(rows[number][None], **GREEDY))
    assert all(root[0] == model.radixkv.full_namespace()[0] for root in map(_namespace, model.radixkv.tree.roots()))
    model.radixkv.check()


def _namespace(root_key: tuple) -> tuple:
    from radixkv.token_key import namespace_of

    return namespace_of(root_key)


def test_a_lease_may_be_released_by_any_thread():
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=20, block_size=16)
    ids = prompt(40, seed=1)
    model.generate(ids[None], **GREEDY)
    leases = [model.radixkv.match_prefix(ids[: 5 + 4 * i]) for i in range(NUM_THREADS)]

    def work(number: int) -> None:
        leases[number].release()
        model.radixkv.check()

    run_together(work)
    assert model.radixkv.stats().blocks_leased == 0


@pytest.mark.parametrize("read", [lambda lease: lease.blocks, lambda lease: lease.clone()], ids=["blocks", "clone"])
def test_a_lease_is_read_when_no_other_thread_changes_the_tree(read):
    """A lease's blocks were once gathered without the lock, while another thread might cut the edge in two and some were missing."""
    cache = small_cache()
    keep(cache, range(40))
    lease = cache.match_prefix(range(40))
    with ThreadPoolExecutor(1) as pool:
        with cache.lock:
            waiting = pool.submit(read, lease)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            cache.match_prefix(range(16)).release()  # cuts the edge
        found = waiting.result(timeout=20)
    assert found == lease.blocks if isinstance(found, list) else found.length == 40
    del found, waiting
    lease.release()
    cache.check()


def test_the_lock_is_let_go_between_steps():
    """A long answer does not keep others out: between two of its steps a whole generate() of another thread goes through."""
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=20, block_size=16)
    other = prompt(9, seed=2)[None]
    lengths: list[int] = []

    class Meanwhile(LogitsProcessor):
        def __call__(self, input_ids, scores):
            with ThreadPoolExecutor(1) as pool:
                lengths.append(pool.submit(model.generate, other, **GREEDY).result(timeout=60).shape[1])
            return scores

    model.generate(prompt(20, seed=1)[None], max_new_tokens=3, do_sample=False, logits_processor=LogitsProcessorList([Meanwhile()]))
    assert lengths == [9 + NEW] * 3
    model.radixkv.check()


def test_right_tokens_in_triton():
    reference = tiny_qwen2(num_layers=1)
    rows = [torch.cat([prompt(18, seed=1), prompt(1 + i, seed=2 + i)]) for i in range(3)]
    call = {"max_new_tokens": 3, "do_sample": False}
    alone = [reference.generate(row[None], **call) for row in rows]
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=9, block_size=16, backend="triton")

    def work(number: int) -> None:
        for turn in range(2):
            i = (number + turn) % 3
            assert torch.equal(model.generate(rows[i][None], **call), alone[i])

    run_together(work, num_threads=3)
    model.radixkv.check()
    assert model.radixkv.stats().blocks_leased == 0 and model.radixkv.stats().cached_tokens
