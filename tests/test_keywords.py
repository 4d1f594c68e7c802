"""The keywords that generate() of a patched model has beside transformers' own: namespace=, reuse=, store=."""

from __future__ import annotations

import pytest
import torch

from tests.models import counted_tokens, prompt

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def test_namespaces(reference, patched):
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


def test_no_reuse_computes_everything(reference, patched):
    ids = prompt(60, seed=10)[None].repeat(2, 1)
    expected = reference.generate(ids, **GREEDY)
    for _ in range(2):
        with counted_tokens(patched) as rows:
            assert torch.equal(patched.generate(ids, reuse=False, **GREEDY), expected)
        assert rows[0] == 120
    with counted_tokens(patched) as rows:
        patched.generate(ids, **GREEDY)
    assert rows[0] == 2, "what was computed without reuse is stored all the same"


def test_no_storing_leaves_nothing_behind(reference, patched):
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
def test_wrong_values(patched, wrong, message):
    with pytest.raises(ValueError, match=message):
        patched.generate(prompt(9, seed=1)[None], **wrong, **GREEDY)


def test_a_chosen_prefix_goes_with_neither(patched):
    ids = prompt(40, seed=14)[None]
    patched.generate(ids, **GREEDY)
    with patched.radixkv.match_prefix(ids[0]) as lease:
        for wrong in ({"reuse": False}, {"store": False}):
            with pytest.raises(ValueError, match="leave out reuse= and store="):
                patched.generate(ids, prefix_cache=lease, **wrong, **GREEDY)
