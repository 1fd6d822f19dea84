"""TensorFlow, Keras and JAX: the same answers as with PyTorch, for scripts that train rightly or wrongly.

Each script is run in forks of one process per framework; its arguments name the faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.conftest import SCRIPTS
from tests.verify.forks import Forks

from hora.launch import ScriptTarget
from hora.verify import Question, Report, verify

STEPS = 2

RIGHT = {
    "hora.tensorflow": ["", "optimizer data-set"],
    "hora.keras on tensorflow": ["sync-batch-norm"],
    "hora.keras on jax": [""],
    "hora.keras on torch": [""],
    "hora.jax": ["gspmd"],
}
WRONG = {
    "hora.tensorflow": {
        "never-averaged": ("averaging", "DistributedGradientTape"),
        "clipped": ("clipping", "Clip what hora.DistributedGradientTape gives"),
        "unequal": ("weighting", "means over 3 to 9 values count alike"),
        "not-broadcast": ("initial-parameters", "hora.broadcast_variables(model.variables)"),
    },
    "hora.keras on tensorflow": {
        "batch-norm": ("batch-norm", "hora.SyncBatchNormalization()"),
        "same-data": ("samples", "12 of the 12 samples of step 1 are used by several workers"),
    },
    "hora.keras on jax": {},
    "hora.keras on torch": {"rate": ("learning-rate", "0.05 with 1 worker and 0.1 with 2")},
    "hora.jax": {"never-averaged": ("averaging", "hora.DistributedOptimizer(optax.adam(...))")},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", RIGHT)
def test_right_and_wrong_scripts(which: str, tmp_path: Path) -> None:
    module, _, backend = which.partition(" on ")
    forks = Forks(module, {"KERAS_BACKEND": backend or "tensorflow"})

    def ask(faults: str) -> Report:
        script = SCRIPTS / module.removeprefix("hora.") / "train.py"
        question = Question(
            target=ScriptTarget(str(script)),
            arguments=faults.split(),
            workers=2,
            steps=STEPS,
            folder=tmp_path / (faults or "right"),
            runner=forks,
        )
        return verify(question, say=lambda line: None)

    try:
        for faults in RIGHT[which]:
            report = ask(faults)
            assert report.equal, (faults, report.lines())
            assert report.lines()[0].startswith(f"2 workers = 1 worker: {STEPS} steps, largest relative")
            assert report.one.ranks[0].ending is not None
            assert report.one.ranks[0].ending.module == module
        for faults, (cause, words) in WRONG[which].items():
            report = ask(faults)
            assert [found.name for found in report.causes] == [cause], (faults, report.lines())
            assert words in " ".join(report.lines())
    finally:
        forks.close()
