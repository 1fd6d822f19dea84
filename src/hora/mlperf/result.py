"""What a run's ``mlperf.log`` says: which benchmark, how long, whether the target was reached."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.core.errors import DataError, RunDirectoryError

__all__ = ["Result", "log_of", "read"]

TOKEN = ":::MLLOG "


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run.

    Attributes:
        run: its directory.
        benchmark: such as ``resnet``.
        seconds: from ``run_start`` to ``run_stop``: evaluations included, initialization left out.
        reached: whether ``run_stop`` has the status ``success``.
        accuracy: of the last evaluation, as the rules want it: a number, or one per kind.
        epochs: that ended.
        global_batch: samples per step; 0 where the log does not tell.
    """

    run: Path
    benchmark: str
    seconds: float
    reached: bool
    accuracy: Any
    epochs: int
    global_batch: int


def log_of(run: Path) -> Path:
    """The ``mlperf.log`` of a run directory.

    Raises:
        RunDirectoryError: there is none.
    """
    path = run / "mlperf.log"
    if not path.is_file():
        raise RunDirectoryError(
            f"{run} holds no mlperf.log.",
            fix="Give the directory of a training by hora train, such as runs/resnet-1.",
        )
    return path


def read(run: Path) -> Result:
    """What the log of a run says.

    Raises:
        RunDirectoryError: there is no log.
        DataError: the log is damaged, of a training that has not ended, or of one that goes on from another
            run's checkpoint, whose time before that it does not hold.
    """
    path = log_of(run)
    records = [
        _record(line, path)
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if TOKEN in line
    ]
    by_key: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_key.setdefault(record["key"], []).append(record)
    for key in ("submission_benchmark", "run_start", "run_stop"):
        if key not in by_key:
            raise DataError(
                f"{path} has no {key}: the training did not come to its end.",
                fix=f"Go on with hora train WORKLOAD --run-dir {run}, or give another run.",
            )
    epochs = [record["metadata"].get("epoch_num") for record in by_key.get("epoch_start", [])]
    if epochs[:1] != [1]:
        raise DataError(
            f"{path} does not begin with epoch 1: the training goes on from another run's checkpoint.",
            fix="Give runs that were trained from their beginning: hora train WORKLOAD without --resume.",
        )
    stop = by_key["run_stop"][-1]
    evaluations = by_key.get("eval_accuracy", [])
    return Result(
        run=run,
        benchmark=str(by_key["submission_benchmark"][0]["value"]),
        # A pause belongs to the time: the clock never stops. So the first start counts.
        seconds=(stop["time_ms"] - by_key["run_start"][0]["time_ms"]) / 1000,
        reached=stop["metadata"].get("status") == "success",
        accuracy=evaluations[-1]["value"] if evaluations else None,
        epochs=len(by_key.get("epoch_stop", [])),
        global_batch=int(by_key.get("global_batch_size", [{"value": 0}])[0]["value"]),
    )


def _record(line: str, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line.split(TOKEN, 1)[1])
        record["key"], record["time_ms"], record["value"]
        record["metadata"] = dict(record.get("metadata") or {})
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} holds a damaged line: {line[:80]!r} ({type(error).__name__}).",
            fix="Give the log as the training wrote it, or another run.",
        ) from None
    return record
