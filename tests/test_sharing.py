"""Decode items over forests of requests: what is read once, what it costs, and that it never costs more than reading all apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from radixkv.bench.forests import BEST_OF_8, FEW_SHOT, SHARED_8K, Tree, forest
from radixkv.kernels import reference
from radixkv.kernels.configs import layout_for
from radixkv.kernels.decode import decode_attention, launch_narrow
from radixkv.kernels.extend import launch_wide
from radixkv.kernels.items import ItemLists, Layout, decode_items
from radixkv.kernels.merge import launch_merge
from radixkv.kernels.work import build_work
from radixkv.testing import assert_attention_close, kernel_device
from tests.item_lists import SHAPE_IDS, SHAPES, attend_lists, cached_slots, chain, forest_batch, random_trees

WORKLOADS = [
    pytest.param(SHARED_8K, id="64x(8k+256)"),
    pytest.param(FEW_SHOT, id="few-shot"),
    pytest.param(BEST_OF_8, id="best-of-8"),
]


def layout(shape: tuple[int, int, int], block_size: int) -> Layout:
    """Return the layout of a model on an H100 or H200."""
    num_heads, num_kv_heads, head_dim = shape
    return layout_for(head_dim, num_heads // num_kv_heads, torch.bfloat16, block_size, num_kv_heads)


def small_layout(group: int, block_size: int = 16) -> Layout:
    """Return a layout with which small trees are worth sharing: partials are few bytes beside float32 K/V, the device is small."""
    return Layout(
        group=group,
        num_kv_heads=2,
        head_dim=64,
        itemsize=4,
        block_size=block_size,
        narrow_entries=max(1, 16 // group),
        wide_rows=32,
        tile_kv=64,
        tile_q=4,
        chunk=256,
        narrow_slots=24,
        wide_slots=8,
    )


def few_rows(trees: list[Tree], block_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the block table and lengths of a forest's first 16 requests."""
    table, lens = forest(trees, block_size, seed)
    return table[:16], lens[:16]


def range_rows(lists: ItemLists, made: Layout) -> dict[tuple[int, int, int], list[int]]:
    """Return for each range that is split in row tiles of its own the places of its items in the list, and check they are neighbours."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for place, (_, _, seq, first, end) in enumerate(lists.wide.tolist()):
        places.setdefault((seq, first, end), []).append(place)
    assert all(found == list(range(found[0], found[0] + len(found))) for found in places.values())
    return places


@pytest.mark.parametrize("trees", WORKLOADS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_shared_keys_are_read_once(shape, block_size: int, trees: list[Tree]) -> None:
    made = layout(shape, block_size)
    table, lens = forest(trees, block_size)
    lists, flat = decode_items(table, lens, made), decode_items(table, lens, made, share=False)
    unique = len(cached_slots(table, lens, block_size))
    assert lists.range_keys <= 1.10 * unique
    assert lists.moved_bytes(made) < flat.moved_bytes(made)
    if trees is SHARED_8K:
        assert lists.moved_bytes(made) <= 1.4 * unique * made.key_bytes * made.num_kv_heads
    # Loads: for each range its keys as often as there are tiles of 128 rows.
    wide = range_rows(lists, made)
    least = 0
    for places in wide.values():
        rows = sum(int(lists.wide[place, 1]) for place in places)
        least += -(-rows // 128) * int(lists.wide_keys[places[0]])
    assert lists.loaded_keys <= least + int(lists.narrow_keys.sum())
    assert (lists.narrow[:, 1] * made.group <= 128).all()
    assert lists.wide_keys.max() > lists.narrow_keys.max()


@pytest.mark.parametrize("seed", range(60))
def test_sharing_never_moves_more_than_flat(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = layout(SHAPES[seed % 3], (16, 64)[seed % 2])
    table, lens = forest(random_trees(rng), made.block_size, seed)
    for window in (None, 100, 700):
        lists = decode_items(table, lens, made, window=window)
        flat = decode_items(table, lens, made, window=window, share=False)
        assert lists.moved_bytes(made) <= flat.moved_bytes(made)


@pytest.mark.parametrize("step", [1, 7, 16, 33, 64, 500])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_thin_chains_never_move_more_than_flat(shape, step: int) -> None:
    """Of 40 requests each shares a block or two more with the next than with the one before: an item per node would drown in partials."""
    made = layout(shape, 16)
    table, lens = forest(chain(40, step), 16)
    lists, flat = decode_items(table, lens, made), decode_items(table, lens, made, share=False)
    assert lists.moved_bytes(made) <= flat.moved_bytes(made)
    # Where the shared beginnings are long, most of what all read is still read once.
    if step >= 16:
        assert lists.range_keys <= 0.5 * flat.range_keys


def test_a_short_common_beginning_is_not_worth_an_item() -> None:
    made = layout(SHAPES[2], 16)
    for shared in (16, 32):
        table, lens = forest([(shared, [(500, None), (700, None)])], 16)
        assert len(decode_items(table, lens, made).wide) == 0
        assert (decode_items(table, lens, made).narrow[:, 1] == 1).all()


def test_without_sharing_the_list_is_the_flat_one_item_for_item() -> None:
    made = layout(SHAPES[0], 16)
    table, lens = forest([(int(tokens), None) for tokens in np.random.default_rng(0).integers(1, 5000, 30)], 16)
    lists, flat = decode_items(table, lens, made), decode_items(table, lens, made, share=False)
    for name, array in vars(flat).items():
        assert np.array_equal(getattr(lists, name), array), name


def test_rows_that_share_all_their_blocks_keep_their_last_token_apart() -> None:
    """The range of a row's last token is open and its own, for it grows."""
    made = small_layout(2)
    table = np.arange(64, dtype=np.int32)[None].repeat(2, 0)
    lists = decode_items(table, np.array([1024, 1024]), made)
    shared = lists.narrow[lists.narrow[:, 1] == 2]
    assert len(shared) and shared[:, 4].max() == 1008
    own = lists.narrow[lists.narrow[:, 1] == 1]
    assert own[:, 3:].tolist() == [[1008, 1280]] * 2


@pytest.mark.parametrize("window", [None, 40, 300])
@pytest.mark.parametrize("group", [1, 3, 6, 7, 16])
def test_random_forests_give_what_the_reference_gives(group: int, window: int | None) -> None:
    for seed in range(3):
        rng = np.random.default_rng(100 * group + seed)
        made = small_layout(group, (16, 64)[seed % 2])
        table, lens = few_rows(random_trees(rng, depth=3), made.block_size, seed)
        lens[rng.integers(len(lens))] = 0
        batch = forest_batch(table, lens, made, seed=seed)
        work = build_work(
            table, [1] * len(lens), lens.tolist(), phases="decode", backend="triton", layout=made, window=window, device="cpu"
        )
        expected = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale, sliding_window=window)
        assert_attention_close(*attend_lists(work, batch, made, window), *expected, torch.float32)


def test_the_random_forests_above_do_share() -> None:
    """Wide items, small shared ones, runs under runs: without them the test above shows little."""
    wide = narrow = nested = 0
    for group in (1, 3, 7):
        for seed in range(3):
            made = small_layout(group, (16, 64)[seed % 2])
            table, lens = few_rows(random_trees(np.random.default_rng(100 * group + seed), depth=3), made.block_size, seed)
            lists = decode_items(table, lens, made)
            wide += len(lists.wide)
            narrow += int((lists.narrow[:, 1] > 1).sum())
            nested += len(lists.wide) > 0 and int((lists.wide[:, 3] > 0).any())
    assert wide > 3 and narrow > 3 and nested > 0


def test_lists_serve_while_sequences_grow() -> None:
    made = small_layout(3)
    table, lens = forest([(600, [(400, None)] * 3)], 16)
    more = np.arange(1000, 1000 + 3 * 20, dtype=np.int32).reshape(3, 20)
    wide_table = np.concatenate([table[:, :-2], more], axis=1)
    grown = lens + 200
    batch = forest_batch(wide_table, grown, made)
    work = build_work(table, [1] * 3, lens.tolist(), phases="decode", backend="triton", layout=made, device="cpu")
    assert all(length < limit for length, limit in zip(grown.tolist(), work.rebuild_at, strict=True))
    expected = reference.decode_attention(*batch.double().decode_args(), scale=batch.scale)
    assert_attention_close(*attend_lists(work, batch, made), *expected, torch.float32)


class Touches:
    """How often the kernels load the first channel of each key of K/V head 0, as Triton's interpreter sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: torch.Tensor):
        self.counts = np.zeros((pool.shape[0], pool.shape[2]), dtype=np.int64)
        load = InterpreterBuilder.create_masked_load
        begin, strides = pool.data_ptr(), pool.stride()

        def counting(builder, ptrs, mask, *options):
            offsets = (ptrs.data.astype(np.int64) - begin)[np.broadcast_to(mask.data, ptrs.data.shape)] // pool.element_size()
            offsets = offsets[(offsets >= 0) & (offsets < pool.numel())]
            blocks, rest = np.divmod(offsets, strides[0])
            first = (rest < strides[1]) & (rest % strides[2] == 0)
            np.add.at(self.counts, (blocks[first], rest[first] // strides[2]), 1)
            return load(builder, ptrs, mask, *options)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)


@pytest.mark.parametrize("block_size", [16, 64])
def test_kernels_touch_each_block_as_often_as_the_list_says(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted a second time, where the loads are: 12 rows of 12 heads over 576 shared tokens, which take two tiles of rows, and pairs of
    them over 192 more. On a GPU, where loads are not seen, the result is checked alone."""
    made = layout_for(64, 12, torch.float16, block_size, 2)
    table, lens = forest([(576, [(192, [(64, None)] * 2)] * 6), (128, None)], block_size)
    device = kernel_device()
    batch = forest_batch(table, lens, made, device=device)
    query, k_pool, v_pool = batch.query.half(), batch.k_pool.half(), batch.v_pool.half()
    work = build_work(table, [1] * 13, lens.tolist(), phases="decode", backend="triton", layout=made, device=device)
    lists = decode_items(table, lens, made)
    assert sorted(lists.wide[:, 1].tolist()) == [16, *[24] * 6, 128] and len(range_rows(lists, made)) == 7
    expected = np.zeros((k_pool.shape[0], block_size), dtype=np.int64)
    for items in (lists.narrow, lists.wide):
        for _, _, seq, first, end in items.tolist():
            keys = np.arange(first, min(end, lens[seq]))
            np.add.at(expected, (table[seq, keys // block_size], keys % block_size), 1)
    assert expected.sum() == lists.loaded_keys and expected.max() == 2

    touches = [Touches(monkeypatch, pool) for pool in (k_pool, v_pool)]
    part_out, part_lse = work.partials(24, 64)
    arguments = (work, query, k_pool, v_pool, batch.block_table, batch.seq_lens, part_out, part_lse)
    for launch in (launch_narrow, launch_wide):
        launch(*arguments, scale=batch.scale, sliding_window=None, softcap=None)
    assert device.type != "cpu" or all(np.array_equal(touched.counts, expected) for touched in touches)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device=device)
    launch_merge(work, part_out, part_lse, out, lse)
    wanted = reference.decode_attention(
        query.double(), k_pool.double(), v_pool.double(), batch.block_table, batch.seq_lens, scale=batch.scale
    )
    assert_attention_close(out, lse, *wanted, torch.float16)


@pytest.mark.parametrize("window", [None, 300])
def test_decode_attention_runs_all_items_of_a_tree(window: int | None) -> None:
    """With no plan given the call builds one, and what many rows share is then the wide kernel's."""
    made = layout_for(64, 7, torch.float32, 16, 2)
    table, lens = forest([(500, [(100, [(30, None)] * 2)] * 6), (40, None)], 16)
    assert len(decode_items(table, lens, made, window=window).wide)
    batch = forest_batch(table, lens, made, device=kernel_device())
    options: dict[str, Any] = {"scale": batch.scale, "sliding_window": window}
    out, lse = decode_attention(*batch.decode_args(), **options)
    assert_attention_close(out, lse, *reference.decode_attention(*batch.double().decode_args(), **options), torch.float32)
