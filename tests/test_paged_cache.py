"""`PagedCache`: a loop of one's own, the next turn of a conversation, and what it refuses."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen2ForCausalLM

import radixkv
from radixkv.integration.paged_cache import PagedCache
from radixkv.integration.versions import cache_argument
from tests.models import counted_tokens, left_pad, prompt
from tests.paged import GREEDY, answer, assert_same, forward


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


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
        for new, length in ((ids, 0), (more, 30), (more[:, :1], 30)):
            hook = layer.register_forward_pre_hook(_fail)
            with pytest.raises(KeyboardInterrupt):
                forward(patched, new, cache)
            hook.remove()
            assert cache.get_seq_length() == length
            patched.radixkv.check()
            if not length:
                forward(patched, ids, cache)
        assert_same(forward(patched, more, cache), forward(reference, torch.cat([ids, more], 1), None)[:, -3:])

    @pytest.mark.parametrize("num_rows", [1, 2])
    def test_a_decode_step_that_fails_leaves_nothing_of_its_token(self, reference: Any, patched: Any, num_rows: int) -> None:
        """A layer before the one that failed has seen the token; another token takes its place, and what is stored is of that one."""
        ids = torch.stack([prompt(20, seed=30 + row) for row in range(num_rows)])
        cache = patched.radixkv.new_cache()
        forward(patched, ids, cache)
        for number in range(3):
            hook = patched.model.layers[1].register_forward_pre_hook(_fail)
            with pytest.raises(KeyboardInterrupt):
                forward(patched, torch.full((num_rows, 1), 500 + number), cache)
            hook.remove()
            for token in (600 + number, 700 + number):
                ids = torch.cat([ids, torch.full((num_rows, 1), token)], 1)
                assert_same(forward(patched, ids[:, -1:], cache)[:, -1], forward(reference, ids, None)[:, -1])
        cache.store()
        assert torch.equal(patched.generate(ids, **GREEDY), reference.generate(ids, **GREEDY))

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
    @pytest.mark.parametrize("argument", sorted({"past_key_values", cache_argument(Qwen2ForCausalLM)}))
    def test_the_next_turns(self, reference: Any, patched: Any, argument: str) -> None:
        """What generate() returned is passed into the next one with the whole conversation, and only what is new is computed."""
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
        for arguments in ({"output_hidden_states": True}, {"use_cache": False}):
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
