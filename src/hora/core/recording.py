"""What ``hora verify`` tells the ranks of a run, and what they write down for it.

The launcher hands a :class:`Plan` to the ranks as a file. Each rank writes ``rank-N.jsonl`` into the plan's
folder: one line per step and a last line that says how it ended. A run that others replay adds
``rank-N.pickle``, the batches that this rank used.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hora.core.rundir import replace_text

__all__ = [
    "EPSILON",
    "INTERVENTIONS",
    "SKETCH",
    "Batch",
    "Ending",
    "Plan",
    "RankRecord",
    "Source",
    "Step",
    "as_line",
    "difference",
    "read_record",
    "rounding",
]

SKETCH = 8
"""Random projections per tensor. The mean of their squares estimates a squared norm without bias, with a
relative deviation of ``sqrt(2 / 8)``: enough to tell 1e-6 from 1e-3."""

Source = Literal["loader", "cut", "seen"]

INTERVENTIONS = (
    "averaging",
    "batch-norm",
    "clipping",
    "initial-parameters",
    "learning-rate",
    "metric-shares",
    "metric-weights",
    "once-averaged",
    "randomness",
    "samples",
    "summed",
    "tail",
    "unclipped",
    "weighting",
)
"""What a run can be told to do otherwise than the script says."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks of one run are to do beside running the script.

    Attributes:
        folder: where they write.
        steps: the run stops when step ``steps + 1`` begins.
        float64: compute everything in float64.
        keep: write the batches too.
        apply: interventions in this run.
        replay: folder of the run whose batches one worker is to use ("samples"), or whose evaluation batches
            every rank is to use ("metric-shares").
        initial: file with the first parameters; written if it is not there ("initial-parameters").
        factor: multiplies the script's learning rate.
        rates: learning rates to use, per step and parameter group ("learning-rate").
        weights: by rank, step, backward pass and mean in it: factors for the loss ("weighting").
        windows: by step: factor for the loss of each backward pass in it ("tail").
    """

    folder: Path
    steps: int
    float64: bool = False
    keep: bool = False
    apply: tuple[str, ...] = ()
    replay: Path | None = None
    initial: Path | None = None
    factor: float = 1.0
    rates: Sequence[Sequence[float]] = ()
    weights: Sequence[Sequence[Sequence[Sequence[float]]]] = ()
    windows: Sequence[float] = ()

    def write(self, path: Path) -> None:
        """Keep it as JSON."""
        replace_text(path, json.dumps(dataclasses.asdict(self), default=str, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan of :meth:`write`."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in ("folder", "replay", "initial"):
            data[name] = None if data[name] is None else Path(data[name])
        data["apply"] = tuple(data["apply"])
        return cls(**data)

    def lines(self, rank: int) -> Path:
        """Where a rank writes its lines."""
        return self.folder / f"rank-{rank}.jsonl"

    def batches(self, rank: int) -> Path:
        """Where a rank writes its batches."""
        return self.folder / f"rank-{rank}.pickle"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One backward pass.

    Attributes:
        samples: names of the samples: ``loader:sample`` where a loader gave them, else digests of rows.
        source: where they came from: a "loader", tensors that the script has "cut", or "seen" only by the
            model.
        content: digests of what the loader gave for each, which augmentation changes.
        rows: number of samples.
        loss: what ``backward()`` was called on.
        counts: what each mean in the loss was divided by.
    """

    samples: list[str] = field(default_factory=list)
    source: Source = "seen"
    content: list[str] = field(default_factory=list)
    rows: int = 0
    loss: float | None = None
    counts: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of an optimizer on one rank. Tensors are ``[norm, projections...]`` by name.

    Attributes:
        optimizer: which one, in order of their first steps.
        rates: learning rate of each parameter group.
        batches: the backward passes since the step before.
        gradients: as the step used them.
        norm: of all gradients together.
        raw_norm: of the gradients as this rank's backward passes made them.
        parameters: after the step.
        buffers: after the step.
        noise: norm of this step's change in those elements of a parameter whose gradient is rounding.
        before: parameters before the optimizer's first step.
        sizes: number of elements of each tensor, in the first step of an optimizer.
        metrics: numbers that the script reduced over the ranks since the step before, as
            ``[place, value, samples seen]``.
        uses: what was seen at work: "batch norm", "dropout", "random numbers", "clipping".
    """

    optimizer: int
    rates: list[float]
    batches: list[Batch]
    gradients: dict[str, list[float]]
    norm: float
    raw_norm: float
    parameters: dict[str, list[float]]
    buffers: dict[str, list[float]]
    noise: dict[str, float] = field(default_factory=dict)
    before: dict[str, list[float]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    metrics: list[tuple[str, float, int]] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a rank's recording ended.

    Attributes:
        why: "stopped" after the last step that was asked for, "finished" with the script, "no-init" where
            the script trains without ``init()``.
        metrics: those after the last step.
        dtypes: of the parameters.
        unsaved: calls of ``saves`` that were left out.
        batches: backward passes after the last step.
        where: ``file:line`` of the first step.
        module: the adapter; empty where the script has imported none.
        saves: what writes a model to a file there.
    """

    why: str
    metrics: list[tuple[str, float, int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    unsaved: int = 0
    batches: int = 0
    where: str = ""
    module: str = "hora.torch"
    saves: str = "torch.save"


@dataclass(frozen=True)
class RankRecord:
    """What one rank wrote; ``ending`` is None when it ended in another way."""

    steps: list[Step]
    ending: Ending | None


def read_record(path: Path) -> RankRecord:
    """Read ``rank-N.jsonl``; a rank that wrote nothing has no steps and no ending."""
    steps: list[Step] = []
    ending = None
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        data: dict[str, Any] = json.loads(line)
        if data.pop("kind") == "step":
            data["batches"] = [Batch(**batch) for batch in data["batches"]]
            steps.append(Step(**data))
        else:
            ending = Ending(**data)
    return RankRecord(steps, ending)


EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_FACTOR = {"float64": 4096.0, "float32": 256.0, "float16": 8.0, "bfloat16": 8.0}


def rounding(dtype: str) -> float:
    """Relative difference that one step may make in a dtype: a multiple of its epsilon.

    256 epsilons in float32 and 8 in half precision, where a run in float64 decides in case of doubt; 4096 in
    float64, where nothing wider can. Gradients of a few layers stay an order of magnitude below.
    """
    return _FACTOR.get(dtype, 256.0) * EPSILON.get(dtype, EPSILON["float32"])


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Estimated norm of the difference of two tensors, from their ``[norm, projections...]``."""
    if not all(map(math.isfinite, (*one, *other))):
        same = all(str(a) == str(b) for a, b in zip(one, other, strict=True))
        return 0.0 if same else math.inf
    return math.hypot(*(a - b for a, b in zip(one[1:], other[1:], strict=True))) / math.sqrt(SKETCH)


def as_line(row: Step | Ending) -> str:
    """One line of the record."""
    fields: Mapping[str, Any] = dataclasses.asdict(row)
    return json.dumps({"kind": "step" if isinstance(row, Step) else "end", **fields}) + "\n"
