"""The block pool: sizes, counts, errors that change nothing."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest
import torch

from radixkv import pool as pool_module
from radixkv.errors import OutOfBlocks, out_of_blocks
from radixkv.pool import BlockPool, default_num_blocks


def make_pool(num_blocks: int = 8, **changes) -> BlockPool:
    options: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "block_size": 16, "dtype": torch.float32, "device": "cpu"}
    return BlockPool(num_blocks, **(options | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_have_the_stated_shape_dtype_and_are_zero(dtype):
    pool = make_pool(5, dtype=dtype)
    assert len(pool.keys) == len(pool.values) == len(pool.pools) == 2
    for tensor in [*pool.keys, *pool.values]:
        assert tensor.shape == (5, 3, 16, 4)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, torch.zeros(5, 3, 16, 4, dtype=dtype))
    assert pool.pools[1][0] is pool.keys[1] and pool.pools[1][1] is pool.values[1]
    pool.keys[0][0] = 1
    assert all(not tensor.any() for tensor in [pool.keys[1], *pool.values]), "tensors share memory"


def test_tensors_made_under_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        pool = make_pool()
    assert not pool.keys[0].is_inference()
    pool.keys[0].add_(torch.ones((), requires_grad=True).detach())


def test_a_pool_on_the_cpu_reserves_memory_without_touching_it():
    """1 GiB of pool must not cost 1 GiB before it is used."""
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = BlockPool(4096, num_layers=2, num_kv_heads=4, head_dim=128, block_size=64, dtype=torch.bfloat16, device="cpu")
    assert sum(tensor.nbytes for tensor in [*pool.keys, *pool.values]) == pool.num_blocks * pool.block_bytes == 2**30
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert grown < 2**27, f"making the pool touched {grown} bytes"


@pytest.mark.parametrize("block_size", [0, 1, 8, 17, 24, 48, -16])
def test_block_size_must_be_a_power_of_two_of_16_or_more(block_size):
    with pytest.raises(ValueError, match="block_size must be a power of two and at least 16"):
        make_pool(block_size=block_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16"):
        make_pool(dtype=dtype)


@pytest.mark.parametrize("size", ["num_blocks", "num_layers", "num_kv_heads", "head_dim"])
def test_sizes_must_be_positive(size):
    changes = {} if size == "num_blocks" else {size: 0}
    with pytest.raises(ValueError, match=f"{size} must be an int of at least 1, got 0"):
        make_pool(0 if size == "num_blocks" else 8, **changes)


def test_a_fresh_pool_hands_out_ascending_ids():
    pool = make_pool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(0) == []
    assert pool.allocate(5) == [3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_freed_blocks_come_back_in_ascending_order():
    pool = make_pool(8)
    blocks = pool.allocate(8)
    pool.release([blocks[i] for i in (5, 2, 4, 3)])
    assert pool.allocate(4) == [2, 3, 4, 5]


def test_a_block_is_free_when_the_last_reference_goes():
    pool = make_pool(4)
    block, other = pool.allocate(2)
    pool.retain([block, block])
    assert [pool.reference_count(i) for i in range(4)] == [3, 1, 0, 0]
    pool.release([block, block])
    assert pool.num_free == 2
    pool.release([block, other])
    assert pool.num_free == 4
    pool.check([])


def test_out_of_blocks_takes_nothing_and_says_what_is_missing():
    pool = make_pool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="need 2 blocks of 16 tokens; 1 free: raise num_blocks or lower max_new_tokens"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check(held)


def test_out_of_blocks_names_all_counts_that_are_known():
    error = out_of_blocks(12, 16, 3, 0, 40)
    expected = "need 12 blocks of 16 tokens; 3 free, 0 evictable, 40 leased: raise num_blocks or lower max_new_tokens"
    assert isinstance(error, RuntimeError) and str(error) == expected


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        make_pool().allocate(-1)


@pytest.mark.parametrize("action", ["retain", "release"])
@pytest.mark.parametrize("bad", [7, 8, -1], ids=["free", "too large", "negative"])
def test_free_and_foreign_ids_raise_and_change_nothing(action, bad):
    pool = make_pool(8)
    held = pool.allocate(3)
    with pytest.raises(ValueError, match=action):
        getattr(pool, action)([*held, bad])
    assert [pool.reference_count(block) for block in held] == [1, 1, 1]
    pool.check(held)


def test_a_double_free_within_one_call_raises_and_changes_nothing():
    pool = make_pool(8)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="release: block 0 is free, nobody holds it"):
        pool.release([0, 1, 0])
    pool.check(held)


def test_reference_count_of_a_foreign_id_raises():
    for block in (-1, 8):
        with pytest.raises(ValueError, match="block id must be an int in 0..7"):
            make_pool(8).reference_count(block)


def test_check_finds_leaks_and_early_frees():
    pool = make_pool(4)
    first, second = pool.allocate(2)
    pool.check()
    pool.check([first], [second])
    with pytest.raises(AssertionError, match="block 1 has 1 references, but its holders list it 0 times"):
        pool.check([first])
    with pytest.raises(AssertionError, match="block 0 has 1 references, but its holders list it 2 times"):
        pool.check([first, second], [first])


def test_default_size_on_the_cpu_is_a_quarter_of_available_memory(monkeypatch):
    monkeypatch.setattr(pool_module, "_available_memory", lambda: 4 * 1000 * 100)
    assert default_num_blocks("cpu", bytes_per_block=1000, block_size=64) == 100


def test_default_size_on_the_cpu_is_at_most_65536_tokens(monkeypatch):
    monkeypatch.setattr(pool_module, "_available_memory", lambda: 2**50)
    assert default_num_blocks("cpu", bytes_per_block=1000, block_size=64) == 1024
    assert default_num_blocks("cpu", bytes_per_block=1000, block_size=16) == 4096


def test_default_size_on_a_gpu_is_half_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000_000, 80_000_000))
    assert default_num_blocks("cuda:0", bytes_per_block=1000, block_size=64) == 5000


def test_default_size_is_at_least_one_block(monkeypatch):
    monkeypatch.setattr(pool_module, "_available_memory", lambda: 10)
    assert default_num_blocks("cpu", bytes_per_block=1000, block_size=64) == 1


def test_available_memory_is_that_of_this_machine():
    assert 2**20 < pool_module._available_memory() < 2**50


def test_each_layer_lies_on_its_own_device():
    pool = make_pool(5, num_layers=3, device=["cpu", "meta", "cpu"])
    devices = [torch.device(name) for name in ("cpu", "meta", "cpu")]
    assert pool.devices == devices and pool.device == devices[0]
    assert [keys.device for keys in pool.keys] == [values.device for values in pool.values] == devices
    seen = pool.seen_from(devices[1])
    assert (seen.device, pool.device) == (devices[1], devices[0]) and seen.keys is pool.keys
    seen.allocate(2)
    assert pool.num_free == 3, "one free list"
    with pytest.raises(ValueError, match="device must be one for all 3 layers or one for each, got 2"):
        make_pool(5, num_layers=3, device=["cpu", "meta"])
