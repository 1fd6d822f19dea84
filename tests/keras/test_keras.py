"""Keras on each of its backends: see ``job.py`` for what the ranks do. They are forked."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.forked import Forked

JOB = Path(__file__).with_name("job.py")
ELASTIC = Path(__file__).with_name("elastic_job.py")
LIMIT = 200.0
"""Seconds for a whole job with all its cases, on a busy machine."""

FEW = ("fit_is", "process_set", "metrics")
"""What three ranks have beyond two: uneven shares, sets of some ranks, sums of more than two."""


HOROVOD = """
import keras
import numpy as np
import horovod.keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()), None, backward_passes_per_step=2)
model.compile(optimizer, "mse")
x = np.full((8, 4), hvd.rank(), np.float32)
model.fit(x, x[:, :2], batch_size=2, epochs=2, verbose=0, callbacks=[
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=2),
])
kernel = keras.ops.convert_to_numpy(model.layers[0].kernel.value)
assert (hvd.allgather(kernel[None]) == kernel).all()
assert hvd.allreduce(float(hvd.rank()), "rank", False) == sum(range(hvd.size()))
assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 4
print("trained", hvd.rank(), hvd.mpi_built(), flush=True)
"""


@pytest.fixture(scope="module", params=["torch", "tensorflow", "jax"])
def backend(request: pytest.FixtureRequest) -> str:
    """The tests of one are run before those of the next."""
    return str(request.param)


@pytest.fixture(scope="module")
def forked(backend: str) -> Iterator[Forked]:
    """Runs jobs on this backend."""
    variables = {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling takes longer than all else
    }
    forked = Forked("hora.keras", patience=LIMIT, env=variables)
    yield forked
    forked.close()


def run(forked: Forked, folder: Path, *arguments: str) -> tuple[int, str]:
    """A job of ``hora run``: its exit code, and what it printed."""
    return forked.run("--run-dir", str(folder / "run"), *arguments, folder=folder)


@pytest.mark.parametrize("backend", ["torch"], indirect=True)
def test_horovods_names(forked: Forked, tmp_path: Path) -> None:
    """A script that was written for Horovod trains under ``hora run --horovod``."""
    (tmp_path / "script.py").write_text(HOROVOD)
    code, output = run(forked, tmp_path, "--horovod", "-np", "2", "script.py")
    assert code == 0, output
    assert "trained 0 False" in output
    assert "trained 1 False" in output


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.timeout(LIMIT + 10)
def test_ranks(backend: str, size: int, forked: Forked, tmp_path: Path) -> None:
    """Every case passes on every rank. Then the model of one is made to differ, and the guard says so; and
    one raises, or is killed, and the job ends within 10 s.
    """
    cases, end = ((), "raise") if size == 2 else (FEW, "kill")
    code, output = run(forked, tmp_path, "-n", str(size), str(JOB), *cases, "--end", end)
    ended = time.time()
    for rank in range(size):
        assert f"rank {rank} of {size} on {backend}: passed" in output, output
    failing = re.search(r"failing at ([\d.]+)", output)
    assert failing is not None, output
    assert ended - float(failing[1]) < 10, output
    if end == "raise":
        assert code == 1, output
        assert "hora: rank 1 of 2 failed" in output, output
        assert "RuntimeError: this rank fails on purpose" in output, output
        assert output.count("The ranks' models differ") == 1, output
        assert "in each of steps 1 to 3 their" in output, output
        assert "started from the same state of the generator on all ranks" in output, output
        assert re.search(r"At step \d+ the gradient of \S+/guarded/kernel and 3 more was not", output), output
        assert re.search(r"Parameter .*dense\S*/kernel\S* is not the same on all ranks", output), output
    else:
        assert code == 137, output
        assert "models differ" not in output, output
        assert re.search(r"hora: rank 0 of 3 .*(SIGKILL|killed)", output), output


@pytest.mark.timeout(LIMIT + 10)
def test_a_killed_rank_costs_steps_and_nothing_else(forked: Forked, tmp_path: Path) -> None:
    """Rank 0 is killed in an epoch of ``fit``; the job is started anew and ends as if nothing had been."""
    found = {}
    for victim in (-1, 0):
        folder = tmp_path / str(victim)
        folder.mkdir()
        words = ("-n", "2", "--restarts", "1", str(ELASTIC), str(victim), str(folder / "trained.npz"))
        code, output = run(forked, folder, *words)
        assert code == 0, output
        assert ("SIGKILL" in output and "from commit 2" in output) == (victim >= 0), output
        found[victim] = dict(np.load(folder / "trained.npz"))
    assert found[0]["epoch"] == 4
    for name, value in found[-1].items():
        np.testing.assert_array_equal(found[0][name], value, err_msg=name)


@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named_and_ends_the_job(who: int, forked: Forked, tmp_path: Path) -> None:
    words = ("-n", "2", "--stall-after", "2", "--stall-abort", "4", str(ELASTIC), "stop", str(who))
    code, output = run(forked, tmp_path, *words)
    ended = time.time()
    assert code != 0, output
    lines = (tmp_path / "run" / "verdicts.jsonl").read_text().splitlines()
    late = [verdict for verdict in map(json.loads, lines) if verdict["kind"] == "late-rank"]
    assert late, output
    assert late[0]["ranks"] == [who]
    stopped = re.search(r"stopping at ([\d.]+)", output)
    assert stopped is not None, output
    assert ended - float(stopped[1]) < 10, output
