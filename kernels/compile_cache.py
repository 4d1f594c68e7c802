"""Where Triton keeps what it compiles, when the place it would choose cannot be written."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile

import triton

logger = logging.getLogger("radixkv")


def use_writable_cache() -> None:
    """See that Triton can compile: where its cache folder cannot be made or written, take a temporary one for this process, and say so.

    Containers often have a read-only home, in which Triton's first compilation fails. A folder that the user named himself
    (TRITON_CACHE_DIR) is treated alike. Several processes may share a folder: Triton replaces files in one piece.
    """
    folder = triton.knobs.cache.dir
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        triton.knobs.cache.dir = tempfile.mkdtemp(prefix="radixkv-triton-")
        atexit.register(_remove, triton.knobs.cache.dir, os.getpid())
        logger.warning("Triton's cache folder %s cannot be written (%s): compiling in %s instead", folder, error, triton.knobs.cache.dir)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it, which runs the same exit functions
        shutil.rmtree(folder, ignore_errors=True)
