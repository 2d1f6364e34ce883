"""`open_metrics`: a loader's counters as OpenMetrics text, for Prometheus and programs that read its format."""

from __future__ import annotations

import re
from typing import NamedTuple

from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of

_QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99"}
_COUNTERS = {
    "batches": "batches given",
    "samples": "samples, or pieces of them, in the batches given",
    "tokens": "tokens in the packs made",
    "bytes": "bytes read, by those of the batches that are timed",
    "wait_s": "seconds that the trainer waited for batches",
    "work_s": "seconds that making the batches took, of all workers",
    "restarts": "workers replaced",
    "moved_lanes": "lanes that went to another worker",
}
_OTHER = "counted or measured as the name says; see the page on what to watch"
_UNITS = re.compile(r"(^|_)s$")


class _Point(NamedTuple):
    """A number: its family, the family's kind, its labels, and the end of its name."""

    family: str
    kind: str
    labels: dict[str, str]
    suffix: str = ""


def open_metrics(loader: SavableLoader) -> str:
    """Format the counters of `loader.stats()`, without rates, as OpenMetrics 1.0 text.

    Serve it with a server of yours, or write it to a file for a collector to read. Each number has the label `rank`;
    sources, stages and reasons are labels too, percentiles are quantiles; `savable_slowest_sample_seconds` names its
    shard and sample in the label `what`.

    Args:
        loader: The loader of this rank.

    Returns:
        The text, ending with `# EOF`.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> with sp.SavableLoader(pipeline, seed=7) as loader:
        ...     batch = next(loader)
        ...     text = sp.open_metrics(loader)
        >>> [line for line in text.splitlines() if "batches_total" in line]
        ['savable_batches_total{rank="0"} 1']
    """
    run = run_of(loader)
    rank = {"rank": str(run.ranks.rank)}
    numbers, names = run.counters()
    families: dict[tuple[str, str, str], list[str]] = {}
    for name, number in numbers.items():
        point = _point(name)
        labels = {**rank, **point.labels, **({"what": names[name]} if name in names else {})}
        shown = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
        about = _COUNTERS.get(name, _OTHER)
        line = f"{point.family}{point.suffix}{{{shown}}} {number!r}"
        families.setdefault((point.family, point.kind, about), []).append(line)
    return "".join(_family(*key, lines) for key, lines in families.items()) + "# EOF\n"


def _family(name: str, kind: str, about: str, lines: list[str]) -> str:
    return "\n".join([f"# TYPE {name} {kind}", f"# HELP {name} {about}", *lines, ""])


def _point(name: str) -> _Point:
    """Where a number of `stats()` goes."""
    parts = name.split("/")
    if parts[-1] in _QUANTILES:
        labels = {"stage": parts[1]} if len(parts) == 3 else {}
        labels["quantile"] = _QUANTILES[parts[-1]]
        return _Point(f"{_metric(parts[0])}_recent", "summary", labels)
    if name in _COUNTERS:
        return _Point(_metric(name), "counter", {}, "_total")
    if len(parts) == 1:
        return _Point(_metric(name), "gauge", {})
    if parts[0] == "source" and "skipped" in parts[:-1]:
        source, _, reason = name.removeprefix("source/").partition("/skipped/")
        return _Point("savable_source_skipped_reason", "counter", {"source": source, "reason": reason}, "_total")
    if parts[0] == "source":
        return _Point(_metric(f"source_{parts[-1]}"), "counter", {"source": "/".join(parts[1:-1])}, "_total")
    if parts[0] == "seconds":
        return _Point("savable_stage_seconds", "counter", {"stage": parts[1]}, "_total")
    if parts[-1] == "fill":
        return _Point("savable_fill", "gauge", {"stage": parts[0]})
    stage, what, *rest = parts
    if what in ("skipped", "dropped") and rest:
        return _Point(_metric(what), "counter", {"stage": stage, "reason": "/".join(rest)}, "_total")
    return _Point("savable_stage_events", "counter", {"stage": stage, "event": "/".join(parts[1:])}, "_total")


def _metric(name: str) -> str:
    """`wait_s` → `savable_wait_seconds`."""
    return "savable_" + re.sub(r"[^a-zA-Z0-9_]", "_", _UNITS.sub(r"\1seconds", name))


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
