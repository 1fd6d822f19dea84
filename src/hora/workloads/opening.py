"""What every training writes down before it touches its data: configuration, and the start of mlperf.log."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hora.torch as hora
from hora.core.plural import plural
from hora.mlperf import MLPerfLog

__all__ = ["begin", "hyperparameters", "initialized", "mlperf_path"]


def mlperf_path() -> Path | None:
    """Where this rank writes ``mlperf.log``: only rank 0, and only with a run directory."""
    run = hora.context().run
    return run.mlperf_log if run is not None and hora.rank() == 0 else None


def begin(workload: str, log: MLPerfLog, *, config: Mapping[str, Any]) -> None:
    """Write down what is going to be trained, on what.

    Args:
        workload: its name, which is the benchmark's too.
        log: where to.
        config: for ``run.json``.
    """
    workers = f"{hora.size()} {plural(hora.size(), 'worker')}"
    log.submission(workload, platform=f"{platform.machine()}, {workers} on {hora.device().type}")
    log.event("cache_clear", False)  # nothing is flushed: that would take root
    log.start("init_start")
    run = hora.context().run
    if run is not None and hora.rank() == 0:
        run.describe(config=dict(config))


def initialized(log: MLPerfLog) -> None:
    """Everything that needs no data is done. MLPerf's clock starts here."""
    hora.barrier()
    log.stop("init_stop")
    log.start("run_start")


def hyperparameters(values: Mapping[str, Any], log: MLPerfLog, *, seed: int, train: int, test: int) -> None:
    """Write what MLPerf's rules ask for.

    Args:
        values: hyperparameters by their MLPerf keys.
        log: where to.
        seed: of the training.
        train: training samples.
        test: test samples.
    """
    for key, value in values.items():
        log.event(key, value)
    log.event("seed", seed)
    log.event("train_samples", train)
    log.event("eval_samples", test)
