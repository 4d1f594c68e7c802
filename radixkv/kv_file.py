"""A safetensors file that ends in checksums of itself, replaced as a whole or not at all.

A file is a header (JSON: names, types, shapes, and strings of metadata), then the tensors' bytes, written and read in pieces, so that
neither side ever holds a copy of it. The last tensor has the CRC-32 of every mebibyte before it, the header included. Any reader of
safetensors opens such a file. Nothing in it is ever executed.

Source: the format of safetensors, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import escape
from math import prod
from pathlib import Path

from radixkv.progress import progress_bar

PIECE_BYTES = 1 << 20
CHECKSUM_BYTES = 4
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "U8": 1}
_CHECKSUMS = "checksums"
_LENGTH_BYTES = 8
_TEMPORARY = ".radixkv-tmp"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file: its name, the type as safetensors names it, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class FileWriter:
    """Bytes into a file, with the checksum of every piece on the way; made by `replacing`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._checksums = bytearray()
        self._checksum = 0
        self._num_in_piece = 0
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        if not len(data):  # such a view has no form as bytes
            return
        rest = memoryview(data).cast("B")
        while rest:
            part = rest[: PIECE_BYTES - self._num_in_piece]
            part = part[: os.write(self._descriptor, part)]
            self._checksum = zlib.crc32(part, self._checksum)
            self._num_in_piece += len(part)
            self.num_bytes += len(part)
            if self._num_in_piece == PIECE_BYTES:
                self._end_piece()
            rest = rest[len(part) :]

    def write_checksums(self) -> None:
        """Appends the last tensor; nothing may follow it."""
        if self._num_in_piece:
            self._end_piece()
        self.write(bytes(self._checksums))

    def _end_piece(self) -> None:
        self._checksums += self._checksum.to_bytes(CHECKSUM_BYTES, "little")
        self._checksum = self._num_in_piece = 0


def build_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file of these tensors, in this order, and of the checksums that follow them."""
    data_bytes = sum(spec.num_bytes for spec in specs)
    num_pieces, header = 0, b""
    # The header says how many checksums there are, which depends on how long it is.
    while num_pieces != (needed := -(-(len(header) + data_bytes) // PIECE_BYTES)) or not header:
        num_pieces = max(num_pieces, needed)
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        begin = 0
        for spec in [*specs, TensorSpec(_CHECKSUMS, "U8", (num_pieces * CHECKSUM_BYTES,))]:
            entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (begin, begin + spec.num_bytes)}
            begin += spec.num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return header


class FileReader:
    """A file that was verified from the first byte to the last; made by `open_verified`."""

    def __init__(self, path: Path, descriptor: int, header: bytes) -> None:
        """Raises ValueError: the header is not what `build_header` makes."""
        self.path = path
        self._descriptor = descriptor
        try:
            entries = json.loads(header[_LENGTH_BYTES:])
            self.metadata: dict[str, str] = entries.pop("__metadata__")
            del entries[_CHECKSUMS]
            specs = [TensorSpec(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()]
            well_formed = build_header(specs, self.metadata) == header
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"load: {path} is not a file that radixkv saved: {type(error).__name__} in its header: {error}") from None
        if not well_formed:
            raise ValueError(f"load: {path} is not a file that radixkv saved: its header is not laid out as radixkv's")
        self.num_bytes = os.fstat(descriptor).st_size
        self.specs = {spec.name: spec for spec in specs}
        self._offsets: dict[str, int] = {}
        offset = len(header)
        for spec in specs:
            self._offsets[spec.name] = offset
            offset += spec.num_bytes

    def read(self, name: str) -> bytes:
        """All bytes of one tensor."""
        data = bytearray(self.specs[name].num_bytes)
        self.read_into(memoryview(data), name, 0)
        return bytes(data)

    def read_into(self, target: memoryview, name: str, begin: int) -> None:
        """Fill `target` with the bytes of a tensor from byte `begin` on.

        Raises:
            ValueError: the file has become shorter since it was verified.
        """
        offset = self._offsets[name] + begin
        while target:
            num_read = os.preadv(self._descriptor, [target], offset)
            if not num_read:
                raise ValueError(f"load: {self.path} became shorter while it was read")
            target = target[num_read:]
            offset += num_read


@contextlib.contextmanager
def open_verified(path: Path, progress: bool | None = False) -> Iterator[FileReader]:
    """Open a file for reading after every byte of it was compared with its checksums; `progress` as in `progress_bar`.

    Raises:
        OSError: it cannot be opened or read.
        ValueError: it is damaged or something else; the message names it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"load: {path} is not a regular file")
        yield FileReader(path, descriptor, _verify(path, descriptor, progress))
    finally:
        os.close(descriptor)


def _verify(path: Path, descriptor: int, progress: bool | None) -> bytes:
    """Compares all checksums of a file and returns its header."""
    damaged = ValueError(f"load: {path} is damaged, or not a file that radixkv saved: its checksums do not fit; nothing was loaded")
    size = os.fstat(descriptor).st_size
    num_pieces = -(-size // (PIECE_BYTES + CHECKSUM_BYTES))
    body = size - num_pieces * CHECKSUM_BYTES
    if body <= max(_LENGTH_BYTES, (num_pieces - 1) * PIECE_BYTES):
        raise damaged
    checksums = _read_range(descriptor, body, num_pieces * CHECKSUM_BYTES)

    def fits(piece: int) -> bool:
        begin = piece * PIECE_BYTES
        checksum = zlib.crc32(_read_range(descriptor, begin, min(PIECE_BYTES, body - begin)))
        return checksums[piece * CHECKSUM_BYTES :][:CHECKSUM_BYTES] == checksum.to_bytes(CHECKSUM_BYTES, "little")

    # Reading and summing both let go of the interpreter.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers, progress_bar("verify", body, progress) as advance:
        for piece, is_intact in enumerate(workers.map(fits, range(num_pieces))):
            if not is_intact:
                raise damaged
            advance(min(PIECE_BYTES, body - piece * PIECE_BYTES))
    header_bytes = _LENGTH_BYTES + int.from_bytes(_read_range(descriptor, 0, _LENGTH_BYTES), "little")
    if header_bytes > body:
        raise damaged
    return _read_range(descriptor, 0, header_bytes)


def _read_range(descriptor: int, begin: int, num_bytes: int) -> bytes:
    """Bytes of a file, fewer if it ends before."""
    data = os.pread(descriptor, num_bytes, begin)
    while len(data) < num_bytes and (more := os.pread(descriptor, num_bytes - len(data), begin + len(data))):
        data += more
    return data


@contextlib.contextmanager
def replacing(path: Path, function: str = "save") -> Iterator[FileWriter]:
    """Write a new file in the place of `path`: at every moment the whole old one or the whole new one stands there.

    The bytes go to a temporary name in the same folder, reach the disk, and then take the place. On an exception the temporary file is
    removed. One that a killed process left behind is removed by the next call for the same path; one that is being written is not.
    Errors name `function`.

    Raises:
        OSError: the folder is missing or cannot be written, the disk is full, path is a folder, a device or a pipe; the old file is as it
            was.
    """
    path = Path(os.path.realpath(path))  # a link stays one, and what it points to is replaced
    if path.is_dir():
        raise IsADirectoryError(f"{function}: {path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        # Root may do it: /dev/null would be a file of that content from then on, for all programs.
        raise OSError(f"{function}: {path} is a device or a pipe, which a file would take the place of; name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{function}: the folder {path.parent} does not exist; create it first")
    _remove_leftovers(path)
    descriptor, temporary = _create_beside(path)
    try:
        try:
            writer = FileWriter(descriptor)
            yield writer
            if path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))
            os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _create_beside(path: Path) -> tuple[int, Path]:
    """A new file with a temporary name, locked as long as this process lives and has it open."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _try_lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, temporary
        os.close(descriptor)  # somebody took it for a leftover before it was locked


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f".{escape(path.name)}.*{_TEMPORARY}"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or another user's: neither is in the way
            descriptor = os.open(leftover, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _try_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    os.unlink(leftover)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int, operation: int) -> bool:
    """Whether the lock was had; a filesystem may have none, and then leftovers stay where they are."""
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        return False
    return True

