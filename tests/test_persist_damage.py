"""A file that is not whole is never half-loaded, and a save that does not end leaves the old one."""

from __future__ import annotations

import os
import random
import resource
import stat
from pathlib import Path

import numpy as np
import pytest

import radixkv
from radixkv import kv_file, persist
from radixkv.kv_file import PIECE_BYTES, FileReader, TensorSpec, build_header, open_verified, replacing
from radixkv.saved_nodes import SavedNodes
from tests.persisted import (
    contents,
    filled,
    ids_of,
    make_cache,
    prefixes,
    run_python,
    store,
)


# Damage -------------------------------------------------------------------------------------------------------------------------------
def refused(path: Path, cache: radixkv.PrefixCache) -> None:
    with pytest.raises(ValueError, match=r"load: .*damaged.* (is damaged|not a file that radixkv saved)"):
        cache.load(path)


def test_a_truncated_file_is_refused(tmp_path):
    cache, other = filled(), filled()
    cache.save(tmp_path / "prefixes")
    before, data = contents(other), (tmp_path / "prefixes").read_bytes()
    path = tmp_path / "damaged"
    lengths = {*range(0, 40), *range(0, len(data), 97), *range(len(data) - 40, len(data))}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        refused(path, other)
    for longer in (data + b"\0", data + b"\0" * 4, data + data, b"\0" + data):
        path.write_bytes(longer)
        refused(path, other)
    assert contents(other) == before


def test_a_flipped_bit_is_refused(tmp_path):
    cache, other = make_cache(num_blocks=700, num_layers=5), make_cache(num_blocks=700, num_layers=5)
    store(cache, ids_of(4000, 1))
    cache.save(tmp_path / "prefixes")
    path, data = tmp_path / "damaged", bytearray((tmp_path / "prefixes").read_bytes())
    path.write_bytes(data)
    assert len(data) > 2 * PIECE_BYTES
    rng = random.Random(0)
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    places = [*range(12), *rng.sample(range(header_bytes), 60), *rng.sample(range(len(data)), 120), *range(len(data) - 14, len(data))]
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(bytes([data[place] ^ 1 << rng.randrange(8)]))
            file.flush()
            refused(path, other)
            file.seek(place)
            file.write(data[place : place + 1])
    assert contents(other) == set()
    other.load(path)
    assert contents(other) == contents(cache)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"{}" * 500, b"\xff" * (PIECE_BYTES + 10)])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "damaged").write_bytes(content)
    refused(tmp_path / "damaged", make_cache())


def rewritten(path: Path, target: Path, change) -> None:
    """A file with good checksums whose tensors and metadata were changed before they were made."""
    with open_verified(path) as file:
        specs, metadata = list(file.specs.values()), dict(file.metadata)
        data = {spec.name: file.read(spec.name) for spec in specs}
    specs = change(specs, metadata, data) or specs
    with replacing(target) as writer:
        writer.write(build_header(specs, metadata))
        for spec in specs:
            writer.write(data[spec.name])
        writer.write_checksums()


def changed_nodes(column: int, value: int):
    def change(specs, metadata, data):
        nodes = np.frombuffer(data["nodes"], "<i8").reshape(-1, SavedNodes.NUM_COLUMNS).copy()
        nodes[-1, column] = value
        data["nodes"] = nodes.tobytes()

    return change


def changed_metadata(**values: str):
    return lambda specs, metadata, data: metadata.update(values)


def without_last_tensor(specs, metadata, data):
    return specs[:-1]


def negative_tokens(specs, metadata, data):
    data["tokens"] = b"\xff" * len(data["tokens"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_nodes(0, 10_000), "nodes are not those of a tree"),
        (changed_nodes(0, -2), "nodes are not those of a tree"),
        (changed_nodes(1, 10_000), "nodes are not those of a tree"),
        (changed_nodes(1, -1), "nodes are not those of a tree"),
        (changed_nodes(2, 77), "nodes are not those of a tree"),
        (changed_nodes(3, 2**62), "nodes are not those of a tree"),
        (negative_tokens, "nodes are not those of a tree"),
        (changed_metadata(version="1"), "version 1, this release reads radixkv-prefixes version 2"),
        (changed_metadata(format="other"), "is of format other version 2, this release reads"),
        (changed_metadata(namespaces="[]"), "nodes are not those of a tree"),
        (changed_metadata(namespaces="["), "not a file that radixkv saved"),
        (changed_metadata(namespaces="[" * 100_000), "not a file that radixkv saved"),
        (changed_metadata(fingerprint="[1]"), "not a file that radixkv saved"),
        (changed_metadata(computed_tokens_per_s='"fast"'), "its rate is no number"),
        (without_last_tensor, "its tensors are not those that its fingerprint says"),
    ],
)
def test_a_file_that_was_made_up_is_refused(tmp_path, change, message):
    cache, other = filled(), filled()
    cache.save(tmp_path / "prefixes")
    rewritten(tmp_path / "prefixes", tmp_path / "made-up", change)
    before = contents(other)
    with pytest.raises(ValueError, match=f"load: .*made-up.*{message}"):
        other.load(tmp_path / "made-up")
    assert contents(other) == before


def test_a_file_of_somebody_elses_safetensors_is_refused(tmp_path):
    specs = [TensorSpec("a", "F32", (2,))]
    header = build_header(specs, {}).replace(b'"shape":[2]', b'"shape":[3]')
    with replacing(tmp_path / "other") as file:
        file.write(header)
        file.write(b"\0" * 8)
        file.write_checksums()
    with pytest.raises(ValueError, match="other is not a file that radixkv saved: its header is not laid out as radixkv's"):
        make_cache().load(tmp_path / "other")


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_an_error_in_the_middle_of_loading_leaves_the_cache_as_it_was(tmp_path, monkeypatch, error):
    cache, other = filled(), make_cache()
    store(other, ids_of(70, 1)[:55])
    cache.save(tmp_path / "prefixes")
    before, free = contents(other), other.pool.num_free
    real_read, calls = FileReader.read_into, 0

    def read_into(self, target, name, begin):
        nonlocal calls
        calls += 1
        if name == "values.1":
            raise error
        real_read(self, target, name, begin)

    monkeypatch.setattr(FileReader, "read_into", read_into)
    with pytest.raises(type(error)):
        other.load(tmp_path / "prefixes")
    assert calls > 3
    assert (contents(other), other.pool.num_free) == (before, free)
    monkeypatch.undo()
    other.load(tmp_path / "prefixes")
    assert prefixes(other) == prefixes(cache)


def test_a_file_that_is_cut_after_it_was_verified_is_refused(tmp_path, monkeypatch):
    cache, other = filled(), make_cache()
    cache.save(tmp_path / "prefixes")
    real_plan = persist.plan_load

    def plan(*args):
        os.truncate(tmp_path / "prefixes", 3000)
        return real_plan(*args)

    monkeypatch.setattr(persist, "plan_load", plan)
    with pytest.raises(ValueError, match="prefixes became shorter while it was read"):
        other.load(tmp_path / "prefixes")
    assert contents(other) == set()
    assert other.pool.num_free == other.pool.num_blocks


# Writing ------------------------------------------------------------------------------------------------------------------------------
def test_killed_at_any_moment_the_old_file_still_loads(tmp_path):
    code = "import sys; from pathlib import Path; from tests.kill_worker import main; main(Path(sys.argv[1]))"
    assert int(run_python(code, tmp_path).split()[0]) >= 45


def test_an_error_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    cache, path = filled(), tmp_path / "prefixes"
    cache.save(path)
    before = path.read_bytes()
    store(cache, ids_of(300, 8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for name in ("fsync", "replace"):

        def fail(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kv_file.os, name, fail)
        with pytest.raises(OSError, match="No space left"):
            cache.save(path)
        monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    cache.check()


def test_leftovers_go_and_what_is_being_written_stays(tmp_path):
    path = tmp_path / "a[b]*.kv"
    dead = tmp_path / ".a[b]*.kv.0123456789abcdef.radixkv-tmp"
    others = [tmp_path / ".other.kv.0123456789abcdef.radixkv-tmp", tmp_path / "a[b]*.kv.bak"]
    for name in (dead, *others):
        name.write_bytes(b"x")
    with replacing(path) as first:
        assert not dead.exists()
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_links_and_permissions_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    cache = filled()
    cache.save(target)
    target.chmod(0o640)
    link.symlink_to(target)
    store(cache, ids_of(20, 40))
    cache.save(link)
    assert link.is_symlink() and stat.S_IMODE(target.stat().st_mode) == 0o640
    other = make_cache()
    other.load(link)
    assert prefixes(other) == prefixes(cache)


def test_paths_that_cannot_be(tmp_path):
    cache = filled()
    with pytest.raises(FileNotFoundError, match="missing"):
        cache.load(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"save: the folder .*nowhere does not exist"):
        cache.save(tmp_path / "nowhere" / "prefixes")
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        cache.save(tmp_path)
    with pytest.raises(ValueError, match="is not a regular file"):
        cache.load(tmp_path)
    with pytest.raises(TypeError):
        cache.save(None)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="save: .*pipe is a device or a pipe.*; name a file"):
        cache.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()  # as root it became a file, and so would /dev/null
    cache.save(str(tmp_path / "text"))
    assert cache.load(str(tmp_path / "text")).known_tokens == cache.tree.num_tokens
    cache.check()


def test_without_permission(tmp_path):
    """In a process that is nobody, because to root everything is permitted."""
    folder = tmp_path / "locked"
    folder.mkdir()
    filled().save(folder / "prefixes")
    (folder / "prefixes").chmod(0o600)
    code = (
        "import os, sys, radixkv.persist\n"
        "from tests.persisted import contents, make_cache, store\n"
        "cache = make_cache()\n"
        "store(cache, range(40))\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "else: os.chmod(sys.argv[1], 0o500); os.chmod(sys.argv[1] + '/prefixes', 0)\n"
        "for call in (cache.save, cache.load):\n"
        "    try: call(sys.argv[1] + '/prefixes')\n"
        "    except PermissionError as error: print(error)\n"
        "assert contents(cache) == {((), tuple(range(40)))}\n"
    )
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and parent != Path(parent.root):
            parent.chmod(parent.stat().st_mode | 0o011)
    output = run_python(code, folder)
    folder.chmod(0o700)
    assert output.count("Permission denied") == 2
    assert [entry.name for entry in folder.iterdir()] == ["prefixes"]


def test_neither_side_holds_a_copy_of_the_pool(tmp_path):
    """96 MB of K/V go out and in with less than a quarter of that in memory at any time."""
    code = (
        "import resource, sys, torch\n"
        "from radixkv import BlockPool, PrefixCache\n"
        "from radixkv.attention import Backend\n"
        "torch.set_num_threads(1)\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "def make():\n"
        "    pool = BlockPool(512, num_layers=3, num_kv_heads=4, head_dim=64, block_size=32, dtype=torch.float32, device='cpu')\n"
        "    for tensor in [*pool.keys, *pool.values]: tensor.fill_(1)\n"
        "    return PrefixCache(pool, Backend('torch', num_heads=4, pool=pool))\n"
        "cache, other = make(), make()\n"
        "cache.tree.insert(range(512 * 32), cache.pool.allocate(512), cache.full_namespace())\n"
        "small = PrefixCache(make().pool, cache.backend)\n"
        "small.tree.insert(range(64), small.pool.allocate(2), small.full_namespace())\n"
        "small.save(sys.argv[1]); small.load(sys.argv[1])\n"
        "before = peak()\n"
        "size = cache.save(sys.argv[1]).num_bytes\n"
        "saved = peak()\n"
        "assert other.load(sys.argv[1]).loaded_tokens == 512 * 32\n"
        "print(size, saved - before, peak() - saved)\n"
    )
    size, saving, loading = map(int, run_python(code, tmp_path / "prefixes").split())
    assert size > 96 << 20
    assert saving < 24 and loading < 24
