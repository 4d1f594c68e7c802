"""`model.radixkv`: what a user calls of one model's cache. How it follows the model is in following.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig
from transformers.cache_utils import Cache

from radixkv.integration.branch import Branch
from radixkv.integration.dynamic_cache import insert_dynamic
from radixkv.integration.families import ModelShape
from radixkv.integration.fingerprint import digest_settings, digest_tokenizer, digest_weights, model_facts
from radixkv.integration.following import CacheOptions, FollowingCache
from radixkv.integration.paged_cache import PagedCache
from radixkv.integration.versions import held_cache
from radixkv.progress import require_progress
from radixkv.schedule import Order
from radixkv.sequence import CallOptions
from radixkv.token_key import require_namespace

if TYPE_CHECKING:
    from radixkv.integration.answers import Answer
    from radixkv.persist import LoadReport, SaveReport


class ModelCache(FollowingCache):
    """The prefix cache of one patched model; arguments and further attributes as for `FollowingCache`.

    Attributes:
        tokenizer: for `generate_many`; the user's to set.
    """

    def __init__(self, shape: ModelShape, options: CacheOptions):
        super().__init__(shape, options)
        self.tokenizer: Any = None
        # The digest of the weights, and for which of their versions, type and devices.
        self._digest: tuple[tuple, str] | None = None

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
        pool runs short a running prompt waits again and later goes on with the same tokens; it waits for other threads' rows too. Ctrl-C
        returns what is done.

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
        version = (self._weights_version, tuple(self._weights.numbers.items()), self.shape.dtype, self.shape.devices)
        if self._digest is None or self._digest[0] != version:
            self._digest = (version, digest_weights(model, progress))
        # None is not compared: who names no tokenizer does not ask about it.
        facts = {**model_facts(model), "weights": self._digest[1], "tokenizer": None if tokenizer is None else digest_tokenizer(tokenizer)}
        if settings := self._weights.settings():
            facts["settings"] = digest_settings(settings)
        if given and (taken := facts.keys() & given.keys()):
            raise ValueError(f"fingerprint: {', '.join(sorted(taken))} is taken by radixkv; choose another name")
        return {**facts, **(given or {})}
