"""The pieces: fingerprints, tolerances, and what the recorder leaves alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tests.ranks  # noqa: F401 - torch sets variables when it is first imported
import torch
from tests.verify.conftest import SCRIPTS, Ask

from hora.core.recording import Plan, difference
from hora.torch.verify._record_prints import fingerprint, row_digests


@pytest.mark.parametrize("count", [1, 5, 4096, 4097, 30_000])
def test_fingerprints_measure_differences(count: int) -> None:
    generator = torch.Generator().manual_seed(3)
    one = torch.randn(count, dtype=torch.float64, generator=generator)
    change = torch.randn(count, dtype=torch.float64, generator=generator)
    assert fingerprint(one)[0] == pytest.approx(float(one.norm()), rel=1e-12)
    assert difference(fingerprint(one), fingerprint(one.clone())) == 0
    for scale in (1e-8, 1e-3, 1.0):
        estimate = difference(fingerprint(one), fingerprint(one + scale * change))
        # Eight projections: the estimate is within a factor of 3 but for one case in thousands.
        assert scale * float(change.norm()) / 3 < estimate < 3 * scale * float(change.norm())


def test_differences_that_are_too_large_for_squares() -> None:
    assert difference([1e200] * 9, [-1e200] * 9) == pytest.approx(2e200)


def test_a_training_that_overflows_is_compared_up_to_there(ask: Ask, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / "hora_loader.py").read_text().replace("lr=0.1, momentum=0.9", "lr=1e150")
    script.write_text(text.replace("    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", ""))
    report = ask(script, steps=6, float64=True)
    assert report.compared.parting is None
    assert 0 < report.compared.steps < 6
    assert any("not finite" in line for line in report.lines())


def test_fingerprints_of_numbers_that_are_none() -> None:
    bad = torch.tensor([1.0, math.nan])
    assert difference(fingerprint(bad), fingerprint(bad)) == 0
    assert difference(fingerprint(bad), fingerprint(torch.ones(2))) == math.inf


def test_a_digest_tells_rows_apart() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    first, second, third = row_digests(rows)
    assert first == third != second
    assert row_digests(rows[:0]) == []
    assert row_digests(torch.tensor([7, 8])) != row_digests(torch.tensor([8, 7]))


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = Plan(folder=tmp_path, steps=3, apply=("tail",), windows=(1.0, 2.0), replay=tmp_path / "x")
    plan.write(tmp_path / "plan.json")
    read = Plan.read(tmp_path / "plan.json")
    assert (read.folder, read.steps, read.apply, list(read.windows), read.replay) == (
        tmp_path,
        3,
        ("tail",),
        [1.0, 2.0],
        tmp_path / "x",
    )


def test_checkpoints_are_left_alone_and_an_except_does_not_stop_the_stop(ask: Ask, tmp_path: Path) -> None:
    saved = tmp_path / "model.pt"
    saved.write_text("the user's own")
    script = tmp_path / "script.py"
    text = (SCRIPTS / "hora_loader.py").read_text()
    head, loop = text.split("for x, y in")
    loop += f"    torch.save(model.state_dict(), {str(saved)!r})\n"
    body = "\n".join("        " + line for line in ("for x, y in" + loop).splitlines())
    script.write_text(f"{head}while True:\n    try:\n{body}\n    except BaseException:\n        pass\n")
    report = ask(script, steps=12)
    assert report.equal
    assert report.compared.steps == 12
    assert saved.read_text() == "the user's own"
    assert any("torch.save" in line for line in report.lines())
