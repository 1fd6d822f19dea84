"""Read a run directory, whatever state it is in.

Nothing here raises because of what a file holds: a report is most wanted when something went wrong, and
then files are missing, half-written or odd. What could not be read is listed in ``RunData.problems``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hora.core.errors import RunDirectoryError
from hora.core.plural import plural
from hora.core.rundir import RunDirectory

__all__ = ["Failure", "Image", "Record", "RunData", "mapping", "read", "real"]

MOST_IMAGES = 60
MOST_DRAWINGS, MOST_DRAWING_BYTES = 8, 160_000
"""Drawn detections, and of one PNG of them."""
MOST_IMAGE_BYTES = 16_384
"""Of one PNG. With 60 of them a page stays below 2 MB."""
RANK_SAMPLES = 2000
"""Records from which the spread of the ranks is taken; more would not change a quartile visibly."""
MOST_TRACEBACK = 20_000
LEAST, MOST = 1e-38, 1e38
"""The range of normal float32 numbers."""
_PNG = b"\x89PNG\r\n\x1a\n"


class Record(NamedTuple):  # there may be 100,000 of them; a frozen dataclass takes three times as long
    """One line of ``metrics.jsonl``; what is missing or not a number is NaN. ``missing`` tells which."""

    step: float
    epoch: float
    time: float
    loss: float
    accuracy: float
    rate: float
    learning_rate: float
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Image:
    """A test image and what the model made of it."""

    source: str
    label: str
    predicted: str
    right: bool
    confidence: float


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How one rank ended, from ``failures/rank-N.json``.

    Attributes:
        rank: which one.
        kind: the exception's class.
        message: its text; of one of Hora's errors what is wrong.
        traceback: empty for Hora's errors, which say what to write.
        fix: what to write instead, from Hora's errors.
        time: when, in seconds since 1970; NaN when the file does not say.
        echo: it only shows the end of another rank.
        exit: the script called ``sys.exit`` with something else than success.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    fix: str
    time: float
    echo: bool
    exit: bool


@dataclass(kw_only=True)
class RunData:
    """All that the report shows, straight from the files."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    train: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    rank_rates: list[list[float]] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    drawings: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    files: list[tuple[str, str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    last_change: float = 0.0

    def entry(self, name: str) -> dict[str, Any]:
        """A dictionary of ``run.json``; empty when it is missing or something else."""
        return mapping(self.about.get(name))


def read(run: RunDirectory) -> RunData:
    """Everything in the directory that a report shows."""
    data = RunData(path=run.path)
    try:
        data.about = mapping(run.about())
    except RunDirectoryError as error:
        data.problems.append(error.what)
    except RecursionError:
        data.problems.append("run.json is nested too deeply.")
    _read_metrics(run.metrics, data)
    _read_images(run.path / "predictions.json", data)
    _read_drawings(run.path / "detections.json", data)
    _read_failures(run.path / "failures", data)
    _list_files(run, data)
    return data


def mapping(value: object) -> dict[str, Any]:
    """``value`` if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


def real(value: object) -> float:
    """``value`` as a float; NaN when it is not a number.

    Numbers beyond float32's range become infinite or zero: a loss of 1e200 has diverged, and an axis could
    not hold it.
    """
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return math.nan
        try:
            value = float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    size = abs(value)
    if LEAST <= size <= MOST or size == 0:
        return value
    return 0.0 if size < LEAST else math.copysign(math.inf, value) if size > MOST else value


def _read_metrics(path: Path, data: RunData) -> None:
    rates: list[list[object]] = []
    malformed = 0
    for line in _lines(path, data):
        record = _json(line)
        if record is None:
            malformed += 1
        elif record.get("kind") == "train":
            data.train.append(_record(record))
            ranks = record.get("samples_per_second_per_rank")
            if isinstance(ranks, list):
                rates.append(ranks)
        elif record.get("kind") == "eval":
            data.evals.append(_record(record))
    if malformed:
        plural = "s" if malformed > 1 else ""
        data.problems.append(f"metrics.jsonl: {malformed:,} malformed line{plural} left out.")
    # Evenly over the run, the first record aside when there are others: it holds the warm-up.
    kept = rates[1:] or rates
    kept = kept[:: max(1, len(kept) // RANK_SAMPLES)]
    size = max(map(len, kept), default=0)
    for rank in range(size):
        values = (real(ranks[rank]) for ranks in kept if rank < len(ranks))
        data.rank_rates.append([value for value in values if math.isfinite(value)])


def _lines(path: Path, data: RunData) -> Iterator[str]:
    if not path.is_file():
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):  # the last line may be half-written: the run may be going on
                    yield line
    except OSError as error:
        data.problems.append(f"{path.name} cannot be read: {error.strerror}.")


def _json(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _record(record: dict[str, Any]) -> Record:
    names = {"loss": "loss", "accuracy": "accuracy", "rate": "samples_per_second", "learning_rate": "lr"}
    return Record(
        missing=tuple(field for field, name in names.items() if name not in record),
        step=real(record.get("step")),
        epoch=real(record.get("epoch")),
        time=real(record.get("time")),
        loss=real(record.get("loss")),
        accuracy=real(record.get("accuracy")),
        rate=real(record.get("samples_per_second")),
        learning_rate=real(record.get("lr")),
    )


def _read_file(path: Path, data: RunData) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        record = _json(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        data.problems.append(f"{path.name} cannot be read: {error.strerror}.")
        return None
    if record is None:
        data.problems.append(f"{path.name} is malformed.")
    return record


def _read_images(path: Path, data: RunData) -> None:
    record = _read_file(path, data) or {}
    classes = record.get("classes")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    images = record.get("images")
    left_out = 0
    for item in images if isinstance(images, list) else []:
        image = _image(mapping(item), names)
        if image is None:
            left_out += 1
        elif len(data.images) < MOST_IMAGES:
            data.images.append(image)
    if left_out:
        images = plural(left_out, "image")
        data.problems.append(f"predictions.json: left out {left_out:,} {images}, not PNG or too large.")


def _read_drawings(path: Path, data: RunData) -> None:
    pictures = (_read_file(path, data) or {}).get("pictures")
    items = [mapping(item) for item in pictures] if isinstance(pictures, list) else []
    found = [(_source(item, MOST_DRAWING_BYTES), str(item.get("text", ""))) for item in items]
    data.drawings = [(source, text) for source, text in found if source is not None][:MOST_DRAWINGS]
    left_out = sum(source is None for source, _ in found)
    if left_out:
        drawings = plural(left_out, "picture")
        data.problems.append(f"detections.json: left out {left_out:,} {drawings}, not PNG or too large.")


def _source(item: dict[str, Any], most: int) -> str | None:
    """An item's PNG file as the source of an image; None if it is none, or is too large."""
    try:
        content = base64.b64decode(str(item.get("png", "")), validate=True)
    except (binascii.Error, ValueError):
        return None
    if not content.startswith(_PNG) or len(content) > most:
        return None
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _image(item: dict[str, Any], names: list[str]) -> Image | None:
    source = _source(item, MOST_IMAGE_BYTES)
    if source is None:
        return None
    label, predicted = item.get("label"), item.get("predicted")
    return Image(
        source=source,
        label=_class(label, names),
        predicted=_class(predicted, names),
        right=label == predicted,
        confidence=real(item.get("confidence")),
    )


def _class(index: object, names: list[str]) -> str:
    if isinstance(index, int) and 0 <= index < len(names):
        return names[index]
    return f"class {index}" if isinstance(index, int) else str(index)


def _read_failures(folder: Path, data: RunData) -> None:
    for path in sorted(folder.glob("rank-*.json")):
        record = _read_file(path, data)
        rank = path.stem.removeprefix("rank-")
        if record is None or not rank.isdecimal():
            continue
        text = str(record.get("traceback") or "")
        if len(text) > MOST_TRACEBACK:  # the cause stands at the end
            text = "...\n" + text[-MOST_TRACEBACK:]
        hora = mapping(record.get("hora"))
        data.failures.append(
            Failure(
                rank=int(rank),
                kind=str(record.get("type") or "error"),
                message=str(hora.get("what") or record.get("message") or "")[:MOST_TRACEBACK],
                traceback="" if hora else text,
                fix=str(hora.get("fix") or "")[:MOST_TRACEBACK],
                time=real(record.get("time")),
                echo=record.get("echo") is True,
                exit=record.get("exit") is True,
            )
        )


def _list_files(run: RunDirectory, data: RunData) -> None:
    known = [
        (run.run_json, "configuration, versions, world and summary"),
        (run.metrics, "loss, accuracy and throughput, one JSON object per line"),
        (run.path / "predictions.json", "the sample predictions shown above"),
        (run.path / "detections.json", "the drawn detections shown above"),
        (run.path / "plan.json", "what the plan said before"),
        (run.timeline, "what each rank did when"),
        (run.path / "timeline.svg", "where each rank's time went"),
        (run.path / "verdicts.jsonl", "what the guard found"),
        (run.worlds, "which workers took part, and when"),
        (run.mlperf_log, "the log in MLPerf's format"),
        (run.path / "logs", "everything that the ranks printed"),
        (run.path / "failures", "how ranks failed"),
        (run.path / "checkpoints", "model and optimizer states"),
    ]
    for path, meaning in known:
        try:
            files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
            stats = [file.stat() for file in files]
        except OSError:
            continue  # not there, or gone in this moment
        if stats:
            name = path.name + ("/" if path.is_dir() else "")
            data.files.append((name, meaning, sum(stat.st_size for stat in stats)))
            data.last_change = max(data.last_change, *(stat.st_mtime for stat in stats))
