"""Constants fitted to single-node measurements, and the correction by the measurements nearest to a question.

For each group (software, model, task) the five constants of ``step.Constants`` are least squares of
predicted over published time, never negative, drawn to where the preset's FLOPs and launches put them. What
the fit leaves over is smooth: a question near to measured rows is corrected by the weighted mean of their
logarithmic errors. Only rows of one server take part. The constants are frozen in ``data/constants.json``.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from hora.plan.collectives import DATA, all_reduce
from hora.plan.hardware import Machine
from hora.plan.models import WORKLOADS
from hora.plan.published import Measured, Unread, rows_of, throughput_rows
from hora.plan.step import Constants, Parts, Work, columns, maximum, step
from hora.plan.transformer import Kernels

__all__ = [
    "CONSTANTS",
    "Calibrated",
    "Group",
    "calibrated",
    "fit",
    "frozen",
    "kernels",
    "main",
    "single_node",
]

Group = tuple[str, str, str, str]
Array = npt.NDArray[np.float64]
CONSTANTS = DATA / "constants.json"

LAUNCH = 10e-6
"""Seconds of one kernel launch by a framework that runs eagerly: 5 to 15 us on these years' hosts."""
REACHED = 0.7
"""Share of the peak where the fit of tensor-core work starts: what large matrix products reach."""
DRAWN = 0.3
"""Weight of a prior against one measured row."""
SIGMAS = tuple(round(0.01 * step, 2) for step in range(10))
EXPOSED = (0.0, 0.25, 0.5, 0.75, 1.0)
NEAREST_PRIOR = 0.1
"""Weight of "no correction" against a row that is the same in all."""
PARENTS = {"resnet50": "MXNet"}
"""Software whose spread and overlap the MLPerf rows of a model take; PyTorch where not named."""


def single_node(rows: Sequence[Measured | Unread]) -> list[Measured]:
    """The rows that constants may be fitted to."""
    return [row for row in rows if isinstance(row, Measured) and row.nodes == 1]


def fit(rows: Sequence[Measured], *, fixed: Constants | None = None) -> Constants:
    """Constants of one group.

    Args:
        rows: of one server, all of one group.
        fixed: takes ``sigma`` and ``exposed`` from here, where the rows cannot tell them.
    """
    best: tuple[float, Constants] | None = None
    sigmas = SIGMAS if fixed is None else (fixed.sigma,)
    shares = EXPOSED if fixed is None else (fixed.exposed,)
    for sigma, exposed in itertools.product(sigmas, shares):
        found = _linear(rows, sigma, exposed)
        error = sum(math.log(_seconds(found, row) / row.seconds) ** 2 for row in rows) / len(rows)
        if best is None or error < 0.99 * best[0]:
            best = error, found
    assert best is not None
    return best[1]


def _seconds(constants: Constants, row: Measured) -> float:
    return step(constants, row.work, row.machine).total / row.work.micro_batches


def _linear(rows: Sequence[Measured], sigma: float, exposed: float) -> Constants:
    """The four constants at given spread and overlap: least squares of relative errors, none under 0."""
    preset = WORKLOADS.get(rows[0].model)
    matrix, target = [], []
    for row in rows:
        waits = 1 + sigma * maximum(row.work.gpus)
        matrix.append(
            [
                value * waits / row.seconds
                for value in columns(row.work.batch, row.work.precision, row.machine)
            ]
        )
        inside = all_reduce(row.work.gradients, min(row.work.gpus, row.machine.gpus), row.machine)
        target.append(1 - exposed * inside / row.work.micro_batches / row.seconds)
    if preset is not None:
        matrix.append([DRAWN * REACHED / preset.flops, 0.0, 0.0, 0.0])
        matrix.append([0.0, 0.0, 0.0, DRAWN / (LAUNCH * preset.kernels)])
        target += [DRAWN, DRAWN]
    tensor, plain, traffic, launch = _not_negative(np.array(matrix), np.array(target))
    return Constants(tensor=tensor, plain=plain, traffic=traffic, launch=launch, sigma=sigma, exposed=exposed)


def _not_negative(matrix: Array, target: Array) -> list[float]:
    """Least squares without negative unknowns: the best of all subsets, for there are few."""
    best: tuple[float, list[float]] = (math.inf, [0.0] * matrix.shape[1])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)  # FLOPs and seconds differ by 1e14
    matrix = matrix / scale
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = matrix[:, chosen]
            found = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ found - target) ** 2).sum())
            if (found >= 0).all() and error < best[0] * (1 - 1e-9):
                whole = [0.0] * matrix.shape[1]
                for where, value in zip(chosen, found, strict=True):
                    whole[where] = float(value / scale[where])
                best = error, whole
    return best[1]


@dataclass(frozen=True)
class Calibrated:
    """One group: its constants and the rows around which they are corrected."""

    constants: Constants
    rows: tuple[Measured, ...]

    def correction(
        self, work: Work, machine: Machine, software: str = "", *, without: str = ""
    ) -> tuple[float, float]:
        """Logarithm of the factor on the step's time, and how near the nearest row is (1: the same, 0: far).

        Args:
            work: the question.
            machine: likewise.
            software: release; "" for any.
            without: source of a row that is left out, to judge it by the others.
        """
        total, mean, nearest = NEAREST_PRIOR, 0.0, 0.0
        for row, error in zip(self.rows, _errors(self.constants, self.rows), strict=True):
            if row.source != without:
                weight = nearness(row, work, machine, software)
                total, mean, nearest = total + weight, mean + weight * error, max(nearest, weight)
        return mean / total, nearest

    def parts(
        self, work: Work, machine: Machine, software: str = "", *, without: str = ""
    ) -> tuple[Parts, float]:
        """The corrected step, and how near the nearest row is."""
        shift, nearest = self.correction(work, machine, software, without=without)
        return step(self.constants, work, machine).scaled(math.exp(shift)), nearest


@cache
def _errors(constants: Constants, rows: tuple[Measured, ...]) -> tuple[float, ...]:
    return tuple(math.log(row.seconds / _seconds(constants, row)) for row in rows)


def nearness(row: Measured, work: Work, machine: Machine, software: str) -> float:
    """1 for the same configuration; e-fold less for each of the differences that usually matter."""
    distance = (
        1.4 * (row.machine.gpu.name != machine.gpu.name)
        + 1.4 * (row.machine.gpu.generation != machine.gpu.generation)
        + 2.0 * (row.work.precision != work.precision)
        + 2.8 * (software not in ("", row.software))
        + 1.6 * abs(math.log(row.work.batch / work.batch))
        + 0.48 * abs(math.log(row.work.gpus / work.gpus))
    )
    return math.exp(-distance)


def _table(name: str) -> list[Measured]:
    return single_node(throughput_rows(rows_of(DATA / name), name))


def _grouped(rows: Sequence[Measured]) -> dict[Group, list[Measured]]:
    groups: dict[Group, list[Measured]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return groups


def fit_all() -> dict[Group, Constants]:
    """Constants of every group of the tables that come with Hora."""
    found = {group: fit(rows) for group, rows in sorted(_grouped(_table("dle_throughput.csv")).items())}
    for group, rows in sorted(_grouped(_table("mlperf_v06_results.csv")).items()):
        parent = (PARENTS.get(group[1], "PyTorch"), group[1])
        spread = next((constants for key, constants in found.items() if key[:2] == parent), None)
        found[group] = fit(rows, fixed=spread)
    return found


@cache
def frozen() -> dict[Group, Constants]:
    """The constants as they were fitted and written down."""
    table = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    return {_group(key): Constants(**value) for key, value in table["step"].items()}


def _group(key: str) -> Group:
    software, model, task, sequence = key.split("/")
    return software, model, task, sequence


@cache
def kernels() -> Kernels:
    """The constants of a transformer's matrix products, as they were fitted and written down."""
    return Kernels(**json.loads(CONSTANTS.read_text(encoding="utf-8"))["transformer"])


@cache
def calibrated() -> dict[Group, Calibrated]:
    """All groups of the tables, with frozen constants."""
    rows = _grouped([*_table("dle_throughput.csv"), *_table("mlperf_v06_results.csv")])
    return {group: Calibrated(frozen()[group], tuple(rows[group])) for group in rows}


def main() -> None:
    """Fit again and write ``data/constants.json``: python -m hora.plan.calibration."""
    from hora.plan.megatron import fit_kernels

    def rounded(values: dict[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in values.items()}

    table = {
        "step": {"/".join(group): rounded(asdict(constants)) for group, constants in fit_all().items()},
        "transformer": rounded(asdict(fit_kernels())),
    }
    CONSTANTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
