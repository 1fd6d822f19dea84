from __future__ import annotations

import json
from pathlib import Path

import pytest

from _interleave import Report, case_text, duration, interleave, long_table, size, speedup, spread, wide_table


def test_each_contender_runs_once_per_round_in_an_order_that_changes() -> None:
    order: list[str] = []
    names = ("a", "b", "c")
    found = interleave({name: lambda name=name: order.append(name) or len(order) for name in names}, 20)
    rounds = [order[first : first + 3] for first in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 3
    assert found["a"] == [index + 1 for index, name in enumerate(order) if name == "a"]


def test_the_order_is_the_same_everywhere() -> None:
    """Ranks that drew different orders would wait for each other in different collectives."""

    def order() -> list[str]:
        seen: list[str] = []
        interleave({name: lambda name=name: seen.append(name) for name in "abcd"}, 10)
        return seen

    assert order() == order()


def test_rounds_end_early_but_not_before_the_least_number() -> None:
    assert interleave({"a": lambda: 1}, 50, seconds=0.0, least=3) == {"a": [1, 1, 1]}
    assert interleave({"a": lambda: 1}, 2, seconds=0.0, least=3) == {"a": [1, 1]}


def test_spread_is_the_median_with_the_quartiles() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == (3.0, 2.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


def test_speedup_pairs_the_rounds() -> None:
    """A slow spell that both contenders saw does not show: 2/1, 20/10 and 4/2 are all 2."""
    assert speedup([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="zip"):
        speedup([1.0, 2.0], [1.0])


def test_report_writes_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("example", base="slow")
    report.add({"ranks": 2, "bytes": 1024}, {"slow": [4.0, 4.0], "fast": [1.0, 2.0]})
    report.add({"ranks": 2, "bytes": 4096}, {"fast": [1.0]})
    report.leave_out("other", "not installed")
    assert report.finish(tmp_path / "new" / "example.json") == 0
    found = json.loads((tmp_path / "new" / "example.json").read_text())
    slow, fast, alone = found["rows"]
    assert slow["ratio"]["median"] == 1
    assert fast["values"] == [1.0, 2.0]
    assert fast["ratio"] == {"median": 3.0, "low": 2.5, "high": 3.5}
    assert alone["ratio"] is None
    assert found["left_out"] == {"other": "not installed"}
    assert found["machine"]["cores"] >= 1
    assert capsys.readouterr().out == "left out: other: not installed\n"


def test_a_failed_contender_fails_the_benchmark() -> None:
    report = Report("example", base="slow")
    report.leave_out("other", "it crashed", failed=True)
    assert report.finish(None) == 1


def test_tables() -> None:
    report = Report("example", base="slow")
    report.add({"bytes": 1024}, {"slow": [0.004], "fast": [0.001]})
    report.add({"bytes": 4096}, {"slow": [0.004]})
    assert wide_table(report.rows).splitlines() == [
        "case   slow     fast",
        "1 KiB  4.00 ms  1.00 ms x4.00",
        "4 KiB  4.00 ms",
        "(x: slow over it)",
    ]
    assert long_table(report.rows).splitlines() == [
        "case   contender  median (middle half)  slow over it",
        "1 KiB  slow       4.00 ms               1.00",
        "       fast       1.00 ms               4.00",
        "4 KiB  slow       4.00 ms               1.00",
    ]


def test_units() -> None:
    assert [size(count) for count in (4, 1024, 2**26, 100_000_000)] == ["4 B", "1 KiB", "64 MiB", "100 MB"]
    assert [duration(seconds) for seconds in (2e-6, 0.25, 3.0)] == ["2.0 us", "250.00 ms", "3.00 s"]
    assert case_text({"collective": "broadcast", "ranks": 1, "bytes": 64}) == "broadcast, 1 rank, 64 B"
