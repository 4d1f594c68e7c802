"""`PagedCache`: a loop of one's own, the next turn of a conversation, forks, cuts, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import radixkv
from radixkv.integration.paged_cache import PagedCache
from radixkv.integration.versions import held_cache
from tests.models import counted_tokens, left_pad, prompt, tiny_qwen2

BLOCK = 16
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny_qwen2()


@pytest.fixture
def patched() -> Any:
    model = radixkv.patch_model(tiny_qwen2(), num_blocks=200, block_size=BLOCK)
    yield model
    gc.collect()
    model.radixkv.check()
    assert model.radixkv.stats().blocks_leased == 0


def forward(model: Any, ids: torch.Tensor, cache: Any, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, **arguments).logits


def answer(model: Any, ids: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, PagedCache]:
    """The sequences of a generate() and the cache that it returns."""
    output = model.generate(ids, return_dict_in_generate=True, **{**GREEDY, **arguments})
    return output.sequences, held_cache(output)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


class TestOwnLoop:
    def test_step_by_step_like_a_dynamic_cache(self, reference: Any, patched: Any) -> None:
        """A prompt, single tokens, several at once: the logits of every token, and the true length."""
        ours, theirs = patched.radixkv.new_cache(), DynamicCache()
        position = 0
        for number, length in enumerate([37, 1, 1, 5, 1, 16, 1, 40, 1]):
            ids = prompt(length, seed=number)[None]
            assert_same(forward(patched, ids, ours), forward(reference, ids, theirs))
            position += length
            assert ours.get_seq_length() == theirs.get_seq_length() == position
            patched.radixkv.check()
        assert patched.radixkv.stats().stock_calls == 0

    def test_ragged_rows(self, reference: Any, patched: Any) -> None:
        """A left-padded batch, a chunk in which one row has pads, and single tokens of some rows only."""
        ids, mask = left_pad([prompt(40, seed=1), prompt(7, seed=2), prompt(23, seed=3)])
        ours = patched.radixkv.new_cache()
        rows = [ids[row][mask[row] == 1] for row in range(3)]
        forward(patched, ids, ours, attention_mask=mask, logits_to_keep=1)
        for length, present in ((5, [5, 2, 0]), (1, [1, 0, 1]), (1, [1, 1, 1])):
            new, new_mask = torch.zeros(3, length, dtype=torch.int64), torch.zeros(3, length, dtype=torch.int64)
            for row, count in enumerate(present):
                if count:
                    new[row, -count:], new_mask[row, -count:] = prompt(count, seed=10 * length + row), 1
                    rows[row] = torch.cat([rows[row], new[row, -count:]])
            mask = torch.cat([mask, new_mask], 1)
            logits = forward(patched, new, ours, attention_mask=mask, logits_to_keep=1)
            for row, count in enumerate(present):
                if count:
                    assert_same(logits[row, -1], forward(reference, rows[row][None], None)[0, -1])
            patched.radixkv.check()

    def test_it_reuses_what_is_stored_and_stores_when_asked(self, patched: Any) -> None:
        ids = prompt(60, seed=4)[None]
        cache = patched.radixkv.new_cache()
        forward(patched, ids, cache)
        assert patched.radixkv.match_prefix(ids[0]).length == 0
        cache.store()
        assert patched.radixkv.match_prefix(ids[0]).length == 60
        with counted_tokens(patched) as rows:
            forward(patched, ids, patched.radixkv.new_cache(), logits_to_keep=1)
            forward(patched, ids, patched.radixkv.new_cache(reuse=False), logits_to_keep=1)
            forward(patched, ids, patched.radixkv.new_cache(("other",)), logits_to_keep=1)
            forward(patched, ids, patched.radixkv.new_cache())
        assert rows == [1, 60, 60, 60], "logits of all tokens take computing all"

    def test_it_goes_on_after_it_was_stored_or_closed(self, reference: Any, patched: Any) -> None:
        ids, more = prompt(33, seed=5)[None], prompt(4, seed=6)[None]
        expected = forward(reference, torch.cat([ids, more], 1), None)[:, -4:]
        for end, computed in (("store", 4), ("close", 33 + 4)):
            cache = patched.radixkv.new_cache(reuse=end == "store")
            forward(patched, ids, cache)
            getattr(cache, end)()
            assert not cache.is_open and cache.get_seq_length() == 33
            with counted_tokens(patched) as rows:
                assert_same(forward(patched, more, cache), expected)
            assert sum(rows) == computed and cache.get_seq_length() == 37
            cache.close()

    def test_a_failing_step_leaves_it_as_it_was(self, reference: Any, patched: Any) -> None:
        ids, more = prompt(30, seed=7)[None], prompt(3, seed=8)[None]
        cache = patched.radixkv.new_cache()
        layer = patched.model.layers[1]

        def fail(*_: Any) -> None:
            raise KeyboardInterrupt

        for new, length in ((ids, 0), (more, 30), (more[:, :1], 30)):
            hook = layer.register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                forward(patched, new, cache)
            hook.remove()
            assert cache.get_seq_length() == length
            patched.radixkv.check()
            if not length:
                forward(patched, ids, cache)
        assert_same(forward(patched, more, cache), forward(reference, torch.cat([ids, more], 1), None)[:, -3:])

    def test_changed_weights_are_never_mixed(self, patched: Any) -> None:
        """Rows that were computed with other weights are computed again."""
        ids, token = prompt(30, seed=9)[None], prompt(1, seed=10)[None]
        cache = patched.radixkv.new_cache()
        forward(patched, ids, cache)
        with torch.no_grad():
            patched.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        with counted_tokens(patched) as rows:
            logits = forward(patched, token, cache)
        assert rows == [31]
        assert_same(logits[:, -1:], forward(radixkv.unpatch_model(copy.deepcopy(patched)), torch.cat([ids, token], 1), None)[:, -1:])

    def test_outputs_as_a_tuple(self, patched: Any) -> None:
        with torch.no_grad():
            logits, cache = patched(prompt(9, seed=1)[None], past_key_values=patched.radixkv.new_cache(), return_dict=False)
        assert logits.shape == (1, 9, 997) and isinstance(cache, PagedCache)

    def test_dropping_it_frees_its_blocks(self, patched: Any) -> None:
        free = patched.radixkv.pool.num_free
        for seed in range(3):
            cache = patched.radixkv.new_cache()
            forward(patched, prompt(100, seed=seed)[None], cache)
            fork = copy.deepcopy(cache)
            del cache, fork
        gc.collect()
        patched.radixkv.check()
        assert patched.radixkv.pool.num_free == free


class TestConversation:
    @pytest.mark.parametrize("argument", ["past_key_values", "cache"])
    def test_the_next_turns(self, reference: Any, patched: Any, argument: str) -> None:
        """What generate() returned is passed into the next one with the whole conversation, and only what is new is computed."""
        if argument == "cache" and "cache" not in reference.forward.__code__.co_varnames:
            pytest.skip("this release of transformers has the older name only")
        ids, cache = prompt(50, seed=1)[None], None
        for turn in range(3):
            expected = reference.generate(ids, **GREEDY)
            with counted_tokens(patched) as rows:
                sequences, cache = answer(patched, ids, **({} if cache is None else {argument: cache}))
            assert torch.equal(sequences, expected)
            assert rows[0] == (50 if not turn else 1 + 7)
            assert type(cache) is PagedCache and cache.get_seq_length() == sequences.shape[1] - 1
            ids = torch.cat([sequences, prompt(7, seed=20 + turn)[None]], 1)

    def test_a_batch_goes_on(self, reference: Any, patched: Any) -> None:
        ids, mask = left_pad([prompt(40, seed=2), prompt(11, seed=3)])
        first = reference.generate(ids, attention_mask=mask, **GREEDY)
        sequences, cache = answer(patched, ids, attention_mask=mask)
        assert torch.equal(sequences, first)
        more = torch.stack([prompt(5, seed=4), prompt(5, seed=5)])
        ids = torch.cat([sequences, more], 1)
        mask = torch.cat([mask, torch.ones(2, 12 + 5, dtype=mask.dtype)], 1)
        expected = reference.generate(ids, attention_mask=mask, **GREEDY)
        with counted_tokens(patched) as rows:
            assert torch.equal(answer(patched, ids, attention_mask=mask, past_key_values=cache)[0], expected)
        assert rows[0] == 2 * (1 + 5)

    def test_several_sequences_of_one_cache(self, reference: Any, patched: Any) -> None:
        ids, cache = answer(patched, prompt(40, seed=6)[None])
        arguments = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 10}
        torch.manual_seed(1)
        expected = reference.generate(ids, **arguments)
        torch.manual_seed(1)
        assert torch.equal(patched.generate(ids, past_key_values=cache, **arguments), expected)
        assert cache.num_rows == 3

    @pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4, "eos_token_id": 2}])
    def test_other_modes_go_on_too(self, reference: Any, patched: Any, mode: dict[str, Any]) -> None:
        ids = torch.cat([prompt(30, seed=7), prompt(30, seed=7)])[None]
        cache = patched.radixkv.new_cache()
        forward(patched, ids[:, :45], cache)
        expected = reference.generate(ids, **GREEDY, **mode)
        assert torch.equal(patched.generate(ids, past_key_values=cache, **GREEDY, **mode), expected)
        patched.radixkv.check()

    def test_the_whole_prompt_is_cached_already(self, reference: Any, patched: Any) -> None:
        """Unpatched releases go wrong when nothing is left to compute; here the last token is computed again."""
        ids = prompt(32, seed=8)[None]
        cache = patched.radixkv.new_cache()
        forward(patched, ids, cache)
        assert torch.equal(patched.generate(ids, past_key_values=cache, **GREEDY), reference.generate(ids, **GREEDY))

    def test_other_tokens_than_it_holds_are_refused(self, patched: Any) -> None:
        ids, cache = answer(patched, prompt(40, seed=9)[None])
        wrong = ids.clone()
        wrong[0, 20] += 1
        with pytest.raises(ValueError, match="row 0 does not begin with the 51 tokens that the cache holds"):
            patched.generate(wrong, past_key_values=cache, **GREEDY)
        patched.radixkv.check()
        assert cache.get_seq_length() == 51

    def test_what_the_models_own_path_must_run_is_refused(self, patched: Any) -> None:
        ids, cache = answer(patched, prompt(40, seed=10)[None])
        for arguments in ({"output_hidden_states": True}, {"use_cache": False}, {"prefill_chunk_size": 5}):
            with pytest.raises(ValueError, match="a PagedCache cannot be used in this call"):
                patched.generate(ids, past_key_values=cache, return_dict_in_generate=True, **arguments, **GREEDY)

    def test_namespaces(self, patched: Any) -> None:
        ids, cache = answer(patched, prompt(40, seed=11)[None], namespace=("anna",))
        assert patched.radixkv.match_prefix(ids[0]).length == 0
        with pytest.raises(ValueError, match="the PagedCache is of namespace"):
            patched.generate(ids, past_key_values=cache, namespace=("bert",), **GREEDY)
        with pytest.raises(ValueError, match="reuse=False does not go with a PagedCache"):
            patched.generate(ids, past_key_values=cache, reuse=False, **GREEDY)
        patched.generate(ids, past_key_values=cache, **GREEDY)
        assert patched.radixkv.match_prefix(ids[0]).length == 0
        assert patched.radixkv.match_prefix(ids[0], namespace=("anna",)).length == ids.shape[1]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": torch.ones(1, 5, dtype=torch.int64)}, "labels cannot be used"),
        ({"output_attentions": True}, "output_attentions cannot be used"),
        ({"output_hidden_states": True}, "output_hidden_states cannot be used"),
        ({"inputs_embeds": torch.ones(1, 5, 128)}, "inputs_embeds cannot be used"),
        ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep must be an int"),
        ({"attention_mask": {"full": torch.ones(1, 5)}}, "attention_mask must be a tensor"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask must be \[1, 5\]"),
        ({"attention_mask": torch.zeros(1, 5)}, "holds no token"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask must be \[1, all columns\]"),
        ({"position_ids": torch.tensor([[0, 1, 2, 4, 5]])}, "position_ids must count"),
        ({"input_ids": torch.ones(5, dtype=torch.int64)}, r"input_ids must be int64 \[rows, columns\]"),
        ({"input_ids": torch.full((1, 5), -1)}, "token"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_arguments_that_a_packed_forward_cannot_serve(patched: Any, arguments: dict[str, Any], message: str) -> None:
    cache = patched.radixkv.new_cache()
    with pytest.raises(ValueError, match=message), torch.no_grad():
        patched(**{"input_ids": prompt(5, seed=1)[None], "past_key_values": cache, **arguments})
    patched.radixkv.check()
    assert cache.get_seq_length() == 0
    forward(patched, prompt(5, seed=1)[None], cache)


def test_a_mask_that_takes_back_what_is_cached_is_refused(patched: Any) -> None:
    cache = patched.radixkv.new_cache()
    forward(patched, prompt(5, seed=1)[None], cache)
    with pytest.raises(ValueError, match="must repeat what it said of the first 5 columns"):
        forward(patched, prompt(1, seed=2)[None], cache, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="the cache holds 1 rows, got 2"):
        forward(patched, torch.ones(2, 1, dtype=torch.int64), cache)


def test_training_mode_is_refused(patched: Any) -> None:
    patched.train()
    with pytest.raises(ValueError, match="training mode"):
        patched(prompt(5, seed=1)[None], past_key_values=patched.radixkv.new_cache())
    patched.eval()
