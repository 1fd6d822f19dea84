"""``hora plan``: the words of its answers, JSON, pictures and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hora.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_an_answer_names_every_part(capsys):
    code, out, _ = run(capsys, "resnet50", "--on", "dgx-a100", "--gpus", "64", "--price", "2")
    assert code == 0
    for word in ("step", "compute", "all-reduce exposed", "throughput", "memory", "time to train", "energy"):
        assert word in out
    assert "price" in out
    assert "checkpoint every" in out


def test_json_holds_the_same(capsys):
    _, out, _ = run(capsys, "gpt2-8.3b", "--on", "dgx-2h", "--gpus", "512", "--tensor", "8", "--json")
    values = json.loads(out)
    assert values["gpus"] == 512
    assert values["step"]["low"] < values["step"]["value"] < values["step"]["high"]
    assert sum(values["parts"].values()) == pytest.approx(values["step"]["value"])
    assert not values["memory"]["fits"]
    assert values["memory"]["changes"]


def test_a_sweep_is_a_table_and_a_picture(capsys, tmp_path: Path):
    picture = tmp_path / "sweep.svg"
    code, out, _ = run(
        capsys, "resnet50", "--on", "dgx-superpod-2019", "--sweep", "gpus=8..1536", "--picture", str(picture)
    )
    assert code == 0
    assert "1,536" in out
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_validation_is_a_table_and_a_picture(capsys, tmp_path: Path):
    picture = tmp_path / "scatter.svg"
    code, out, _ = run(capsys, "--validate", "--picture", str(picture))
    assert code == 0
    assert "several servers, all" in out
    assert "not recomputed: " in out
    assert len(list(ElementTree.parse(picture).getroot())) > 600


def test_two_machines_are_compared_both_ways(capsys):
    _, out, _ = run(capsys, "resnet50", "--compare", "dgx-1", "dgx-2")
    assert "dgx-2 is 2." in out
    _, out, _ = run(capsys, "resnet50", "--compare", "dgx-2", "dgx-1")
    assert "times slower than dgx-2" in out


def test_a_deadline_and_a_search_answer(capsys):
    _, out, _ = run(capsys, "resnet50", "--on", "dgx-2h", "--deadline", "10min")
    assert "reach the target in" in out
    _, out, _ = run(
        capsys, "--layers", "24", "--hidden", "2048", "--heads", "16", "--on", "dgx-a100", "--search"
    )
    assert "micro-batches" in out


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ((), "hora plan resnet50 --on"),
        (("resnet50",), "--on dgx-a100"),
        (("resnet5", "--on", "dgx-a100"), "hora plan resnet50"),
        (("resnet50", "--on", "dgx-a10"), "--on dgx-a100"),
        (("resnet50", "--on", "dgx-a100", "--sweep", "8..64"), "--sweep gpus=8..512"),
        (("resnet50", "--on", "dgx-a100", "--sweep", "gpus=8..64", "--search"), "Leave out --search"),
        (("resnet50", "--on", "dgx-a100", "--search"), "--layers"),
        (("resnet50", "--on", "dgx-a100", "--deadline", "soon"), "--deadline 80s"),
        (("gpt2-8.3b", "--on", "dgx-2h", "--deadline", "3d"), "--epochs"),
        (("resnet50", "--on", "dgx-a100", "--picture", "x.svg"), "--sweep"),
        (("--layers", "24", "--on", "dgx-a100"), "--hidden 4096"),
        (("resnet50", "--layers", "24", "--on", "dgx-a100"), "one of the three"),
        (("gpt2-8.3b", "--on", "dgx-2h", "--tensor", "0"), "--tensor 1"),
    ],
)
def test_a_wrong_question_names_the_line_to_write(capsys, words, fix):
    code, _, err = run(capsys, *words)
    assert code == 2
    assert fix in err
