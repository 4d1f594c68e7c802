"""`PagedCache` and `branch`: forks that copy only where they write, cuts, and rows chosen anew."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import radixkv
from tests.models import counted_tokens, prompt, tiny_qwen2
from tests.paged import BLOCK, GREEDY, answer, assert_same, forward


class TestForks:
    @pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
    @pytest.mark.parametrize("length", [BLOCK * 3, BLOCK * 3 + 5])
    def test_a_copy_is_copy_on_write(self, reference: Any, patched: Any, copied: Any, length: int) -> None:
        ids = prompt(length, seed=1)[None]
        cache = patched.radixkv.new_cache()
        forward(patched, ids, cache)
        free = patched.radixkv.pool.num_free
        forks = [cache, *(copied(cache) for _ in range(3))]
        assert patched.radixkv.pool.num_free == free
        tokens = [ids] * 4
        for step in range(20):
            for number, fork in enumerate(forks):
                new = prompt(1 + step % 2, seed=100 * step + number)[None]
                tokens[number] = torch.cat([tokens[number], new], 1)
                logits = forward(patched, new, fork)
                if step in (0, 19):
                    assert_same(logits[0, -1], forward(reference, tokens[number], None)[0, -1])
        patched.radixkv.check()
        own = -(-tokens[0].shape[1] // BLOCK) - length // BLOCK
        assert free - patched.radixkv.pool.num_free <= 4 * own, "the shared blocks are there once"

    def test_a_copy_of_a_stored_one(self, reference: Any, patched: Any) -> None:
        ids, cache = answer(patched, prompt(40, seed=2)[None])
        forked = copy.deepcopy(cache)
        for number, each in enumerate((cache, forked)):
            longer = torch.cat([ids, prompt(5, seed=30 + number)[None]], 1)
            assert torch.equal(patched.generate(longer, past_key_values=each, **GREEDY), reference.generate(longer, **GREEDY))

    def test_branches_share_their_prefix(self, reference: Any, patched: Any) -> None:
        ids = prompt(70, seed=3)[None]
        arguments = {"do_sample": True, "max_new_tokens": 10}
        with counted_tokens(patched) as rows, patched.radixkv.branch(ids[0]) as branch:
            assert_same(branch.logits, forward(reference, ids, None)[:, -1])
            for number, fork in enumerate(branch.fork(4)):
                torch.manual_seed(number)
                got = patched.generate(ids, past_key_values=fork, store=False, **arguments)
                torch.manual_seed(number)
                assert torch.equal(got, reference.generate(ids, **arguments))
            patched.radixkv.check()
        assert rows[0] == 70 and sum(rows[1:]) == 4 * 10, "the prefix once, then of each branch the last token again and its own"
        with pytest.raises(RuntimeError, match="the `with` block of this branch has ended"):
            branch.fork()
        assert patched.radixkv.match_prefix(ids[0]).length == 70
        with counted_tokens(patched) as rows, patched.radixkv.branch(ids) as again:
            del again
        assert rows == [1]

    @pytest.mark.parametrize("length", [BLOCK * 3, BLOCK * 3 + 5])
    def test_a_matched_prefix_is_forked(self, reference: Any, patched: Any, length: int) -> None:
        """Each fork for one generate(), whose output may outlive the scope; K/V of the prefix is there once."""
        prefix = prompt(length, seed=7)
        patched.generate(prefix[None], max_new_tokens=1, do_sample=False)
        ids = torch.cat([prefix, prompt(6, seed=8)])[None]
        outputs = []
        with counted_tokens(patched) as rows, patched.radixkv.match_prefix(prefix) as lease:
            assert lease.length == length
            free = patched.radixkv.pool.num_free
            for number, fork in enumerate(lease.fork(4)):
                torch.manual_seed(number)
                arguments = {"do_sample": True, "max_new_tokens": 10}
                output = patched.generate(ids, prefix_cache=fork, return_dict_in_generate=True, **arguments)
                torch.manual_seed(number)
                assert torch.equal(output.sequences, reference.generate(ids, **arguments))
                outputs.append(output)
            own = -(-(length + 6 + 9) // BLOCK) - length // BLOCK
            assert free - patched.radixkv.pool.num_free == 4 * own
            patched.radixkv.check()
        assert sum(rows) == 4 * (6 + 9)
        assert patched.radixkv.stats().blocks_leased > 0, "outputs hold what they were computed from"
        for output in outputs:
            patched.radixkv.insert(output)

    def test_branches_are_closed_with_their_scope(self, patched: Any) -> None:
        with pytest.raises(KeyboardInterrupt), patched.radixkv.branch(prompt(30, seed=4)) as branch:
            forks = branch.fork(2)
            for fork in forks:
                forward(patched, prompt(3, seed=5)[None], fork)
            raise KeyboardInterrupt
        assert not any(fork.is_open for fork in forks)
        assert patched.radixkv.stats().blocks_leased == 0

    @pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "3"])
    def test_wrong_numbers_of_forks(self, patched: Any, wrong: Any) -> None:
        with patched.radixkv.branch(prompt(9, seed=6)) as branch, pytest.raises(ValueError, match="num_forks must be an int"):
            branch.fork(wrong)

    def test_wrong_prefixes(self, patched: Any) -> None:
        for wrong, message in (([], "holds no token"), ([-1], "token"), ([0.5], "token"), (torch.ones(2, 3), "must be one prefix")):
            with pytest.raises(ValueError, match=message):
                patched.radixkv.branch(wrong)
        with pytest.raises(ValueError, match="namespace must be a tuple"):
            patched.radixkv.branch([1], namespace="x")


class TestMembers:
    def test_crop_as_the_installed_release_counts(self, reference: Any, patched: Any) -> None:
        ids = prompt(40, seed=1)[None]
        for amount in (-1, -7, -17, -40):
            ours, theirs = patched.radixkv.new_cache(), DynamicCache()
            forward(patched, ids, ours)
            forward(reference, ids, theirs)
            ours.crop(amount)
            theirs.crop(amount)
            assert ours.get_seq_length() == theirs.get_seq_length() == 40 + amount
            more = prompt(6, seed=2)[None]
            expected = forward(reference, torch.cat([ids[:, : 40 + amount], more], 1), None)[:, -6:]
            assert_same(forward(patched, more, ours), expected)
            patched.radixkv.check()

    def test_crop_of_a_stored_one(self, reference: Any, patched: Any) -> None:
        ids, cache = answer(patched, prompt(40, seed=3)[None])
        cache.crop(-20)
        more = prompt(6, seed=4)[None]
        expected = forward(reference, torch.cat([ids[:, :31], more], 1), None)[:, -6:]
        assert_same(forward(patched, more, cache), expected)

    def test_rows_in_another_order(self, reference: Any, patched: Any) -> None:
        ids = torch.stack([prompt(20, seed=seed) for seed in (5, 6, 7)])
        for closes in (False, True):
            cache = patched.radixkv.new_cache()
            forward(patched, ids, cache)
            if closes:
                cache.store()
            cache.reorder_cache(torch.tensor([2, 0, 2]))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3, 4, 5]))
            assert cache.num_rows == cache.batch_size == 4
            more = torch.stack([prompt(2, seed=seed) for seed in range(4)])
            expected = forward(reference, torch.cat([ids[[2, 0, 2, 2]], more], 1), None)[:, -2:]
            assert_same(forward(patched, more, cache), expected)
            cache.reset()
            assert cache.get_seq_length() == 0 and cache.num_rows == 0
            patched.radixkv.check()

    @pytest.mark.parametrize("closes", [False, True])
    @pytest.mark.parametrize("chosen", [[1, -1], [-1], [-2, -2, 1], [True, False], [True, True]], ids=str)
    def test_rows_are_chosen_as_a_tensor_would(self, reference: Any, patched: Any, closes: bool, chosen: list[Any]) -> None:
        """By numbers that count from the end, or by a mask; the same row twice was one row of the batch standing in it twice."""
        ids = torch.stack([prompt(20, seed=8), prompt(20, seed=9)])
        cache = patched.radixkv.new_cache()
        forward(patched, ids, cache)
        if closes:
            cache.store()
        cache.batch_select_indices(torch.tensor(chosen))
        rows = ids[torch.tensor(chosen)]
        for seed in range(3):
            more = torch.stack([prompt(1, seed=20 * seed + row) for row in range(len(rows))])
            rows = torch.cat([rows, more], 1)
            assert_same(forward(patched, more, cache)[:, -1], forward(reference, rows, None)[:, -1])
            patched.radixkv.check()
        cache.store()
        patched.radixkv.check()

    @pytest.mark.parametrize("wrong", [[2], [-3], 0, [[0, 1]], [0.0], [True], []], ids=str)
    def test_wrong_rows(self, patched: Any, wrong: Any) -> None:
        cache = patched.radixkv.new_cache()
        forward(patched, torch.stack([prompt(20, seed=8), prompt(20, seed=9)]), cache)
        with pytest.raises(ValueError, match="rows must be numbers below 2"):
            cache.reorder_cache(torch.tensor(wrong))
        for repeats in (0, -1, 1.5):
            with pytest.raises(ValueError, match="repeats must be an int of at least 1"):
                cache.batch_repeat_interleave(repeats)
        with pytest.raises(TypeError):
            cache.crop("a")
        patched.radixkv.check()
        assert cache.num_rows == 2

    def test_what_it_cannot_do(self, patched: Any) -> None:
        cache = patched.radixkv.new_cache()
        with pytest.raises(TypeError, match="a PagedCache cannot be pickled"):
            pickle.dumps(cache)
        with pytest.raises(RuntimeError, match="a model that is not, or not any more, the patched one"):
            tiny_qwen2()(prompt(5, seed=1)[None], past_key_values=cache)
        other = radixkv.patch_model(tiny_qwen2(), num_blocks=20, block_size=BLOCK)
        for call in (other, other.generate):
            with pytest.raises(ValueError, match="the PagedCache is of another model"):
                call(prompt(5, seed=1)[None], past_key_values=cache)
