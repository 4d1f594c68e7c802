"""`model.radixkv`: a `PrefixCache` that follows one model's weights and takes what transformers returns."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from radixkv.attention import Backend, choose_backend
from radixkv.cache import PrefixCache
from radixkv.eviction import policy_maker
from radixkv.integration.adapters import adapters_in, numbered, unnumbered
from radixkv.integration.branch import Branch
from radixkv.integration.dynamic_cache import insert_dynamic
from radixkv.integration.families import ModelShape, model_shape
from radixkv.integration.fingerprint import digest_settings, digest_tokenizer, digest_weights, model_facts
from radixkv.integration.graphs import CudaCapture, DecodeGraphs, why_not_captured
from radixkv.integration.model_weights import Change, ModelWeights
from radixkv.integration.paged_cache import PagedCache
from radixkv.integration.versions import held_cache
from radixkv.pin import Pin, Pins
from radixkv.pool import BlockPool, default_num_blocks, describe_default, require_block_size
from radixkv.progress import require_progress
from radixkv.schedule import Order
from radixkv.sequence import Batch, CallOptions
from radixkv.token_key import namespace_of, require_namespace
from radixkv.tree import Lease

if TYPE_CHECKING:
    from radixkv.integration.answers import Answer
    from radixkv.persist import LoadReport, SaveReport

logger = logging.getLogger("radixkv")


@dataclass(frozen=True)
class CacheOptions:
    """What the user asked of `radixkv.patch_model`; see there."""

    num_blocks: int | None
    block_size: int
    backend: str
    namespace: tuple
    exact: bool
    cuda_graphs: bool
    eviction: str
    pin_budget: float
    host_bytes: int


class ModelCache(PrefixCache):
    """The prefix cache of one patched model.

    Args:
        shape: the model's attention, device and type.
        options: of `radixkv.patch_model`.

    Attributes:
        graphs: the captured decode steps; None where steps are not captured.
        last_change: what was last seen to have changed in the model's weights, in words; None if nothing has.
        tokenizer: for `generate_many`; the user's to set.
    """

    # The part of the namespace that says which adapters are switched on.
    _adapters: tuple = ()

    def __init__(self, shape: ModelShape, options: CacheOptions):
        for keyword in ("exact", "cuda_graphs"):
            if not isinstance(getattr(options, keyword), bool):
                raise ValueError(f"patch_model: {keyword} must be True or False, got {getattr(options, keyword)!r}")
        name, self._backend_reason = choose_backend(options.backend, shape.device)
        if options.exact and name != "triton":
            raise ValueError(f"exact=True needs the Triton kernels, and the backend is {name!r}: leave it out, or use backend='triton'")
        require_block_size("patch_model", options.block_size)
        policy_maker("patch_model", options.eviction)
        Pins(options.pin_budget)
        self.shape, self.options = shape, replace(options, backend=name)
        num_blocks = options.num_blocks
        if num_blocks is None:
            bytes_per_block = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize * options.block_size
            num_blocks = default_num_blocks(shape.device, bytes_per_block, options.block_size)
        self.num_blocks = num_blocks
        pool = self._make_pool(shape)
        super().__init__(pool, self._make_backend(shape, pool), options.namespace, options.eviction, options.pin_budget, options.host_bytes)
        self.graphs = self._make_graphs(shape)
        self._weights: ModelWeights | None = None
        self.last_change: str | None = None
        self._model: weakref.ref[PreTrainedModel] | None = None
        self.tokenizer: Any = None
        # The digest of the weights, and for which of their versions, type and device.
        self._digest: tuple[tuple, str] | None = None

    def follow(self, model: PreTrainedModel) -> None:
        """See whether the model's weights, type or device changed since the last call, and which adapters are switched on.

        Nothing that was computed with what has changed is served again; other adapters' K/V are found again when these are switched on.
        """
        with self.lock:
            self._model = weakref.ref(model)
            if (model.dtype, model.device) != (self.shape.dtype, self.shape.device):
                shape = model_shape(model)
                choose_backend(self.backend.name, shape.device)  # raises if it cannot run there
                pool = self._make_pool(shape)
                self.replace_pool(pool, self._make_backend(shape, pool))
                self.shape, self.graphs = shape, self._make_graphs(shape)
                logger.info("the model was moved or cast to %s on %s: its cache starts over, empty", shape.dtype, shape.device)
            if self._weights is None:
                self._weights = ModelWeights(model)
            elif (change := self._weights.update(model)) is not None:
                self._take_in(change)
            self._adapters = self._weights.selection.namespace()

    def describe(self) -> str:
        """The choices that were made at patch time, and why, in one line."""
        pool = self.pool
        num_bytes = 2 * pool.num_layers * pool.keys[0].nbytes
        why = "as asked" if self.options.num_blocks is not None else describe_default(pool.device)
        captures = "captured" if self.graphs is not None else f"not captured ({self._why_not_captured(self.shape)})"
        return (
            f"backend {self.backend.name} ({self._backend_reason}); {pool.num_blocks} blocks of {pool.block_size} tokens, "
            f"{num_bytes / 2**30:.2f} GiB ({why}); eviction {self.options.eviction}; decode steps {captures}"
        )

    def match_prefix(self, token_ids: Any, namespace: tuple = (), priority: int | None = None) -> Lease:
        with self.lock:
            self._follow_again()
            return super().match_prefix(token_ids, namespace, priority)

    def pin(self, token_ids: Any, namespace: tuple = ()) -> Pin:
        with self.lock:
            self._follow_again()
            return super().pin(token_ids, namespace)

    match_prefix.__doc__, pin.__doc__ = PrefixCache.match_prefix.__doc__, PrefixCache.pin.__doc__

    def invalidate(self) -> None:
        super().invalidate()
        self._forget_graphs()

    def full_namespace(self, namespace: tuple = ()) -> tuple:
        weights, *others = super().full_namespace(namespace)
        return (weights, *self._adapters, *others)

    def is_current(self, namespace: tuple) -> bool:
        numbers = {} if self._weights is None else self._weights.numbers
        return super().is_current(namespace) and all(numbers.get(name) == number for name, number in adapters_in(namespace))

    def to_saved(self, namespace: tuple) -> tuple:
        return unnumbered(super().to_saved(namespace))

    def from_saved(self, namespace: tuple) -> tuple:
        return super().from_saved(numbered(namespace, {} if self._weights is None else self._weights.numbers))

    def note_adapters(self, batch: Batch | None) -> None:
        """See that a batch still runs with the adapters that it was admitted with; if not, nothing of it will be stored."""
        if batch is not None and self._weights is not None:
            batch.is_mixed |= self._weights.selection.namespace() != batch.namespace[1:-2]

    def names_adapters_per_row(self) -> bool:
        """Whether the rows of the present call name adapters of their own (`adapter_names` of peft)."""
        return self._weights is not None and self._weights.selection.is_per_row()

    def insert(self, output: Any, cache: Cache | None = None, priority: int | None = None) -> None:
        """Store K/V for later prompts: of an output of `generate()`, or of a cache that transformers filled.

        Args:
            output: what `generate(prefix_cache=..., return_dict_in_generate=True)` returned; it is spent by this. One that was stored
                already is left alone. Or, with `cache`, token ids [n] or [rows, n] without padding: list, numpy or torch integers.
            cache: the `DynamicCache` that holds the K/V of those tokens, or of their first ones.
            priority: from now on that of what is stored; the lowest is evicted first. None takes that of the lease which generate() used,
                if any. With `patch_model(eviction="priority")` only.

        Raises:
            TypeError: output is neither. ValueError: the cache does not fit the model or the tokens, or the policy takes no such
                priority. OutOfBlocks: no room.
        """
        if cache is not None:
            with self.lock:
                self._follow_again()
                insert_dynamic(self, output, cache, priority)
            return
        held = held_cache(output)
        if not isinstance(held, PagedCache):
            raise TypeError(
                "insert: expected what generate() of a patched model returns with return_dict_in_generate=True, got "
                f"{type(output).__name__} without such a cache; to store a cache of transformers' own, call insert(token_ids, cache)"
            )
        if held.prefix_cache is not self:
            raise ValueError("insert: this output is of another model: insert it through that model's handle")
        held.store(priority)

    def new_cache(self, namespace: tuple = (), *, reuse: bool = True) -> PagedCache:
        """An empty cache for a loop of one's own, in place of transformers' `DynamicCache`: `model(input_ids, past_key_values=cache)`.

        Args:
            namespace: what to add to this cache's namespace. reuse: whether tokens may be taken from the prefix cache.

        Returns:
            The cache; its first call finds its rows, and `store()` keeps them for later prompts. See `PagedCache`.

        Raises:
            ValueError: namespace is not a tuple, or reuse not True or False.
        """
        require_namespace("new_cache", namespace)
        if not isinstance(reuse, bool):
            raise ValueError(f"new_cache: reuse must be True or False, got {reuse!r}")
        return PagedCache(self, CallOptions(namespace, reuse))

    def branch(self, token_ids: Any, namespace: tuple = ()) -> Branch:
        """Continue one prefix in several ways, best-of-n or tree search, without copying its K/V.

            with model.radixkv.branch(prompt_ids) as branch:
                for cache in branch.fork(4):
                    model.generate(prompt_ids, past_key_values=cache, do_sample=True, max_new_tokens=50)

        Args:
            token_ids: [n] or [1, n] token ids, at least one; those that are not cached are computed.
            namespace: what to add to this cache's namespace.

        Returns:
            The branch, to be used in a `with` block.

        Raises:
            ValueError: token_ids is not a flat run of token ids, or namespace not a tuple. OutOfBlocks: no room.
            RuntimeError: the model is gone.
        """
        require_namespace("branch", namespace)
        return Branch(self, self._require_model("branch"), token_ids, namespace)

    def generate_many(
        self,
        prompts: Any,
        max_new_tokens: int | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        on_result: Callable[[int, Answer], Any] | None = None,
        max_batch_tokens: int | None = None,
        order: Order = "cache",
        tokenizer: Any = None,
        seed: int | None = None,
        namespace: tuple = (),
        progress: bool | None = True,
    ) -> list[Answer]:
        """Answer many prompts, in one batch that others join as some finish; a prefix that several share is computed once.

        In float32 a prompt's greedy tokens are those that `generate()` gives for it alone; drawn ones depend on the seed and the prompt's
        number only. A prompt that cannot be computed (too long, no token id) is reported in its own answer, and the others go on. When the
        pool runs short a running prompt waits again and later goes on with the same tokens. Ctrl-C returns what is done.

        Args:
            prompts: strings, or token ids without padding; a list of either.
            max_new_tokens: most tokens of an answer, here or in the config.
            generation_config: what it leaves out is the model's own. Supported are do_sample, temperature, top_k, top_p, min_p,
                repetition_penalty, eos_token_id, stop_strings.
            on_result: called with the prompt's number and its answer as each is done. If it raises, so does this, with nothing held.
            max_batch_tokens: tokens of one forward at most; None: 8192.
            order: "cache" computes prompts that share a prefix one after another, those first whose prefixes are cached; "given" takes
                them as they come. Answers are in the order given in any case.
            tokenizer: for strings, stop strings and texts; None takes the attribute `tokenizer` of this handle, if one was set.
            seed: of the random numbers; None draws one from torch's generator.
            namespace: what to add to this cache's namespace.
            progress: whether to show a progress bar where it takes longer than two seconds; None: only on a terminal or in a notebook.

        Returns:
            An `Answer` for every prompt, in the order given.

        Raises:
            ValueError: an argument is wrong, or the config asks for something that is not in the list.
        """
        from radixkv.integration.many import ManyOptions, generate_many

        options = ManyOptions(
            max_new_tokens, generation_config, on_result, max_batch_tokens, order, tokenizer, seed, namespace, progress
        )
        return generate_many(self._require_model("generate_many"), self, prompts, options)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        fingerprint: Mapping[str, object] | None = None,
        progress: bool | None = True,
    ) -> SaveReport:
        """Write every cached prefix to a file, see `PrefixCache.save`; it loads only into a cache of the same model.

        The same are weights (a digest of every byte, computed once per version of the weights, in 0.3 to 0.5 s per GB on a CPU),
        configuration, rotary embedding, dtype and shapes; not device, backend and block size.

        Args:
            path, fingerprint, progress: see there.
            tokenizer: the one that made the token ids; a `load` that names another one is then refused.

        Raises:
            RuntimeError: the model is gone. TypeError: tokenizer is none.
        """
        from radixkv.persist import save_cache

        require_progress("save", progress)
        return save_cache(self, path, partial(self._facts, tokenizer, fingerprint, progress), progress)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        fingerprint: Mapping[str, object] | None = None,
        progress: bool | None = True,
    ) -> LoadReport:
        """Add the prefixes of a file that `save` of the same model wrote, see `PrefixCache.load` and `save`.

        Raises:
            ValueError: also for another model, or, if one is given, another tokenizer; the message says in what it differs.
        """
        from radixkv.persist import load_cache

        require_progress("load", progress)
        return load_cache(self, path, partial(self._facts, tokenizer, fingerprint, progress), progress)

    def _facts(self, tokenizer: Any, given: Mapping[str, object] | None, progress: bool | None) -> dict[str, object]:
        """What the K/V of the model's present weights depend on; what was computed with others is dropped on the way."""
        model = self._require_model("save and load")
        self.follow(model)
        assert self._weights is not None
        version = (self._weights_version, tuple(self._weights.numbers.items()), self.shape.dtype, self.shape.device)
        if self._digest is None or self._digest[0] != version:
            self._digest = (version, digest_weights(model, progress))
        # None is not compared: who names no tokenizer does not ask about it.
        facts = {**model_facts(model), "weights": self._digest[1], "tokenizer": None if tokenizer is None else digest_tokenizer(tokenizer)}
        if settings := self._weights.settings():
            facts["settings"] = digest_settings(settings)
        if given and (taken := facts.keys() & given.keys()):
            raise ValueError(f"fingerprint: {', '.join(sorted(taken))} is taken by radixkv; choose another name")
        return {**facts, **(given or {})}

    def _require_model(self, what: str) -> PreTrainedModel:
        model = None if self._model is None else self._model()
        if model is None:
            raise RuntimeError(f"the model of this cache is gone, so nobody knows what its prefixes belong to: {what} while it lives")
        return model

    def _follow_again(self) -> None:
        model = None if self._model is None else self._model()
        if model is not None:
            self.follow(model)

    def _take_in(self, change: Change) -> None:
        self.last_change = change.reason
        if change.everything:
            logger.info("the weights were changed: nothing that was computed before is served again: %s", change.reason)
            self.invalidate()
            return
        logger.info("the K/V of adapters %s is stale: %s", sorted(change.adapters), change.reason)
        for tree in (self.tree,) if self.tier is None else (self.tree, self.tier.tree):
            for prefix in {namespace[:2] for namespace in map(namespace_of, tree.roots()) if self._uses(namespace, change)}:
                tree.retire(prefix)
        for pin in self._pins.all():
            if self._uses(pin.namespace, change):
                self._pins.let_go(pin)
        self._forget_graphs()

    @staticmethod
    def _uses(namespace: tuple, change: Change) -> bool:
        return not change.adapters.isdisjoint(adapters_in(namespace))

    def __deepcopy__(self, memo: dict) -> ModelCache:
        # A copy of a model may go its own way, so its cache starts empty.
        return type(self)(self.shape, replace(self.options, num_blocks=self.num_blocks))

    def _forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _make_pool(self, shape: ModelShape) -> BlockPool:
        return BlockPool(
            self.num_blocks,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=self.options.block_size,
            dtype=shape.dtype,
            device=shape.device,
        )

    def _make_graphs(self, shape: ModelShape) -> DecodeGraphs | None:
        return DecodeGraphs(CudaCapture(shape.device)) if self._why_not_captured(shape) is None else None

    def _why_not_captured(self, shape: ModelShape) -> str | None:
        return why_not_captured(self.options.backend, shape.device) if self.options.cuda_graphs else "cuda_graphs=False"

    def _make_backend(self, shape: ModelShape, pool: BlockPool) -> Backend:
        return Backend(self.options.backend, num_heads=shape.num_heads, pool=pool, exact=self.options.exact)
