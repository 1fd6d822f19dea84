"""Predicted against published: the bars, the baselines, and tables that are not Hora's."""

from pathlib import Path

import pytest

from hora.core.errors import DataError
from hora.plan.collectives import DATA
from hora.plan.scores import Score, families, summary
from hora.plan.validation import validate


@pytest.fixture(scope="module")
def everything() -> list[Score]:
    return validate()[0]


def test_rows_of_several_servers_meet_the_bars(everything):
    found = summary([score for score in everything if not score.single])
    assert found["rows"] >= 30
    assert found["median"] <= 0.08
    assert found["p90"] <= 0.15
    assert 0.70 <= found["covered"] <= 0.90


def test_the_stated_interval_holds_four_rows_in_five(everything):
    assert 0.70 <= summary(everything)["covered"] <= 0.90


def test_trivial_planners_are_beaten_in_error_and_in_order(everything):
    for some in (everything, [score for score in everything if not score.single]):
        found = summary([score for score in some if score.linear])
        assert found["mean"] < min(found["constant"], found["linear"])
        assert found["order"] > max(found["order_constant"], found["order_linear"])


def test_memory_is_within_a_tenth(everything):
    memory = families(everything)["memory"]
    assert len(memory) == 12
    assert max(abs(score.error) for score in memory) < 0.10


def test_every_row_is_recomputed_or_told_why_not():
    for path in sorted(DATA.glob("*.csv")):
        scores, unread = validate([str(path)])
        assert scores or unread, path.name
        assert all(one.reason for one in unread)


def test_a_single_node_row_is_judged_without_itself(tmp_path: Path):
    lines = (DATA / "dle_throughput.csv").read_text().splitlines()
    row = next(line for line in lines if line.startswith("PyTorch,SSD300") and ",8,128,128," in line)
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(f"{lines[0]}\n{row.replace(row.split(',')[13], '1.0')}\n")
    (score,), _ = validate([str(wrong)])
    assert score.predicted > 1000
    assert not score.covered


def test_a_model_of_the_users_is_judged_by_its_own_single_node_rows(tmp_path: Path):
    head = (DATA / "dle_throughput.csv").read_text().splitlines()[0]
    columns = head.split(",")

    def line(gpus: int, nodes: int, rate: float) -> str:
        cells = dict.fromkeys(columns, "")
        cells |= {"framework": "Mine", "model": "Own net", "task": "train", "system": "DGX A100"}
        cells |= {"gpu": "A100-80GB", "precision": "mixed", "unit": "images/s", "batch_per_gpu": "64"}
        cells |= {"gpus": str(gpus), "nodes": str(nodes), "throughput": str(rate)}
        return ",".join(cells[name] for name in columns)

    table = tmp_path / "mine.csv"
    table.write_text("\n".join([head, line(1, 1, 1000), line(8, 1, 7800), line(64, 8, 60_000)]) + "\n")
    scores, unread = validate([str(table)])
    assert not unread
    several = next(score for score in scores if score.gpus == 64)
    assert several.predicted == pytest.approx(60_000, rel=0.1)


@pytest.mark.parametrize("content", ["", "a,b\n", b"\xff\xfe\x00bad"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content):
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError):
        validate([str(path)])


def test_a_table_of_other_columns_is_told_apart(tmp_path: Path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    scores, unread = validate([str(path)])
    assert not scores
    assert "columns a, b" in unread[0].reason


def test_a_missing_file_says_so(tmp_path: Path):
    with pytest.raises(DataError, match="cannot be read"):
        validate([str(tmp_path / "none.csv")])
