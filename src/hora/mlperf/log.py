"""``mlperf.log``: what happened in a training, in the format of MLPerf Training v0.7 and later.

Each line is ``:::MLLOG {json}``, written through the ``mlperf-logging`` package. The keys are those that its
compliance checker asks for in rule set 0.7.0. The name MLPerf belongs to MLCommons: a run on other data, or
outside a submission round, is never an MLPerf result, and the log says so itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import hora
from hora.core.errors import MissingExtraError
from hora.core.rundir import disk_errors

__all__ = ["MLPerfLog", "resnet_hyperparameters"]

COMMENT = "Format-compliant log of a training by Hora. Not an MLPerf result: not submitted, other data."


class MLPerfLog:
    """Writes one training's log. With ``path=None`` (every rank but 0) nothing is written.

    Args:
        path: the file; it is made, and appended to if it exists.

    Raises:
        MissingExtraError: ``mlperf-logging`` is not installed.
        RunDirectoryError: the file cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._handler: _Raising | None = None
        if path is None:
            return
        try:
            from mlperf_logging import mllog
        except ImportError:
            raise MissingExtraError(
                "Writing mlperf.log needs the package mlperf-logging.",
                fix="Run `pip install 'hora[workloads]'`.",
            ) from None
        with disk_errors(path):
            self._handler = _Raising(path)
        # A logger outside logging's registry: two logs in one process stay apart.
        plain = logging.Logger(f"hora.mlperf.{path}", level=logging.INFO)
        plain.addHandler(self._handler)
        root = str(Path(hora.__file__).parent.parent)
        self._logger = mllog.mllog.MLLogger(logger=plain, default_stack_offset=2, root_dir=root)

    def __enter__(self) -> MLPerfLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submission(self, benchmark: str, *, division: str = "open", platform: str) -> None:
        """Who logs what. Hora logs in the open division, since its data are not the benchmark's."""
        self.event("submission_benchmark", benchmark, comment=COMMENT)
        self.event("submission_org", "Hora")
        self.event("submission_division", division)
        self.event("submission_status", "research")
        self.event("submission_platform", platform)

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """A point in time, or a value such as a hyperparameter."""
        if self._handler is not None:
            self._logger.event(key, value, metadata=metadata)

    def start(self, key: str, value: Any = None, **metadata: Any) -> None:
        """The start of an interval: ``init_start``, ``run_start``, ``epoch_start``, ``eval_start``."""
        if self._handler is not None:
            self._logger.start(key, value, metadata=metadata)

    def stop(self, key: str, value: Any = None, **metadata: Any) -> None:
        """The end of an interval: ``init_stop``, ``run_stop``, ``epoch_stop``, ``eval_stop``."""
        if self._handler is not None:
            self._logger.end(key, value, metadata=metadata)

    def close(self) -> None:
        """End the log; nothing is written after it. May be called again.

        Raises:
            RunDirectoryError: the last lines cannot be written (DiskFullError: no space).
        """
        handler, self._handler = self._handler, None
        if handler is not None:
            with disk_errors(handler.path):
                handler.close()


def resnet_hyperparameters(
    optimizer: str,
    *,
    global_batch: int,
    lr: float,
    end_lr: float,
    power: float,
    decay_steps: int,
    warmup_epochs: float,
    momentum: float,
    weight_decay: float,
    epsilon: float,
    bn_span: int,
) -> Mapping[str, float | int | str]:
    """The hyperparameters that rule set 0.7.0 asks of ResNet, by their MLPerf keys.

    Args:
        optimizer: ``sgd`` or ``lars``.
        decay_steps: steps of the polynomial decay, the warm-up left out.
        epsilon: of LARS.
        bn_span: samples over which a batch normalization takes its statistics: the micro-batch.
        global_batch: samples per step.
        lr: peak learning rate.
        end_lr: last learning rate.
        power: of the decay.
        warmup_epochs: length of the linear warm-up.
        momentum: of the optimizer.
        weight_decay: of the weights.
    """
    values: dict[str, float | int | str] = {
        "global_batch_size": global_batch,
        "opt_name": optimizer,
        f"{optimizer}_opt_base_learning_rate": lr,
        f"{optimizer}_opt_end_learning_rate": end_lr,
        f"{optimizer}_opt_learning_rate_decay_poly_power": power,
        f"{optimizer}_opt_learning_rate_decay_steps": decay_steps,
        f"{optimizer}_opt_momentum": momentum,
        f"{optimizer}_opt_weight_decay": weight_decay,
        "model_bn_span": bn_span,
    }
    if optimizer == "lars":
        values |= {"lars_opt_learning_rate_warmup_epochs": warmup_epochs, "lars_epsilon": epsilon}
    else:
        values |= {"opt_learning_rate_warmup_epochs": warmup_epochs}
    return values


class _Raising(logging.FileHandler):
    """logging prints errors of its handlers and goes on; a log with holes is worse than an error."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.path = path

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        with disk_errors(self.path):
            raise  # noqa: PLE0704  (called from logging's own except clause)
