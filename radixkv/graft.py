"""Puts a load's runs into a cache's tree, with what is known of their use before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from radixkv.kv_file import FileReader
from radixkv.kv_transfer import read_pool
from radixkv.load_plan import LoadPlan
from radixkv.node import Node
from radixkv.token_key import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.storage import CacheStorage


def fill(cache: CacheStorage, file: FileReader, namespaces: list[tuple], plan: LoadPlan, progress: bool | None) -> None:
    """Reads what was planned into free blocks and, when all of it is there, puts it into the tree; `progress` as in `progress_bar`."""
    blocks = cache.pool.allocate(sum(run.num_blocks for run in plan.runs))
    try:
        read_pool(file, cache.pool, plan, blocks, progress)
    except BaseException:
        cache.pool.release(blocks)
        raise
    _recall(cache, plan, _store(cache, namespaces, plan, blocks))


def _store(cache: CacheStorage, namespaces: list[tuple], plan: LoadPlan, blocks: list[int]) -> list[Node | None]:
    """Returns per saved node where it ends in the tree, or above that."""
    nodes, tree, block_size = plan.nodes, cache.tree, cache.pool.block_size
    namespace_ids, places, taken = nodes.namespace_ids.tolist(), list(plan.places), 0
    for run in plan.runs:
        last, first_block = run.nodes[-1], run.begin // block_size
        key = nodes.key(last, run.begin, run.end)
        own = blocks[taken : taken + run.num_blocks]
        taken += run.num_blocks
        # The tree has its own blocks for what it knows, and does not look at those given in their place.
        given = [-1] * (-(-run.end // block_size) - first_block - run.num_blocks) + own
        place = None if run.above < 0 else places[run.above]
        added = tree.add_below(place, run.begin * TOKEN_BYTES, key, given, namespaces[namespace_ids[last]])
        assert len(given) - added.first_adopted == run.num_blocks, "the tree has changed since the load was planned"
        cache.pool.release(added.replaced)
        for node in run.nodes:
            places[node] = added.node
    return places


def _recall(cache: CacheStorage, plan: LoadPlan, places: list[Node | None]) -> None:
    """What was loaded counts as used now, in the order of its uses before, and as often as before."""
    nodes, forest = plan.nodes, cache.tree.forest
    worths, hits = nodes.worths.tolist(), nodes.hits.tolist()
    for each in nodes.ranks.argsort(kind="stable").tolist():
        end, place = plan.reached[each], places[each]
        if place is None or end <= max(plan.known[each], nodes.links[each][1]):
            continue
        while place.start >= end * TOKEN_BYTES:
            assert place.parent is not None
            place = place.parent
        node = forest.cut(place, end * TOKEN_BYTES - place.start)
        node.hits += hits[each]
        node.queue.recall(node, None if math.isnan(worths[each]) else worths[each])
