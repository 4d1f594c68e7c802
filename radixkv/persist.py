"""Save a cache's prefixes to a file and load them into another one: each cached token's K/V once, by tokens and not by blocks.

A file is one of safetensors (see kv_file.py) with the tree's nodes, their tokens, and per layer the K and V of all tokens in node order.
Which blocks a token lay in is not in it, so it loads into a pool of another block size, or of fewer blocks.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixkv.graft import fill
from radixkv.kv_file import FileReader, TensorSpec, build_header, open_verified, replacing
from radixkv.kv_transfer import write_pools
from radixkv.load_plan import plan_load
from radixkv.pool import BlockPool
from radixkv.progress import progress_bar
from radixkv.saved_facts import decode_namespace, encode_namespace, normalize, require_same
from radixkv.saved_nodes import SavedNodes
from radixkv.snapshot import Snapshot

if TYPE_CHECKING:
    from radixkv.cache import PrefixCache

logger = logging.getLogger("radixkv")

FORMAT, FORMAT_VERSION = "radixkv-prefixes", "2"
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
Fingerprint = Callable[[], Mapping[str, object]]


@dataclass(frozen=True)
class SaveReport:
    """What `save` wrote.

    Attributes:
        path: the file. num_tokens: tokens whose K/V is in it. num_nodes: runs of tokens that they form.
        num_bytes: the file's size. seconds: from the call to the moment when it was safe on the disk.
    """

    path: Path
    num_tokens: int
    num_nodes: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.num_bytes / self.seconds / 1e6
        return f"saved {self.num_tokens} tokens in {self.num_bytes / 1e6:.1f} MB to {self.path} ({self.seconds:.2f} s, {rate:.0f} MB/s)"


@dataclass(frozen=True)
class LoadReport:
    """What `load` brought, and whether that was worth it.

    Attributes:
        path: the file. num_bytes: its size.
        loaded_tokens, known_tokens, left_out_tokens: of the file's tokens those that are cached now and were not before, those that were
            cached already, and those for which there was no free block. They add up to the file's tokens.
        seconds: from the call to its return, the verification of the whole file included.
        computed_tokens_per_s: the best rate at which this cache has seen its model compute prompts. When it has seen none, that of the
            cache that saved the file, which may have been on another machine; None when that had seen none either.
        rate_is_saved: whether it is the file's.
    """

    path: Path
    num_bytes: int
    loaded_tokens: int
    known_tokens: int
    left_out_tokens: int
    seconds: float
    computed_tokens_per_s: float | None
    rate_is_saved: bool

    @property
    def loaded_tokens_per_s(self) -> float:
        """Tokens loaded per second of the call."""
        return self.loaded_tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """The file's bytes per second of the call."""
        return self.num_bytes / self.seconds

    @property
    def beats_recomputing(self) -> bool | None:
        """Whether the model would have taken longer for the loaded tokens; None when nothing was loaded or no rate is known."""
        if self.computed_tokens_per_s is None or not self.loaded_tokens:
            return None
        return self.loaded_tokens_per_s > self.computed_tokens_per_s

    def __str__(self) -> str:
        text = (
            f"loaded {self.loaded_tokens} tokens from {self.path} "
            f"({self.known_tokens} were cached already, {self.left_out_tokens} left out for want of free blocks) "
            f"in {self.seconds:.2f} s: {self.bytes_per_s / 1e6:.0f} MB/s, {self.loaded_tokens_per_s:.0f} tokens/s"
        )
        if self.beats_recomputing is None:
            return f"{text}; whether that beats recomputing is not known, as long as nothing was computed"
        verdict = "beats" if self.beats_recomputing else "does not beat"
        where = ", as measured where the file was saved" if self.rate_is_saved else ""
        return f"{text}, which {verdict} recomputing at {self.computed_tokens_per_s:.0f} tokens/s{where}"


def save_cache(cache: PrefixCache, path: str | os.PathLike[str], fingerprint: Fingerprint, progress: bool | None) -> SaveReport:
    """See `PrefixCache.save`; `fingerprint` is called under the cache's lock and may first drop what is stale."""
    started = time.perf_counter()
    path = Path(path)
    with replacing(path) as file:
        with cache.hold():
            facts = _facts(cache, fingerprint)
            snapshot = Snapshot(cache)
            nodes = snapshot.nodes()
            specs = _specs(cache.pool, len(nodes.parents), nodes.num_tokens)
            metadata = {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "fingerprint": json.dumps(facts),
                "computed_tokens_per_s": json.dumps(cache.meter.tokens_per_s()),
                "eviction": cache.tree.queue.name,
                "namespaces": json.dumps([encode_namespace(namespace) for namespace in nodes.namespaces]),
            }
            file.write(build_header(specs, metadata))
            file.write(nodes.to_array().data)
            file.write(nodes.worths.astype("<f8").data)
            file.write(nodes.tokens)
            kv_bytes = 2 * cache.pool.num_layers * specs[-1].num_bytes
            with progress_bar("save", kv_bytes, progress) as advance:
                write_pools(file, snapshot.sources, advance)
        file.write_checksums()
    report = SaveReport(path, nodes.num_tokens, len(nodes.parents), file.num_bytes, time.perf_counter() - started)
    logger.info("%s", report)
    return report


def load_cache(cache: PrefixCache, path: str | os.PathLike[str], fingerprint: Fingerprint, progress: bool | None) -> LoadReport:
    """See `PrefixCache.load`; `fingerprint` as in `save_cache`."""
    started = time.perf_counter()
    path = Path(path)
    with open_verified(path, progress) as file:
        nodes, saved_facts, saved_rate = _read_index(file, cache.tree.queue.name)
        with cache.hold():
            require_same(path, saved_facts, _facts(cache, fingerprint))
            _require_specs(file, cache.pool, nodes)
            namespaces = [cache.from_saved(namespace) for namespace in nodes.namespaces]
            plan = plan_load(nodes, namespaces, cache.tree, cache.pool.num_free)
            fill(cache, file, namespaces, plan, progress)
            own_rate = cache.meter.tokens_per_s()
    report = LoadReport(
        path,
        file.num_bytes,
        plan.num_loaded,
        plan.num_known,
        nodes.num_tokens - plan.num_loaded - plan.num_known,
        time.perf_counter() - started,
        saved_rate if own_rate is None else own_rate,
        rate_is_saved=own_rate is None and saved_rate is not None,
    )
    logger.info("%s", report)
    return report


def _facts(cache: PrefixCache, fingerprint: Fingerprint) -> dict[str, object]:
    """All that must be equal where a file is loaded to what it was where it was saved."""
    given, pool = fingerprint(), cache.pool  # in this order: what follows the weights may replace the pool
    own = {
        "dtype": str(pool.dtype).removeprefix("torch."),
        "num_layers": pool.num_layers,
        "num_kv_heads": pool.num_kv_heads,
        "head_dim": pool.head_dim,
        "namespace": encode_namespace(cache.namespace),
    }
    if taken := own.keys() & given.keys():
        raise ValueError(f"fingerprint: {', '.join(sorted(taken))} is taken by radixkv; choose another name")
    return normalize({**own, **given})


def _specs(pool: BlockPool, num_nodes: int, num_tokens: int) -> list[TensorSpec]:
    kv_shape = (num_tokens, pool.num_kv_heads, pool.head_dim)
    names = [f"{what}.{layer}" for layer in range(pool.num_layers) for what in ("keys", "values")]
    index = [
        TensorSpec("nodes", "I64", (num_nodes, SavedNodes.NUM_COLUMNS)),
        TensorSpec("worths", "F64", (num_nodes,)),
        TensorSpec("tokens", "I32", (num_tokens,)),
    ]
    return index + [TensorSpec(name, _DTYPES[pool.dtype], kv_shape) for name in names]


def _read_index(file: FileReader, eviction: str) -> tuple[SavedNodes, dict[str, object], float | None]:
    """The nodes, the fingerprint and the rate of a file; the tensors of K/V are not looked at.

    What another policy than `eviction` knew of the nodes' use means nothing to that, and is left out.
    """
    kind, version = file.metadata.get("format"), file.metadata.get("version")
    if kind != FORMAT or version != FORMAT_VERSION:
        raise ValueError(f"load: {file.path} is of format {kind} version {version}, this release reads {FORMAT} version {FORMAT_VERSION}")
    try:
        rate = json.loads(file.metadata["computed_tokens_per_s"])
        if not (rate is None or (type(rate) is float and rate > 0)):
            raise ValueError("its rate is no number")
        facts = dict(json.loads(file.metadata["fingerprint"]))
        namespaces = [decode_namespace(part) for part in json.loads(file.metadata["namespaces"])]
        nodes = SavedNodes.from_bytes(file.read("nodes"), file.read("worths"), file.read("tokens"), namespaces)
        if file.metadata["eviction"] != eviction:
            nodes = replace(nodes, worths=np.full(len(nodes.worths), np.nan))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"load: {file.path} is not a file that radixkv saved: {error}") from None
    return nodes, facts, rate


def _require_specs(file: FileReader, pool: BlockPool, nodes: SavedNodes) -> None:
    expected = _specs(pool, len(nodes.parents), nodes.num_tokens)
    if list(file.specs.values()) != expected:
        raise ValueError(f"load: {file.path} is not a file that radixkv saved: its tensors are not those that its fingerprint says")
