"""What is said about a training that has ended, from the summary that it left in ``run.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hora.core.plural import plural

__all__ = ["missed", "table"]


def table(summary: Mapping[str, Any], *, report: Path) -> list[str]:
    """The result as lines of two columns.

    Args:
        summary: the entry ``summary`` of ``run.json``.
        report: where ``report.html`` is; shown relative to the current directory when it lies below it.
    """
    workers, epochs, rate = summary["workers"], summary["epochs"], summary["samples_per_second"]
    length = f"{epochs} {plural(epochs, 'epoch')}, {summary['steps']:,} {plural(summary['steps'], 'step')}"
    rows = [
        ("workload", f"{summary['workload']}, profile {summary['profile']}, {summary['data']}"),
        *_measured(summary),
        ("time to train", f"{summary['time_to_train']:.1f} s, {length}"),
        ("throughput", f"{rate:,.0f} samples/s, {rate / workers:,.0f} per worker"),
    ]
    if summary.get("scaling_factor"):
        bounds = summary.get("scaling") or {}
        between = f", 95 % between {bounds['low']:.2f} and {bounds['high']:.2f}" if "low" in bounds else ""
        factor = f"{summary['scaling_factor']:.2f} ({workers} {plural(workers, 'worker')} over one{between})"
        rows.append(("scaling factor", factor))
    here = Path.cwd()
    rows.append(("report", str(report.relative_to(here) if report.is_relative_to(here) else report)))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _measured(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "targets" not in summary:
        reached = "reached" if summary["reached"] else "not reached"
        return [("accuracy", f"{summary['accuracy']:.4f}, target {summary['target']} {reached}")]
    names = {"bbox": "box AP", "segm": "mask AP"}
    return [
        (
            names.get(kind, kind),
            f"{summary['precision'][kind]:.4f}, target {least} "
            f"{'reached' if summary['precision'][kind] >= least else 'not reached'}",
        )
        for kind, least in summary["targets"].items()
    ]


def missed(summary: Mapping[str, Any]) -> str | None:
    """The sentence about a target that was not reached; None when it was, or when there was none."""
    if summary.get("reached", True):
        return None
    epochs = summary["epochs"]
    if summary.get("missed"):  # several targets, each with its sentence
        return f"target not reached: {summary['missed']} after {epochs} {plural(epochs, 'epoch')}"
    return (
        f"target not reached: accuracy {summary['accuracy']:.4f} is below {summary['target']} "
        f"after {epochs} {plural(epochs, 'epoch')}"
    )
