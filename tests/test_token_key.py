"""`token_key`, what it takes and refuses, and `TokenKey`, a key that is made once and grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import radixkv
from radixkv.attention import Backend
from radixkv.pool import BlockPool
from radixkv.token_key import TokenKey, token_key
from radixkv.tree import RadixTree
from tests.calls import count_calls

BLOCK = 16


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([1, 2, 300], id="list"),
        pytest.param((1, 2, 300), id="tuple"),
        pytest.param(np.array([1, 2, 300]), id="int64 array"),
        pytest.param(np.array([1, 2, 300], dtype=np.uint16), id="uint16 array"),
        pytest.param(np.array([1, 0, 2, 0, 300, 0])[::2], id="strided array"),
        pytest.param(np.array([1, 2, 300], dtype=">i4"), id="big-endian array"),
        pytest.param(torch.tensor([1, 2, 300]), id="int64 tensor"),
        pytest.param(torch.tensor([1, 2, 300], dtype=torch.int32), id="int32 tensor"),
        pytest.param([np.int64(1), 2, torch.tensor(300)], id="list of scalars"),
        pytest.param(b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0", id="key"),
    ],
)
def test_token_key_is_little_endian_int32(given):
    assert token_key(given) == b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0"


def test_token_key_takes_the_whole_range_of_ids_and_no_tokens():
    assert token_key([0, 1, 2**31 - 1]) == b"\0\0\0\0\x01\0\0\0\xff\xff\xff\x7f"
    assert token_key(range(3)) == token_key([0, 1, 2])
    assert token_key([]) == token_key(()) == token_key(torch.tensor([], dtype=torch.int64)) == b""


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([3, -1], id="negative"),
        pytest.param(np.array([3, -1]), id="negative in an array"),
        pytest.param([2**31], id="2**31"),
        pytest.param([2**70], id="2**70"),
        pytest.param(np.array([2**32 + 1]), id="would wrap around"),
        pytest.param(np.array([2**63], dtype=np.uint64), id="uint64"),
        pytest.param([1.0, 2.0], id="floats"),
        pytest.param(np.array([1.0]), id="float array"),
        pytest.param(torch.tensor([1.0]), id="float tensor"),
        pytest.param(torch.tensor([1.0], dtype=torch.bfloat16), id="bfloat16 tensor"),
        pytest.param([5, True], id="bool in a list"),
        pytest.param([False, 5], id="False in a list"),
        pytest.param(np.array([True]), id="bool array"),
        pytest.param(torch.tensor([True]), id="bool tensor"),
        pytest.param([[1, 2]], id="2-D list"),
        pytest.param(np.array([[1, 2]]), id="2-D array"),
        pytest.param(torch.tensor([[1, 2]]), id="2-D tensor"),
        pytest.param(torch.tensor(3), id="0-D tensor"),
        pytest.param(b"\0\0\0", id="a key that cuts a token"),
        pytest.param("12", id="str"),
        pytest.param({1, 2}, id="set"),
        pytest.param(None, id="None"),
        pytest.param([None], id="list of None"),
    ],
)
def test_token_key_refuses_what_are_not_token_ids(given):
    with pytest.raises(ValueError, match="token_key"):
        token_key(given)


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
    cache = radixkv.PrefixCache(pool, Backend("torch", num_heads=1, pool=pool))
    key = radixkv.TokenKey(range(30))
    cache.insert_computed(key, [torch.ones(30, 1, 64)], [torch.ones(30, 1, 64)])
    key.append(30)
    with cache.match_prefix(key) as lease:
        assert lease.length == 30
    cache.check()
