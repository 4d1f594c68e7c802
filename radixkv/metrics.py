"""The counters under the names that Prometheus wants, and its text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from radixkv.stats import CacheStats


class Metric(NamedTuple):
    """What one number is: "counter" (it only goes up, but for `reset_stats()`) or "gauge", and in words."""

    kind: str
    help: str


# By their names without the common beginning; a field of CacheStats gives each its value.
_OF_STATS = {
    "requests": Metric("counter", "Prompts admitted by generate()."),
    "hits": Metric("counter", "Admitted prompts of which at least half was reused."),
    "misses": Metric("counter", "The other admitted prompts."),
    "lookups": Metric("counter", "Prompts looked up in the tree, by generate() or match_prefix()."),
    "prompt_tokens": Metric("counter", "Tokens of the admitted prompts."),
    "cached_tokens": Metric("counter", "Tokens of the admitted prompts that were not computed for them."),
    "computed_tokens": Metric("counter", "Tokens computed, of prompts and answers."),
    "stock_calls": Metric("counter", "Calls that took the model's own path."),
    "insertions": Metric("counter", "Sequences given to the tree to keep."),
    "stored_tokens": Metric("counter", "Tokens of them that the tree did not have."),
    "evicted_tokens": Metric("counter", "Cached tokens dropped to make room."),
    "evicted_blocks": Metric("counter", "Cached blocks dropped to make room."),
    "blocks_free": Metric("gauge", "Blocks that hold nothing."),
    "blocks_cached": Metric("gauge", "Blocks of cached prefixes that may be evicted."),
    "blocks_leased": Metric("gauge", "Blocks that a lease or a running sequence holds."),
    "blocks_pinned": Metric("gauge", "Those of the leased blocks that a pin holds."),
    "blocks_host": Metric("gauge", "Blocks of the second tier, in host memory."),
    "restored_tokens": Metric("counter", "Tokens that came back from host memory."),
    "tree_tokens": Metric("gauge", "Tokens that the tree holds, each copy counted."),
}


def _name(field: str) -> str:
    return f"radixkv_{field}_total" if _OF_STATS[field].kind == "counter" else f"radixkv_{field}"


METRICS: Mapping[str, Metric] = {_name(field): metric for field, metric in _OF_STATS.items()}


def metrics_of(stats: CacheStats) -> dict[str, int | float]:
    """The values of METRICS, all of them, in its order."""
    return {_name(field): getattr(stats, field) for field in _OF_STATS}


def render_metrics(metrics: Mapping[str, int | float], labels: Mapping[str, str] | None = None) -> str:
    """Writes metrics in the text format that Prometheus scrapes.

    Args:
        metrics: what `model.radixkv.metrics()` returned; other names may be among them and are written without a type.
        labels: what is put on every line, {"model": "qwen"} for instance.

    Returns:
        The text, a newline at its end.

    Source: Prometheus documentation, "Exposition formats", text-based format 0.0.4.
    """
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
    lines = []
    for name, value in metrics.items():
        metric = METRICS.get(name, Metric("untyped", ""))
        if metric.help:
            lines.append(f"# HELP {name} {metric.help}")
        lines.append(f"# TYPE {name} {metric.kind}")
        lines.append(f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}")
    return "\n".join([*lines, ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
