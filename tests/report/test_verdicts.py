"""The guard's verdicts in the report: all of them, whatever the file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report import samples
from tests.report.test_report import HOSTILE, page_of

from hora.core.events import Timeline
from hora.core.rundir import RunDirectory
from hora.guard.verdict import KINDS, Verdict
from hora.report._markdown import to_html

LATE = Verdict(
    kind="late-rank",
    text="Ranks 0 and 2 have been waiting for 31 s in allreduce 'loss' at train.py:41; rank 1 did not come.",
    advice="If it is slow by design, say so.",
    ranks=(1,),
    hosts=("lab-3",),
    call="allreduce 'loss' float32 (3,) sum",
    where="train.py:36",
    step=1204,
    time=samples.STARTED + 200.0,
)


def write(run: RunDirectory, *lines: str) -> None:
    (run.path / "verdicts.jsonl").write_text("".join(lines), encoding="utf-8", errors="surrogatepass")


def test_a_verdict_stands_above_the_curves_with_its_page(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    write(run, LATE.line())
    page = page_of(run)
    for words in (
        LATE.text,
        LATE.advice,
        "rank 1 on lab-3",
        "step 1,204",
        "train.py:36",
        "3 min 20 s after the start",
    ):
        assert words in page.text
    assert page.text.index(LATE.text) < page.text.index("Training")
    link = next(attributes for tag, attributes in page.tags if attributes.get("href") == "#about-late-rank")
    assert link
    assert any(attributes.get("id") == "about-late-rank" for _, attributes in page.tags)
    assert "with hora.only(0" in page.text  # the page's right example


def test_a_verdict_that_ended_the_job_is_told_once(tmp_path: Path) -> None:
    run = samples.failed(tmp_path / "run")
    for rank in (0, 1):
        record = json.loads(run.failure(rank).read_text())
        record |= {"type": "hora.core.errors.VerdictError", "message": LATE.text, "echo": False}
        record["hora"] = {"what": LATE.text, "fix": LATE.advice, "slug": "verdict"}
        run.failure(rank).write_text(json.dumps(record))
    assert (
        page_of(run).text.count(LATE.text) == 2
    )  # without the guard's file each rank's words are all there is
    write(run, LATE.line())
    page = page_of(run)
    assert "Stopped by the guard" in page.text
    assert page.text.count(LATE.advice) == 1


def test_information_comes_behind_alarms(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    plan = Verdict(kind="plan", text="Global batch 128, 40 steps per epoch.")
    write(run, plan.line(), LATE.line())
    page = page_of(run)
    assert page.text.index(LATE.text) < page.text.index(plan.text)
    assert page.source.count('class="verdict calm"') == page.source.count('class="verdict alarm"') == 1


@pytest.mark.parametrize("guard", ["on", "strict", "off", None])
def test_a_quiet_line_when_the_guard_found_nothing(tmp_path: Path, guard: str | None) -> None:
    run = samples.finished(tmp_path / "run")
    if guard is not None:
        run.describe(guard=guard)
    page = page_of(run)
    assert ("The guard watched this run and found nothing." in page.text) == (guard in ("on", "strict"))
    assert "Verdicts" not in page.text


def test_a_broken_line_is_shown_as_such(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    broken = ['{"kind": "diverged", "ra', "[1]", '{"kind": 7}', "\ud800\x00", "[" * 100_000]
    write(run, LATE.line(), *(line + "\n" for line in broken))
    page = page_of(run)
    assert page.text.count("A line of verdicts.jsonl that is no verdict") == len(broken)
    assert broken[0] in page.text
    assert LATE.text in page.text


@pytest.mark.parametrize(
    "value", [None, True, -1, 10**400, 1e308, "x", [None, "x", -1, 2.5], {"a": 1}, HOSTILE]
)
def test_odd_values(tmp_path: Path, value: Any) -> None:
    run = samples.finished(tmp_path / "run")
    names = ("ranks", "hosts", "call", "where", "step", "text", "advice", "time")
    for record in (dict.fromkeys(names, value), {name: [value] for name in names}, {}):
        write(
            run,
            json.dumps({"kind": "late-rank"} | record) + "\n",
            json.dumps({"kind": HOSTILE} | record) + "\n",
        )
        page = page_of(run)
        assert page.source.count('class="verdict alarm"') == 2
        assert page.count("script") == 0
        assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_a_kind_without_a_page_and_very_many_verdicts(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    write(run, *(json.dumps({"kind": "brand-new", "text": f"number {index}"}) + "\n" for index in range(60)))
    page = page_of(run)
    assert "#about-brand-new" not in page.source
    assert "number 49" in page.text
    assert "number 50" not in page.text
    assert "10 more are in verdicts.jsonl" in page.text


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    (run.path / "verdicts.jsonl").mkdir()
    assert "verdicts.jsonl cannot be read" in page_of(run).text


def test_the_report_shows_where_the_time_went(tmp_path: Path) -> None:
    run = samples.finished(tmp_path / "run")
    timeline = Timeline(run.events(0), rank=0)
    timeline.add("step", samples.STARTED, samples.STARTED + 3, lane="steps")
    timeline.add("mean", samples.STARTED + 1, samples.STARTED + 2, lane="collectives")
    timeline.close()
    page = page_of(run)
    assert page.count("svg") == 7
    assert "communication (exposed), 33 %" in page.text
    assert "No events of rank 1 of 2" in page.text


def test_every_kind_has_a_page_with_a_wrong_and_a_right_script() -> None:
    folder = Path(__file__).parents[2] / "docs" / "verdicts"
    assert {page.stem for page in folder.glob("*.md")} == set(KINDS)
    for kind, title in KINDS.items():
        text = (folder / f"{kind}.md").read_text()
        assert text.startswith(f"# {title}\n")
        wrong, right = text.index("\n## Wrong\n\n```python"), text.index("\n## Right\n\n```python")
        assert wrong < right < text.index("\nWhat to check:\n")
        for block in text.split("```python\n")[1:]:
            compile(block.split("```")[0], f"{kind}.md", "exec")


def test_every_page_becomes_html(tmp_path: Path) -> None:
    for kind in KINDS:
        run = samples.finished(tmp_path / kind)
        write(run, Verdict(kind=kind, text="x").line())
        page = page_of(run)
        assert page.source.count("<h4>") == 2
        assert "```" not in page.text
        assert "](" not in page.text


def test_markdown() -> None:
    assert to_html(
        "# Title\n\nA `<b>` and\n**bold** [link](x.md).\n\n## Head\n\n"
        "```python\na < b\n\n# no head\n```\n- one\n  more\n- two\n"
    ) == (
        "<p>A <code>&lt;b&gt;</code> and <strong>bold</strong> link.</p>\n<h4>Head</h4>\n"
        '<pre tabindex="0">a &lt; b\n\n# no head</pre>\n<ul><li>one more</li><li>two</li></ul>'
    )
    assert to_html("```\nnever closed") == '<pre tabindex="0">never closed</pre>'
