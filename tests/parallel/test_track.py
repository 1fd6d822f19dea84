"""What the training loop's frame counts, shows and writes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import ranks, run_ranks
from torch.utils.data import DataLoader, IterableDataset

import hora.torch as hora
from hora.core.errors import DiskFullError, UsageError
from hora.core.progress import Progress
from hora.core.settings import Settings
from hora.core.world import World
from hora.torch import _track


class Recorder:
    def __init__(self) -> None:
        self.shown: list[Progress] = []
        self.notes: list[str] = []
        self.closed = 0

    def update(self, progress: Progress) -> None:
        self.shown.append(progress)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def print_line(self, text: str, stream: Any) -> None:
        raise AssertionError("only the supervisor prints lines")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(_track, "display", lambda settings, stream: recorder)
    return recorder


@ranks(1, 2)
def test_steps_go_on_counting_after_a_resume(recorder: Recorder) -> None:
    loader = hora.data_loader((torch.arange(11),), global_batch=4, tail="uneven")  # 3 steps per epoch
    for position, step in ((0, 1), (4, 2), (8, 3), (11, 4), (26, 8)):
        loader.load_state_dict({"position": position})
        tracker = hora.track(loader, epochs=3)
        next(iter(tracker))
        assert tracker.step == step


@ranks(1)
def test_what_is_logged_before_a_break_is_shown(recorder: Recorder) -> None:
    tracker = hora.track(hora.data_loader((torch.arange(8),), global_batch=4), epochs=3)
    for _ in tracker:
        if tracker.step == 2:
            tracker.log(kind="eval", accuracy=0.875)
            break
    assert recorder.closed == 1
    assert recorder.shown[-1].done == 8
    assert recorder.shown[-1].values["eval accuracy"] == 0.875


@ranks(1, 2)
def test_samples_of_all_workers_are_counted(recorder: Recorder) -> None:
    loader = hora.data_loader((torch.arange(11),), global_batch=4, tail="uneven")
    tracker = hora.track(loader, epochs=3)
    seen = []
    for _ in tracker:
        seen.append((tracker.step, tracker.epoch, tracker.samples))
        tracker.log(loss=torch.tensor(2.0), learning_rate=1)
        if tracker.step == 2:
            tracker.note("half way")
    assert seen == [
        (1, 0, 4), (2, 0, 8), (3, 0, 11),
        (4, 1, 15), (5, 1, 19), (6, 1, 22),
        (7, 2, 26), (8, 2, 30), (9, 2, 33),
    ]  # fmt: skip
    if hora.rank() > 0:
        assert recorder.shown == []
        return
    assert [progress.done for progress in recorder.shown] == [samples for _, _, samples in seen]
    last = recorder.shown[-1]
    assert (last.total, last.unit, last.step, last.epoch, last.epochs) == (33, "samples", 9, 3, 3)
    assert (last.size, dict(last.values)) == (hora.size(), {"loss": 2.0, "learning_rate": 1.0})
    assert last.rate > 0
    assert (recorder.notes, recorder.closed) == (["half way"], 1)


@ranks(1)
def test_a_resumed_training_makes_what_is_left(recorder: Recorder) -> None:
    loader = hora.data_loader((torch.arange(12),), global_batch=4)
    loader.load_state_dict({"position": 12 + 8})
    tracker = hora.track(loader, epochs=3)
    assert [(tracker.epoch, tracker.samples) for _ in tracker] == [(1, 24), (2, 28), (2, 32), (2, 36)]
    assert recorder.shown[-1].total == 36
    assert list(hora.track(loader, epochs=3)) == []


@ranks(1)
def test_any_iterable_counts_steps(recorder: Recorder) -> None:
    assert list(hora.track("ab", epochs=2)) == ["a", "b", "a", "b"]
    assert [(shown.done, shown.total, shown.unit) for shown in recorder.shown] == [
        (step, 4, "steps") for step in (1, 2, 3, 4)
    ]
    assert list(hora.track(iter("ab"), total=5)) == ["a", "b"]
    assert recorder.shown[-1].total == 5
    with pytest.raises(UsageError, match="epochs=1.5"):
        hora.track("ab", epochs=1.5)


@ranks(1)
def test_loader_of_a_stream_has_no_length(recorder: Recorder) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    assert len(list(hora.track(DataLoader(Stream(), batch_size=2), epochs=2))) == 4
    assert recorder.shown[-1].total == 0


@ranks(1)
def test_leaving_the_loop_closes_the_display(recorder: Recorder) -> None:
    for _ in hora.track("abc"):
        break
    assert recorder.closed == 1


def test_rank_0_writes_metrics(tmp_path: Path) -> None:
    def body(world: World, settings: Settings) -> None:
        hora.init(world, settings=Settings(**{**vars(settings), "run_dir": tmp_path / "run"}))
        tracker = hora.track(hora.data_loader((torch.arange(8),), global_batch=4), epochs=2)
        for _ in tracker:
            tracker.log(loss=torch.tensor(0.5), lr=0.1, samples_per_second_per_rank=[1.0, 2.0])

    run_ranks(2, body, init=False)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["epoch"]) for record in records] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
    ]
    assert all(
        record["kind"] == "train" and record["loss"] == 0.5 and record["lr"] == 0.1 for record in records
    )
    assert records[0]["samples_per_second_per_rank"] == [1.0, 2.0]
    assert all(record["samples_per_second"] > 0 for record in records)
    times = [record["time"] for record in records]
    assert times == sorted(times)


def test_a_full_disk_costs_records_and_not_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(world: World, settings: Settings) -> int:
        hora.init(world, settings=Settings(**{**vars(settings), "run_dir": tmp_path / "run"}))
        run = hora.context().run
        assert run is not None
        append = run.append_metrics

        def full(record: Mapping[str, Any]) -> None:
            raise DiskFullError(f"The disk is full: nothing more can be written to {run.path}.", fix="-")

        tracker = hora.track(hora.data_loader((torch.arange(8),), global_batch=2), epochs=1)
        for _ in tracker:
            run.append_metrics = full if tracker.step in (2, 3) else append  # type: ignore[method-assign]
            tracker.log(loss=0.5)
        return tracker.step

    assert run_ranks(1, body, init=False) == [4]
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 4]
    told = [line for line in capfd.readouterr().err.splitlines() if "incomplete" in line]
    assert told == [
        "hora: metrics.jsonl is incomplete from step 2 on: The disk is full: nothing more can be written to "
        f"{tmp_path / 'run'}."
    ]


@ranks(1)
def test_lines_go_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    context = hora.context()
    hora.shutdown()
    hora.init(context.world, settings=Settings(progress="lines"))
    for _ in hora.track("abc"):
        pass
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().endswith("\n")
