"""Each benchmark at a tiny size: it runs, proves its contenders, and writes what the summary reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from _trainers import LOSS_TOLERANCE

ROOT = Path(__file__).parents[2]


def run(name: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results(path: Path, name: str, *flags: str) -> dict[str, Any]:
    run(name, *flags, "--json", str(path))
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["benchmark"] == name
    assert all(min(row["values"]) > 0 for row in found["rows"] if row["unit"] == "s")
    return found


def contenders(found: dict[str, Any]) -> set[str]:
    return {row["contender"] for row in found["rows"]} | set(found["left_out"])


def test_collectives(tmp_path: Path) -> None:
    kinds = ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"]
    flags = ["--sizes", "4", "1KiB", "--rounds", "2", "--collectives", *kinds]
    found = results(tmp_path / "it.json", "collectives", *flags)
    assert contenders(found) == {"copy", "Gloo", "MPI", "Hora", "Hora, in the engine"}
    gloo = [row["case"] for row in found["rows"] if row["contender"] == "Gloo"]
    assert gloo == [{"collective": kind, "ranks": 2, "bytes": size} for kind in kinds for size in (4, 1024)]


def test_training_steps(tmp_path: Path) -> None:
    """Every contender that is there trains, and has DDP's loss."""
    found = results(tmp_path / "it.json", "train_vs_peers", "--models", "tiny", "--rounds", "1")
    taking_part = {row["contender"] for row in found["rows"]}
    assert taking_part >= {"one worker", "apart", "Hora", "DDP", "DDP, views", "DDP + ZeRO", "FSDP2"}
    assert contenders(found) == taking_part | {"Hora, sharded", "Accelerate", "Fabric", "Horovod"}
    assert {row["case"]["measure"] for row in found["rows"]} == {"step", "optimizer memory", "peak memory"}
    losses = {name: float(text.split()[-1]) for name, text in found["notes"].items()}
    # The proof by the loss would find ranks that do not average.
    assert abs(losses["tiny, apart"] / losses["tiny, DDP"] - 1) > 10 * LOSS_TOLERANCE


def test_scaling(tmp_path: Path) -> None:
    found = results(
        tmp_path / "it.json", "scaling", "--ranks", "1", "2", "--parameters", "900", "--rounds", "1"
    )
    assert contenders(found) == {"apart", "Hora", "DDP"}
    assert [row["case"]["ranks"] for row in found["rows"] if row["contender"] == "Hora"] == [1, 2]


def test_start_up(tmp_path: Path) -> None:
    found = results(tmp_path / "it.json", "start_up", "--launchers", "hora run, hora.torch", "--rounds", "1")
    values = {row["case"]["measure"]: row["values"][0] for row in found["rows"]}
    began, met, stepped, back = (
        values[name] for name in ("rank 0 starts", "ranks have met", "first step done", "launcher back")
    )
    assert began < met < stepped < back
    # Two ranks hold PyTorch, and the launcher does not.
    assert values["memory of the ranks"] > 100e6 > values["memory of the launcher"] > 1e6


def test_what_makes_one_worker_fast(tmp_path: Path) -> None:
    found = results(tmp_path / "it.json", "resnet_speed", "--rounds", "1", "--micro-batch", "2")
    assert {row["case"]["measure"] for row in found["rows"]} == {"training step", "optimizer step"}


def test_matching_by_name(tmp_path: Path) -> None:
    found = results(tmp_path / "it.json", "horovod_overhead", "--rounds", "1")
    assert contenders(found) == {"named", "native"}


def test_how_fast_the_guard_judges(tmp_path: Path) -> None:
    found = results(tmp_path / "it.json", "guard_judge", "--sizes", "4", "8", "--rounds", "1")
    assert contenders(found) == {"4 ranks", "8 ranks"}
    hangs = {row["case"]["hang"] for row in found["rows"]}
    assert hangs == {"mismatched-calls", "late-rank", "subset-call"}


@pytest.mark.alone
def test_what_the_guard_costs(tmp_path: Path) -> None:
    found = results(tmp_path / "it.json", "guard_cost", "--models", "tiny", "--seconds", "1")
    assert contenders(found) == {"without the guard", "with the guard"}
    [ratio] = [row["ratio"] for row in found["rows"] if row["contender"] == "with the guard"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    assert 0.5 < ratio["median"] < 2


def test_what_each_part_of_the_guard_takes(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    run("guard_cost", "--models", "tiny", "--seconds", "1", "--parts", "--json", str(file))
    found = json.loads(file.read_text())
    medians = {row["contender"]: row["spread"]["median"] for row in found["rows"]}
    whole = medians.pop("whole step")
    assert 0 < sum(medians.values()) < whole
    assert all(median > 0 for median in medians.values())  # fingerprints too, which are rare


def test_a_sharded_optimizer_keeps_its_share(tmp_path: Path) -> None:
    """Within 5 % of 1/N, N = 2, of what the same optimizer keeps unsharded."""
    flags = ["--models", "many tensors", "--contenders", "Hora", "Hora, sharded", "--rounds", "1"]
    found = results(tmp_path / "it.json", "train_vs_peers", *flags)
    rows = [row for row in found["rows"] if row["case"]["measure"] == "optimizer memory"]
    memory = {row["contender"]: row["values"][0] for row in rows}
    assert memory["Hora"] == 80 * (40 * 40 + 40) * 4  # a momentum of each parameter, in float32
    assert abs(memory["Hora, sharded"] / memory["Hora"] * 2 - 1) < 0.05
