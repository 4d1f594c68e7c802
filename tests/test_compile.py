"""Every kernel compiles for every kind of GPU without one, and the machine code for sm_90 is what the configurations promise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import pytest

from radixkv.kernels.configs import ARCHS, BLOCK_SIZES, CHUNK, DTYPES, HEAD_DIMS, all_configs, decode_config, prefill_config
from tests.compiled import read_json

ATTENTION = {"_prefill_kernel", "_extend_kernel", "_decode_kernel"}
KERNELS = ATTENTION | {"_merge_kernel", "_store_kernel", "_rope_store_kernel", "_copy_kernel", "_advance_kernel"}
# Largest shared memory of one program.
SHARED_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
Row = dict[str, Any]


def run_worker(argument: str) -> Any:
    return read_json("tests/compile_worker.py", argument)


@lru_cache(maxsize=1)
def compiled() -> dict[str, list[Row]]:
    """Compile for all targets, two at a time, once."""
    with ThreadPoolExecutor(2) as threads:
        # The longest list first.
        targets = sorted(SHARED_BYTES, key=lambda target: target != "sm_90")
        return dict(zip(targets, threads.map(run_worker, targets), strict=True))


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_kernel_compiles_at_every_head_dim(target: str) -> None:
    got = {(row["kernel"], row["head_dim"]) for row in compiled()[target]}
    assert got == {(kernel, head_dim) for kernel in KERNELS for head_dim in HEAD_DIMS}


@pytest.mark.parametrize("target", SHARED_BYTES)
def test_shared_memory_fits_the_gpu(target: str) -> None:
    """A program that asks for more fails only at launch, on the user's machine."""
    too_large = [row for row in compiled()[target] if row["shared_bytes"] > SHARED_BYTES[target]]
    assert not too_large


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_no_register_spills_on_sm_90(kernel: str) -> None:
    """Many rows may spill what only their loops' ends need."""
    rows = [row for row in compiled()["sm_90"] if row["kernel"] == kernel and row["head_dim"] in (64, 128)]
    assert rows
    where = "loop_spills" if kernel in ("_prefill_kernel", "_extend_kernel") else "spills"
    assert not [row for row in rows if row[where]]


@pytest.mark.parametrize("kernel", ["_prefill_kernel", "_extend_kernel"])
def test_many_rows_in_half_precision_run_on_wgmma(kernel: str) -> None:
    rows = [row for row in compiled()["sm_90"] if row["kernel"] == kernel and row["dtype"] != "float32"]
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16"}
    assert not [row for row in rows if not row["wgmma"]]


@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-1.5b", "smollm2-135m"])
def test_head_shape_of_a_real_model_compiles(shape: str) -> None:
    rows = compiled()["sm_90"]
    assert {row["kernel"] for row in rows if row["shape"] == shape} == ATTENTION | {"_merge_kernel"}


def test_sm_90_covers_the_configuration_table() -> None:
    """Each configuration at head_dim 64 and 128, bf16 at every block size, the others with a block below and above a tile."""
    rows = {
        (row["kernel"].strip("_").removesuffix("_kernel"), row["head_dim"], row["dtype"], row["block_size"], row["num_warps"])
        for row in compiled()["sm_90"]
    }
    wanted = {
        (case.kernel, case.head_dim, str(case.dtype).removeprefix("torch."), case.block_size, case.config.num_warps)
        for case in all_configs()
        if case.arch == "cuda" and case.head_dim in (64, 128)
    }
    missing = {case for case in wanted - rows if case[2] == "bfloat16" or case[3] in (16, 64)}
    assert not missing


def test_batches_of_any_size_share_one_compilation() -> None:
    """Elsewhere kernels were compiled anew per batch size, in the middle of a request."""
    kernels = [variant.split()[0] for variant in run_worker("variants")]
    assert {kernel: kernels.count(kernel) for kernel in kernels} == {
        # With a window and without.
        "_prefill_kernel": 2,
        "_extend_kernel": 2,
        "_decode_kernel": 1,
        # merge_partials has other rows than a step.
        "_merge_kernel": 2,
        # With source rows and without.
        "_store_kernel": 2,
        "_rope_store_kernel": 2,
        "_copy_kernel": 1,
        "_advance_kernel": 1,
    }


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 16])
def test_tiles_are_the_same_on_every_gpu(group: int) -> None:
    """A work list is built before anyone asks where it will run."""
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            for block_size in BLOCK_SIZES:
                cases = [(prefill_config(head_dim, group, dtype, block_size, arch), arch) for arch in ARCHS]
                assert len({config.tile_q for config, _ in cases}) == 1
                assert cases[0][0].tile_q * group <= cases[0][0].tile_rows


@pytest.mark.parametrize("arch", ARCHS)
def test_splits_lie_in_one_block_and_tiles_in_one_chunk(arch: str) -> None:
    """The decode kernel loads one block id per split, and cuts chunks into whole tiles; Triton 3.6 refuses dots over fewer than 16."""
    for case in all_configs():
        if case.kernel == "decode" and case.arch == arch:
            config = decode_config(case.head_dim, case.group, case.dtype, case.block_size, arch)
            assert config.tile_kv // config.splits == 16 == min(BLOCK_SIZES)
            assert CHUNK % config.tile_kv == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((300, 7, DTYPES[2], 16), "head_dim must be 16 to 256, got 300", id="head_dim"),
        pytest.param((64, 200, DTYPES[2], 16), "group must be 1 to 128 at head_dim 64, got 200", id="group"),
        pytest.param((64, 7, None, 16), "dtype must be float32, float16 or bfloat16, got None", id="dtype"),
        pytest.param((64, 7, DTYPES[2], 24), "block_size must be a power of two from 16, got 24", id="block_size"),
    ],
)
def test_what_no_configuration_covers_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill_config(*arguments)
