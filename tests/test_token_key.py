"""`TokenKey`: a key that is made once and grows. (What `token_key` takes and refuses is in test_tree.py.)"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import radixkv
from radixkv.pool import BlockPool
from radixkv.token_key import TokenKey, token_key
from radixkv.tree import RadixTree
from tests.test_tree import count_calls

BLOCK = 16


def test_it_is_the_bytes_of_what_was_appended():
    key = TokenKey([1, 2])
    assert len(key) == 2 and bytes(key) == token_key([1, 2])
    key.append(3)
    key.append(np.int64(4))
    key.append(torch.tensor(5))
    key.extend((6, 2**31 - 1))
    key.extend(torch.tensor([8, 9]))
    key.extend(TokenKey([10]))
    assert len(key) == 10 and bytes(key) == token_key([1, 2, 3, 4, 5, 6, 2**31 - 1, 8, 9, 10])
    assert bytes(key) is bytes(key) is token_key(key)
    assert key == TokenKey(bytes(key)) and key != TokenKey([1]) and key != bytes(key)
    assert bytes(TokenKey()) == b"" and repr(key) == "TokenKey(10 tokens)"


def test_a_key_of_a_key_grows_by_itself():
    key = TokenKey([1])
    other = TokenKey(key)
    other.append(2)
    assert (len(key), len(other)) == (1, 2)


@pytest.mark.parametrize("bad", [-1, 2**31, 2**70, True, 1.0, None, "1", [1], np.float32(1), torch.tensor(1.5)], ids=repr)
def test_what_is_no_token_is_not_appended(bad):
    key = TokenKey([7])
    with pytest.raises(ValueError, match="token_key: "):
        key.append(bad)
    with pytest.raises(ValueError, match="token_key: "):
        key.extend([8, bad])
    assert bytes(key) == token_key([7])


def test_the_tree_takes_it_wherever_it_takes_tokens():
    tree = RadixTree(BLOCK)
    key = TokenKey(range(40))
    tree.insert(key, [0, 1, 2])
    key.append(40)
    found = tree.match_prefix(key)
    assert found.length == 40
    with tree.lock(found) as lease:
        assert lease.tokens == token_key(range(40))
    key.extend(range(41, 64))
    assert tree.insert(key, [0, 1, 3, 4]).replaced == [2]
    assert tree.match_prefix(key).length == len(key) == 64
    tree.check()


def test_a_match_keeps_the_tokens_that_it_was_asked_for():
    """The key grows while the match waits to be locked, and the tree changes, so that it is looked up again."""
    tree = RadixTree(BLOCK)
    tree.insert(range(64), range(4))
    key = TokenKey(range(20))
    found = tree.match_prefix(key)
    key.extend(range(20, 64))
    tree.evict(1)
    with tree.lock(found) as lease:
        assert lease.length == 20 and lease.tokens == token_key(range(20))


def test_the_tree_does_not_convert_it():
    """Not a call more for 30,000 tokens than for 30, and none that copies them."""
    counts = []
    for length in (32, 32_000):
        tree = RadixTree(BLOCK)
        key = TokenKey(range(length))
        tree.insert(key, range(length // BLOCK))
        counts.append(count_calls(lambda tree=tree, key=key: tree.lock(tree.match_prefix(key)).release()))
        assert tree.match_prefix(key).key is bytes(key)
    assert counts[0] == counts[1]


def test_the_cache_takes_it():
    pool = BlockPool(8, num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32, device="cpu")
    cache = radixkv.PrefixCache(pool, radixkv.cache.Backend("torch", num_heads=1, pool=pool))
    key = radixkv.TokenKey(range(30))
    cache.insert_computed(key, [torch.ones(30, 1, 64)], [torch.ones(30, 1, 64)])
    key.append(30)
    with cache.match_prefix(key) as lease:
        assert lease.length == 30
    cache.check()
