"""explain(): how far a prompt matches, why it ends there, and that asking changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

import radixkv
from radixkv.explain import Explanation, explain
from radixkv.history import NUM_RUNS
from radixkv.tree import RadixTree
from tests.models import prompt, tiny_qwen2
from tests.small_cache import ask, keep, small_cache

WORDS = {1: "one", 2: "two\n", 3: "<b>", 4: "four", 5: "\x1b[31m"}


class Tokenizer:
    """Knows a few words."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(WORDS.get(id, str(id)) for id in ids)


class Filled:
    """A tree whose blocks are numbered by themselves."""

    def __init__(self, block_size: int = 4) -> None:
        self.tree = RadixTree(block_size)
        self.num_given = 0

    def keep(self, tokens: Any, namespace: tuple = ()) -> None:
        num_blocks = -(-len(tokens) // self.tree.block_size)
        self.tree.insert(list(tokens), range(self.num_given, self.num_given + num_blocks), namespace)
        self.num_given += num_blocks

    def explain(self, tokens: Any, namespace: tuple = (), **options: Any) -> Explanation:
        return explain(self.tree, list(tokens), namespace, **options)


def state_of(tree: RadixTree) -> list[tuple]:
    return [(node.edge, node.blocks, node.stamp, node.hits, node.locks, node.place, len(node.children)) for node in tree.nodes()]


def test_a_prompt_that_is_cached_whole():
    filled = Filled()
    filled.keep(range(10))
    found = filled.explain(range(10))
    assert (found.reason, found.num_tokens, found.matched, found.reusable) == ("all cached", 10, 10, 9)
    assert [(edge.depth, edge.start, edge.num_tokens, edge.edge_tokens) for edge in found.edges] == [(1, 0, 10, 10)]
    assert str(found) == (
        "Of 10 tokens the first 10 are cached, along 1 edge (tokens: 10 of 10 at depth 1). Nothing is missing; the last token is computed "
        "all the same, for its logits. generate() would reuse 9 tokens and compute 1."
    )
    assert filled.explain(range(10), num_logits=4).reusable == 6
    assert filled.explain(range(10), num_logits=40).reusable == 0
    assert filled.explain(range(10), num_logits=0).reusable == 9


def test_the_end_of_what_is_cached():
    filled = Filled()
    filled.keep(range(10))
    found = filled.explain(range(14))
    assert (found.reason, found.matched, found.reusable, found.difference) == ("end", 10, 10, None)
    assert "Nothing is cached behind position 10." in str(found)
    empty = filled.explain([])
    assert (empty.num_tokens, empty.matched, empty.reusable) == (0, 0, 0)
    nothing = Filled().explain(range(3))
    assert (nothing.reason, nothing.matched, nothing.edges) == ("end", 0, ())
    assert "Of 3 tokens none is cached. Nothing is cached in this namespace." in str(nothing)


def test_a_token_that_differs_inside_an_edge():
    filled = Filled()
    filled.keep(range(100, 120))
    filled.keep([*range(100, 108), 7, 7, 7])
    query = [*range(100, 113), 55, 56, 57]
    found = filled.explain(query)
    assert (found.reason, found.matched, found.reusable) == ("differs", 13, 13)
    assert [(edge.depth, edge.start, edge.num_tokens, edge.edge_tokens) for edge in found.edges] == [(1, 0, 8, 8), (2, 8, 5, 12)]
    difference = found.difference
    assert difference is not None
    assert (difference.position, difference.asked, difference.cached, difference.more) == (13, 55, (113,), False)
    assert difference.before == tuple(range(105, 113))
    assert (difference.asked_run, difference.cached_run) == ((55, 56, 57), tuple(range(113, 120)))
    assert "The match ends at position 13: asked for token 55, cached there: 113. In full, after 105 106" in str(found)


@pytest.mark.parametrize(("num_others", "more"), [(3, False), (8, False), (9, True), (200, True)])
def test_a_token_that_differs_where_the_tree_branches(num_others, more):
    """At the end of a node, and inside the first block of its children, all that is cached there is told, up to eight."""
    for shared in (8, 9):
        filled = Filled()
        for other in range(num_others):
            filled.keep([*range(shared), 100 + other, 5, 5])
        found = filled.explain([*range(shared), 99, 98])
        assert (found.matched, found.reason) == (shared, "differs")
        assert found.difference is not None
        assert (len(found.difference.cached), found.difference.more) == (min(num_others, 8), more)
        assert set(found.difference.cached) <= set(range(100, 100 + num_others))
        assert found.difference.cached_run[:1] == found.difference.cached[:1]


def test_only_in_another_namespace():
    filled = Filled()
    filled.keep(range(6))
    filled.keep(range(12), ("tenant b",))
    filled.keep(range(9), ("tenant c",))
    found = filled.explain([*range(11), 50])
    assert (found.reason, found.matched) == ("other namespace", 6)
    assert found.elsewhere is not None and (found.elsewhere.namespace, found.elsewhere.matched) == (("tenant b",), 11)
    assert "Its first 11 tokens are cached in another namespace, ('tenant b',); that is never served here." in str(found)
    assert filled.explain(range(12), ("tenant b",)).reason == "all cached"
    assert filled.explain(range(3)).elsewhere is None


def test_namespaces_that_only_look_alike_are_told_apart():
    filled = Filled()
    filled.keep(range(8), (1,))
    found = filled.explain(range(8), (True,))
    assert found.elsewhere is not None and found.elsewhere.namespace == (1,)
    assert filled.explain(range(8), (1,)).reason == "all cached"


def test_only_under_older_weights():
    cache = small_cache()
    keep(cache, range(40))
    with cache.match_prefix(range(40)):
        cache.invalidate()
        found = cache.explain(range(40))
        assert (found.reason, found.matched, found.reusable) == ("older weights", 0, 0)
        assert found.elsewhere is not None and found.elsewhere.stale and found.elsewhere.matched == 40
        assert "Its first 40 tokens are cached under older weights, (('weights', 0)," in str(found)
        assert cache.explain(range(40), ("x",)).reason == "other namespace"


def test_that_everything_was_dropped_is_told():
    cache = small_cache()
    keep(cache, range(40))
    assert "was dropped" not in str(cache.explain(range(50)))
    cache.clear()
    assert "everything that nobody held, 40 tokens, was dropped: the cache was cleared." in str(cache.explain(range(40)))
    keep(cache, range(30))
    cache.invalidate()
    assert "everything that nobody held, 30 tokens, was dropped: the model's weights had changed." in str(cache.explain(range(40)))


def test_evicted_block_by_block_from_the_end():
    filled = Filled()
    filled.keep(range(30))
    for step in range(3):
        filled.tree.evict(1)
        found = filled.explain(range(31))
        assert (found.reason, found.matched) == ("evicted", 28 - 4 * step)
        assert found.loss is not None
        assert (found.loss.start, found.loss.end, found.loss.num_tokens) == (28 - 4 * step, 30, 2 + 4 * step)
    steps = [node.stamp for node in filled.tree.nodes()]
    assert found.loss is not None and found.loss.step > max(steps)
    assert f"More of it was cached: 10 tokens from position 20 on were evicted, at step {found.loss.step}." in str(found)
    assert filled.explain([*range(20), 99]).reason == "end"  # another token than the one that was lost


def test_evicted_to_the_last_token():
    filled = Filled()
    filled.keep(range(10))
    filled.keep([50, 51])
    filled.tree.evict(3)
    found = filled.explain(range(10))
    assert (found.reason, found.matched) == ("evicted", 0)
    assert found.loss is not None and (found.loss.start, found.loss.end, found.loss.num_tokens) == (0, 10, 10)
    assert filled.explain([50, 51]).reason == "all cached"


def test_a_lost_branch_and_then_its_stem_are_one_loss():
    filled = Filled()
    filled.keep(range(8))
    filled.keep([*range(8), 20, 21, 22, 23])
    filled.keep([*range(8), 30, 31])
    filled.keep([90, 91])
    filled.tree.evict(4)
    found = filled.explain([*range(8), 30, 31, 32])
    assert found.loss is not None and (found.loss.start, found.loss.end, found.loss.num_tokens) == (0, 10, 10)


def test_the_same_tokens_after_another_beginning_were_not_evicted():
    filled = Filled()
    filled.keep([1, 1, 1, 1, *range(10, 30)])
    filled.keep([2, 2, 2, 2, 60])
    filled.tree.evict(5)
    assert filled.explain([1, 1, 1, 1, *range(10, 30)]).reason == "evicted"
    found = filled.explain([2, 2, 2, 2, *range(10, 30)])
    assert (found.reason, found.loss) == ("differs", None)


def test_only_so_many_evictions_are_remembered():
    filled = Filled()
    for first in range(NUM_RUNS + 10):
        filled.keep([first, 5000, 5000])
    filled.tree.evict(NUM_RUNS + 10)
    reasons = [filled.explain([first, 5000, 5000]).reason for first in range(NUM_RUNS + 10)]
    assert reasons == ["end"] * 10 + ["evicted"] * NUM_RUNS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eviction", ["lru", "cost"])
def test_every_loss_is_told_and_nothing_else(seed, eviction):
    """Random prefixes and evictions beside a set of everything that ever was in the tree."""
    rng = random.Random(seed)
    filled = Filled()
    filled.tree = RadixTree(4, eviction)
    ever: set[tuple[int, ...]] = set()
    leases = []
    reasons = set()
    for _ in range(400):
        stem = [0] * rng.randrange(9) + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        action = rng.random()
        if action < 0.5:
            filled.keep(stem)
            ever |= {tuple(stem[:end]) for end in range(1, len(stem) + 1)}
        elif action < 0.7:
            filled.tree.evict(rng.randrange(1, 4))
        elif action < 0.75:
            leases.append(filled.tree.lock(filled.tree.match_prefix(stem)))
        elif leases:
            leases.pop(rng.randrange(len(leases))).release()
        found = filled.explain(stem)
        assert found.matched == filled.tree.match_prefix(stem).length
        next_one = tuple(stem[: found.matched + 1])
        assert (found.reason == "evicted") == (found.matched < len(stem) and next_one in ever)
        reasons.add(found.reason)
        filled.tree.check()
    assert {"all cached", "evicted", "differs"} <= reasons


def test_in_host_memory():
    cache = small_cache(num_blocks=4, host_bytes=2**20)
    keep(cache, range(40))
    keep(cache, range(100, 150))
    found = cache.explain(range(41))
    assert (found.reason, found.matched < 40, found.in_host_memory, found.reusable) == ("in host memory", True, 40, 40)
    assert "Its first 40 tokens are in host memory" in str(found)
    assert ask(cache, range(41)) == 40


def test_asking_changes_nothing():
    cache = small_cache(num_blocks=8)
    for first in range(4):
        keep(cache, [*range(20), first, *range(30)])
    lease = cache.match_prefix(range(20))
    before = state_of(cache.tree), cache.stats(), cache.tree.queue.nodes(), cache.tree.first_to_go()
    for tokens in ([*range(20), 2, *range(30)], range(25), [9], [*range(20), 0, 1]):
        str(cache.explain(tokens))
    assert (state_of(cache.tree), cache.stats(), cache.tree.queue.nodes(), cache.tree.first_to_go()) == before
    lease.release()
    cache.check()


def test_what_is_told_is_what_generate_does():
    model = radixkv.patch_model(tiny_qwen2(num_layers=1), num_blocks=40, block_size=16)
    first = prompt(40, seed=1)
    model.generate(first[None], max_new_tokens=3, do_sample=False)
    for tokens in (first, first[:17], first[:16], prompt(9, seed=2)):
        expected = model.radixkv.explain(tokens).reusable
        before = model.radixkv.stats().cached_tokens
        model.generate(tokens[None], max_new_tokens=2, do_sample=False)
        assert model.radixkv.stats().cached_tokens - before == expected


def test_words_around_the_difference_are_safe_to_print():
    filled = Filled()
    filled.keep([1, 2, 3, 4, 4, 4])
    text = str(filled.explain([1, 2, 3, 5, 5], tokenizer=Tokenizer()))
    assert r'In words, after "one two\n <b>", asked: "\x1b[31m \x1b[31m"; cached: "four four four".' in text
    assert text.isprintable()
    assert len(str(filled.explain([1] * 5000, tokenizer=Tokenizer()))) < 600


def test_a_long_chain_is_told_shortly():
    filled = Filled()
    tokens: list[int] = []
    for turn in range(5000):
        tokens += [turn, 1, 2, 3]
        filled.keep([*tokens, 7000])
    found = filled.explain([*tokens, 1])
    assert (found.matched, len(found.edges), found.reason) == (20_000, 5000, "differs")
    assert len(str(found)) < 700


def test_bad_input_is_refused_in_words():
    cache = small_cache()
    keep(cache, range(20))
    arguments: Any
    for arguments, message in [
        (([1.5],), "token_key"),
        (([-1],), "0 .. 2"),
        (([[1]],), "flat"),
        ((range(3), ["a"]), "explain: namespace must be a tuple"),
        ((range(3), ([],)), "explain: namespace must hold hashable"),
    ]:
        with pytest.raises(ValueError, match=message):
            cache.explain(*arguments)
    with pytest.raises(ValueError, match="explain: num_logits must be an int of at least 0, got -1"):
        cache.explain(range(3), num_logits=-1)
    with pytest.raises(ValueError, match=r"explain: tokenizer must have a decode\(ids\) method, got str"):
        cache.explain(range(3), tokenizer="gpt2")
    assert cache.explain(range(20)).matched == 20
