"""The report of any run directory, in whatever state it is."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.report import samples

from hora.cli import main
from hora.core.errors import RunDirectoryError
from hora.core.rundir import RunDirectory
from hora.report import write_report
from hora.report._read import RunData
from hora.report._story import duration, outcome, scaling

HOSTILE = "<script>alert(1)</script>\"'&</pre></table><img src=x onerror=alert(1)>\x00\ud800"


class Page(HTMLParser):
    """The tags, texts and attributes of a page; complains about tags that are not closed in order."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    @property
    def heading(self) -> str:
        found = re.search(r"<h1>.*?</span>(.*?)</h1>", self.source)
        assert found is not None
        return found[1]


def page_of(run: RunDirectory) -> Page:
    return Page(write_report(run))


# --- what it says ------------------------------------------------------------------------------------


def test_a_finished_run(tmp_path: Path) -> None:
    page = page_of(samples.finished(tmp_path / "run"))
    # The sample's accuracy at the end is 0.883 - 0.35 exp(-5) = 0.8806.
    assert page.heading == "Target reached: 0.8806 accuracy after 8 epochs, 71 s"
    assert page.count("svg") == 6
    assert page.count("img") == 24
    assert "20 of these 24 are right" in page.text
    assert "ui.perfetto.dev" in page.text
    assert "not an MLPerf result" in page.text
    assert "optimizer.momentum" in page.text
    assert "The training loss includes label smoothing" in page.text


def test_a_record_without_a_loss_is_not_one_whose_loss_is_no_number(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    run.append_metrics({"kind": "train", "step": 700, "epoch": 8.0, "time": 71.0, "gradient_norm": 1.5})
    assert "not a finite number" not in page_of(run).text
    run.append_metrics({"kind": "train", "step": 701, "epoch": 8.0, "time": 71.1, "loss": float("nan")})
    assert "The training loss is not a finite number in 1 of" in page_of(run).text


def test_a_missed_target(tmp_path: Path) -> None:
    page = page_of(samples.finished(tmp_path / "run", reached=False))
    assert page.heading == "Target missed: 0.8476 accuracy after 8 epochs, 71 s"
    assert "The target is 0.87." in page.text


def test_a_missed_target_is_not_a_failure_although_the_script_exits_with_one(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run", reached=False)
    run.describe(exit_code=1, failure="rank 0 of 2 failed on host: exit code 1")
    run.failure(0).write_text(
        json.dumps(
            {"rank": 0, "time": 1.0, "type": "SystemExit", "message": "1", "exit": True, "echo": False}
        )
    )
    assert page_of(run).heading.startswith("Target missed")


@pytest.mark.parametrize("records", [0, 40])
def test_a_failed_run_names_the_first_failure_not_its_echo(tmp_path: Path, records: int) -> None:
    run = samples.failed(tmp_path / "run", records=records)
    os.utime(run.failure(0), (0, 0))
    page = page_of(run)
    assert page.heading == "Failed: rank 1 raised ValueError"
    assert "loss = loss_fn(model(images), labels)" in page.text
    assert "Connection closed by peer" in page.text
    assert ("No measurement was recorded." in page.text) == (records == 0)


def test_a_hora_error_shows_its_fix_and_no_traceback(tmp_path: Path) -> None:
    run = samples.failed(tmp_path / "run")
    record = json.loads(run.failure(1).read_text())
    record["hora"] = {"what": "global_batch=250 does not divide.", "fix": "Use 248.", "slug": "global-batch"}
    run.failure(1).write_text(json.dumps(record))
    page = page_of(run)
    assert "global_batch=250 does not divide." in page.text
    assert "Use 248." in page.text
    assert page.count("pre") == 0


@pytest.mark.parametrize(
    ("about", "heading"),
    [
        (
            {
                "exit_code": 139,
                "failure": "rank 1 of 2 failed on host: SIGSEGV (segmentation fault), exit code 139",
            },
            "Failed: rank 1 of 2: SIGSEGV (segmentation fault), exit code 139",
        ),
        ({"exit_code": 130, "failure": "interrupted; 2 workers stopped."}, "Interrupted; 2 workers stopped."),
        ({"exit_code": 3}, "Failed with exit code 3"),
        ({"exit_code": 0}, "Finished"),
        ({}, "Still running"),
    ],
)
def test_runs_without_summary(tmp_path: Path, about: dict[str, Any], heading: str) -> None:
    run = RunDirectory.create(tmp_path / "run", about=about)
    assert page_of(run).heading == heading


def test_a_run_that_has_been_quiet_for_long_is_not_called_running() -> None:
    data = RunData(path=Path("run"), last_change=1000.0)
    assert outcome(data, now=1060.0).headline == "Still running"
    assert outcome(data, now=1200.0).headline == "Not finished"


def test_scaling_factor() -> None:
    summary = {
        "workers": 4,
        "scaling": {"one_worker": 100.0, "all_workers": 350.0, "rounds": [[98, 340], [102, 360]]},
    }
    measured = scaling(RunData(path=Path("run"), about={"summary": summary}))
    assert measured is not None
    assert measured.factor == 3.5
    assert measured.sentence() == (
        "Measured in this run: 4 workers train 3.50 times as fast as one, 88 % of the ideal 4."
    )
    assert measured.one_rounds == (98.0, 102.0)
    summary["scaling"] |= {"factor": 3.48, "low": 3.4, "high": 3.55}
    bounded = scaling(RunData(path=Path("run"), about={"summary": summary}))
    assert bounded is not None
    assert bounded.sentence().startswith(
        "Measured in this run: 4 workers train 3.48 times as fast as one, 87 %"
    )
    assert bounded.sentence().endswith("With 95 % it is between 3.40 and 3.55.")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.04, "3.0 s"), (71.4, "71 s"), (119.4, "119 s"), (252.0, "4 min 12 s"), (7500.0, "2 h 5 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# --- what it must withstand --------------------------------------------------------------------------


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    run = samples.failed(tmp_path / "run")
    clean = page_of(run)
    summary = {"workload": HOSTILE, "profile": HOSTILE, "workers": 2, "accuracy": HOSTILE}
    run.describe(name=HOSTILE, summary=summary, versions={HOSTILE: HOSTILE}, command=[HOSTILE, HOSTILE])
    record = json.loads(run.failure(1).read_text())
    run.failure(1).write_text(
        json.dumps(
            record | {"type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE, "hora": {"fix": HOSTILE}}
        )
    )
    page = page_of(run)
    assert page.count("script") == 0
    assert page.count("img") == clean.count("img") == 0
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("<script>alert(1)</script>") >= 6


def test_hostile_predictions(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    record = samples.predictions(2)
    record["classes"] = [HOSTILE] * 10
    record["images"] += [
        {"png": "https://example.org/x.png", "label": 1},
        {"png": "PHN2Zz4=", "label": 1},  # base64 of "<svg>"
        {"png": record["images"][0]["png"] + '"onerror="alert(1)', "label": 0},
        {"png": record["images"][0]["png"], "label": HOSTILE, "predicted": None, "confidence": "x"},
        7,
    ]
    (run.path / "predictions.json").write_text(json.dumps(record))
    page = page_of(run)
    assert page.count("img") == 3
    assert page.count("script") == 0
    assert "left out 4 images, not PNG" in page.text


def test_drawn_detections_are_shown_and_others_left_out(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    png = samples.predictions(1)["images"][0]["png"]
    large = base64.b64encode(base64.b64decode(png) + bytes(200_000)).decode()
    pictures = [
        {"png": png, "text": HOSTILE},
        {"png": "PHN2Zz4=", "text": "no PNG"},
        {"png": large, "text": "too large"},
        7,
    ]
    (run.path / "detections.json").write_text(json.dumps({"pictures": pictures}))
    (run.path / "predictions.json").unlink()
    page = page_of(run)
    assert page.count("img") == 1
    assert page.count("script") == 0
    assert "left out 3 pictures, not PNG" in page.text
    assert "Detections on test pictures" in page.text


def test_nothing_in_the_page_asks_for_anything(tmp_path: Path) -> None:
    page = page_of(samples.finished(tmp_path / "run"))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed", "form", "video")
        assert (attributes.get("src") or "data:").startswith("data:")
        assert not re.match(r"[a-z]+:(?!,)|//", attributes.get("href") or "")
    assert "url(" not in page.source
    assert "@import" not in page.source


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\x00\xff", '{"summary": 3}']
)
def test_malformed_files(tmp_path: Path, content: str) -> None:
    run = samples.failed(tmp_path / "run")
    for path in (run.run_json, run.metrics, run.path / "predictions.json", run.failure(0), run.failure(1)):
        path.write_text(content + "\n", encoding="latin-1")
    assert page_of(run).count("h1") == 1


def test_an_empty_directory_and_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    assert page_of(RunDirectory(tmp_path)).count("h1") == 1
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "run.json").mkdir()
    assert page_of(RunDirectory(tmp_path)).count("h1") == 1


def test_half_written_last_line_and_malformed_lines(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run", records=10)
    with run.metrics.open("a") as file:
        file.write('not json\n[1]\n{"kind": "train", "lo')
    page = page_of(run)
    assert "2 malformed lines left out" in page.text


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [1.0, 1.0],
        [math.nan],
        [math.nan, math.inf, -math.inf],
        [1.0, math.nan, 2.0, math.nan],
        [0.0, 0.0],
        [1e308, -1e308],
        [5e-324, 1.0],
        [-1.0, 1e6],
        [1e30, 1e-30],
    ],
)
def test_odd_numbers(tmp_path: Path, values: list[float]) -> None:
    run = samples.finished(tmp_path / "run")
    lines: list[dict[str, Any]] = []
    for step, value in enumerate(values):
        numbers = dict.fromkeys(("time", "loss", "accuracy", "lr"), value) | {"step": step, "epoch": step / 2}
        rates = {"samples_per_second": value, "samples_per_second_per_rank": [value, value, None, "x"]}
        lines += [{"kind": "train", **numbers, **rates}, {"kind": "eval", **numbers}]
    samples.write_lines(run, lines)
    run.describe(summary=dict.fromkeys(run.about()["summary"], values))
    page = page_of(run)
    assert not re.search(r'(?:[xy12]|cx|cy|width|height|d)="[^"]*(?:nan|inf)', page.source)
    bad = sum(not math.isfinite(value) for value in values)
    if 0 < bad < len(values):
        assert f"not a finite number in {bad} of {len(values)} records, first at epoch 0.5." in page.text


def test_values_of_wrong_types(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    kinds: list[Any] = ["train", "eval", None, []]
    odd: list[Any] = [None, True, "x", [1], {"a": 1}, 10**400, -3]
    samples.write_lines(
        run,
        [
            {"kind": kind, "step": value, "epoch": value, "loss": value, "samples_per_second_per_rank": value}
            for kind in kinds
            for value in odd
        ],
    )
    summary = run.about()["summary"]
    for value in odd:
        run.describe(
            **dict.fromkeys(("config", "world", "versions", "created", "exit_code", "workers"), value)
        )
        run.describe(summary=dict.fromkeys(summary, value))
        assert page_of(run).count("h1") == 1
        run.describe(summary=summary | {"scaling": {"one_worker": 1.0, "all_workers": 2.0, "rounds": value}})
        assert page_of(run).count("h1") == 1


def test_64_ranks_and_one_without_measurements(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run", workers=64, records=50)
    page = page_of(run)
    assert page.source.count('class="box"') == 64
    # The sample's rank 5 is 10 % slower than the others.
    assert "Rank 5 is the slowest, 10 % below the median" in page.text


def test_a_hundred_thousand_records_stay_small_and_quick(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run", records=2000)
    lines = run.metrics.read_text() * 50
    run.metrics.write_text(lines)
    start = time.process_time()
    path = write_report(run)
    assert time.process_time() - start < 4.0  # 1.3 s on an idle machine
    assert path.stat().st_size < 2_000_000


def test_long_texts_stay_bounded(tmp_path: Path) -> None:
    run = samples.failed(tmp_path / "run")
    run.describe(config={f"key{index}": "x" * 5000 for index in range(1000)})
    record = json.loads(run.failure(1).read_text())
    long = "".join(f"frame {index}\n" for index in range(1_000_000)) + "the cause"
    run.failure(1).write_text(json.dumps(record | {"traceback": long, "message": long}))
    (run.path / "predictions.json").write_text(json.dumps(samples.predictions(500)))
    path = write_report(run)
    assert path.stat().st_size < 2_000_000
    assert "the cause" in path.read_text()


def test_writing_again_replaces_the_page_and_leaves_no_draft(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    before = {path.name for path in run.path.iterdir()}
    write_report(run)
    write_report(run)
    assert {path.name for path in run.path.iterdir()} - before == {"report.html"}


# --- the verb ----------------------------------------------------------------------------------------


def test_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = samples.finished(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out.strip() == str(run.report)
    assert main(["report", str(tmp_path / "other")]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_verb_opens_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = samples.finished(tmp_path / "run")
    opened: list[str] = []

    def show(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", show)
    assert main(["report", "--open", str(run.path)]) == 0
    assert opened == [run.report.as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert main(["report", "--open", str(run.path)]) == 1
    assert "no browser was found" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    (run.path / "report.html.new").mkdir()
    with pytest.raises(RunDirectoryError, match=r"report\.html\.new cannot be written"):
        write_report(run)
