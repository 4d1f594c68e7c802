"""Every invariant of a radix tree, recomputed from its nodes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.node import Node, Root
from radixkv.token_key import TOKEN_BYTES

if TYPE_CHECKING:
    from radixkv.tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Walks a tree after taking in returned leases. Raises AssertionError with a sentence on any violation."""
    # Once: what is released from now on is taken in by the next operation, or it would change the locks under the walk.
    num_leases, num_leased = tree.count_leases()
    nodes = tree.nodes()
    inner = [node for node in nodes if not isinstance(node, Root)]
    for node in nodes:
        _check_children(node, tree.block_size * TOKEN_BYTES)
    for node in inner:
        _check_blocks(node, tree.block_size * TOKEN_BYTES)
        assert node.parent is not None
        _require(node.start == node.parent.start + len(node.parent.edge), "a node starts elsewhere than it says")
    for root in nodes[: len(nodes) - len(inner)]:
        _require(bool(root.children), "the root of a namespace has no children but is kept")
        _require(root.locks == 1 + _num_locked_children(root), "the locks of a root do not match its children's")
    leases_on = [node.locks - _num_locked_children(node) for node in inner]
    _require(min(leases_on, default=0) >= 0, "a node has fewer locks than locked children")
    _require(sum(leases_on) == num_leases, f"leases on nodes add up to {sum(leases_on)}, {num_leases} are out")

    blocks = [block for node in inner for block in node.blocks]
    _require(len(set(blocks)) == len(blocks), "a block is in the tree twice")
    _require(len(blocks) == tree.num_blocks, f"the nodes hold {len(blocks)} blocks, the tree counts {tree.num_blocks}")
    num_locked = sum(len(node.blocks) for node in inner if node.locks)
    _require(num_locked == num_leased, f"locked nodes hold {num_locked} blocks, the tree counts {num_leased}")
    num_tokens = sum(len(node.edge) for node in inner) // TOKEN_BYTES
    _require(num_tokens == tree.num_tokens, f"the edges have {num_tokens} tokens, the tree counts {tree.num_tokens}")
    _check_queue(tree, inner)


def _check_children(node: Node, block_bytes: int) -> None:
    for key, child in node.children.items():
        _require(child.parent is node, "a child points to another parent")
        _require(key == child.edge[:block_bytes], "a child is filed under a key that is not its first block")
    inner = [child for child in node.children.values() if child.children]
    if node.trunk is not None:
        _require(node.trunk in node.children.values(), "the trunk of a node is not its child")
        _require(len(node.trunk.edge) >= block_bytes, "the trunk of a node ends inside its first block")
        _require(not inner or inner == [node.trunk], "a child that has children is not the trunk of a node that has one")
    if node.sorted_keys is not None:
        _require(node.sorted_keys.to_list() == sorted(node.children), "the sorted keys of a node are not its children's")
    else:
        _require(len(node.children) <= 1, "a node with several children has no sorted keys")


def _check_blocks(node: Node, block_bytes: int) -> None:
    _require(len(node.edge) > 0 and len(node.edge) % TOKEN_BYTES == 0, "an edge is empty or cuts a token")
    _require(len(node.blocks) == -(-len(node.edge) // block_bytes), f"{len(node.blocks)} blocks for an edge of {len(node.edge)} bytes")
    _require(len(node.edge) % block_bytes == 0 or not node.children, "a node whose last block is partly filled has children")


def _check_queue(tree: RadixTree, inner: list[Node]) -> None:
    stale = tree.stale_nodes()
    _require(all(node.queue is node.parent.queue for node in inner if node.parent is not None), "a node has another policy than its parent")
    _require(all(node.queue is not tree.queue for node in stale), "a fresh node waits among the stale ones")
    waiting = stale + tree.queue.nodes()
    leaves = {node for node in inner if not node.children and not node.locks}
    _require(len(set(waiting)) == len(waiting), "a leaf waits for eviction twice")
    _require(set(waiting) == leaves, "those that wait for eviction are not the unlocked leaves")
    _require(len({node.stamp for node in waiting}) == len(waiting), "two leaves have the same stamp")
    _require(tree.first_to_go() is (waiting[0] if waiting else None), "the next to be evicted is not the first of those that wait")


def _num_locked_children(node: Node) -> int:
    return sum(1 for child in node.children.values() if child.locks)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)
