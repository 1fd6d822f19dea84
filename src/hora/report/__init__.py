"""``report.html``: one self-contained page about a run, made from the files of its run directory;
and :func:`account`, where the run's time went.

The page opens offline: no scripts, no external request of any kind. It is written from whatever is
there: a run that failed before its first step, or that is still running, has a report too.

Beside ``run.json`` and ``metrics.jsonl`` a workload may leave ``predictions.json``, sample predictions on
test images::

    {"classes": ["T-shirt", "trouser", ...],
     "images": [{"png": "<base64 of a PNG file>", "label": 3, "predicted": 5, "confidence": 0.93}, ...]}

``label`` and ``predicted`` are indices into ``classes``; ``confidence`` is 0 to 1. A workload that
finds objects leaves ``detections.json``, pictures on which they are drawn::

    {"pictures": [{"png": "<base64 of a PNG file>", "text": "3 objects, 3 found"}, ...]}
"""

from __future__ import annotations

from pathlib import Path

from hora.report._account import Account, account
from hora.report._charts import Curve, line_chart
from hora.report._page import markdown_of, write_report
from hora.report._plan import scatter_svg, sweep_svg
from hora.report._planned import checked as checked_plan

__all__ = [
    "STYLE",
    "Account",
    "Curve",
    "account",
    "checked_plan",
    "line_chart",
    "markdown_of",
    "scatter_svg",
    "sweep_svg",
    "write_report",
]

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
"""The style sheet of the page, which the charts need."""
