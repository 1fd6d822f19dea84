"""The shared loop with SSD and Mask R-CNN: logs by MLPerf's rules, resuming, and missed targets."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ranks import run_ranks
from tests.workloads.test_maskrcnn import PROFILE as MASKRCNN
from tests.workloads.test_ssd import PROFILE as SSD

import hora.torch as hora
from hora.core.errors import UsageError
from hora.core.notices import StopForNow
from hora.core.rundir import RunDirectory
from hora.mlperf.check import check
from hora.workloads import start
from hora.workloads.maskrcnn import options as maskrcnn_options
from hora.workloads.maskrcnn.learner import MaskRCNNLearner
from hora.workloads.pace import Pace
from hora.workloads.scenes.train import run
from hora.workloads.ssd import options as ssd_options
from hora.workloads.ssd.learner import SSDLearner


def test_an_ssd_that_was_asked_to_stop_goes_on_to_the_same_end(tmp_path: Path) -> None:
    profile = dataclasses.replace(SSD, epochs=3, targets={"bbox": 1.0}, log_every=1, checkpoint_every=10)

    def body(asked_in: int | None) -> bool:
        counted = itertools.count(1)
        count = Pace.count

        def and_ask(self: Any, *args: Any, **options: Any) -> None:
            if next(counted) == asked_in and hora.rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            count(self, *args, **options)

        Pace.count = and_ask
        try:
            run(profile, workload="ssd", make=SSDLearner)
        except StopForNow:
            return True
        return False

    assert run_ranks(2, body, None, run_dir=tmp_path / "whole") == [False, False]
    assert run_ranks(2, body, 2, run_dir=tmp_path / "first") == [True, True]
    rest: dict[str, Any] = {"run_dir": tmp_path / "rest", "resume": tmp_path / "first"}
    assert run_ranks(2, body, None, **rest) == [False, False]
    kept = ("kind", "step", "loss", "lr", "bbox")
    whole, head, tail = (
        [[record.get(key) for key in kept] for record in RunDirectory.open(tmp_path / name).read_metrics()]
        for name in ("whole", "first", "rest")
    )
    assert len(tail) > 0
    assert head + tail == whole  # to the last bit
    log = tmp_path / "whole" / "mlperf.log"
    passing = re.sub(r'("key": "eval_accuracy", "value": )[0-9.e-]+', r"\g<1>0.24", log.read_text())
    log.write_text(passing)
    good, said = check(tmp_path / "whole")
    assert good, said


def test_the_log_of_a_mask_rcnn_lacks_nothing_but_precision(tmp_path: Path) -> None:
    profile = dataclasses.replace(MASKRCNN, epochs=1)
    run_ranks(1, lambda: run(profile, workload="maskrcnn", make=MaskRCNNLearner), run_dir=tmp_path / "run")
    good, said = check(tmp_path / "run")
    assert not good
    assert re.findall(r"Failed checks for (\S+)", said) == ["eval_accuracy"]
    log = tmp_path / "run" / "mlperf.log"
    log.write_text(re.sub(r'"(BBOX|SEGM)": [0-9.e-]+', r'"\1": 0.4', log.read_text()))
    good, said = check(tmp_path / "run")
    assert good, said


def test_options_survive_the_way_to_the_workers() -> None:

    parser = argparse.ArgumentParser()
    maskrcnn_options.add(parser)
    words = (
        "--target 0.2 0.1 --data here --seed 3 --epochs 2 --global-batch 32 --checkpoint-every 7 --train-on"
    )
    first = parser.parse_args(words.split())
    again = parser.parse_args(maskrcnn_options.words(first))
    again.data = first.data
    profile = maskrcnn_options.profile(again)
    assert profile == maskrcnn_options.profile(first)
    assert profile.targets == {"bbox": 0.2, "segm": 0.1}
    assert profile.schedule.lr == 2 * maskrcnn_options.profile(parser.parse_args([])).schedule.lr
    assert (profile.checkpoint_every, profile.train_on, profile.data.scenes.seed) == (7, True, 3)
    with pytest.raises(UsageError, match="--target 2.0 is out of range"):
        maskrcnn_options.profile(parser.parse_args(["--target", "0.2", "2"]))


def test_without_a_launcher_a_missed_target_is_a_sentence_and_exit_code_1() -> None:
    def body(missed: list[str]) -> int:
        hora.init = lambda: None
        try:
            start.start("ssd", ssd_options, lambda profile: SimpleNamespace(missed=missed), [])
        except SystemExit as end:
            return int(str(end.code))
        return 0

    assert run_ranks(1, body, ["bbox 0.1000 is below 0.23"]) == [1]
    assert run_ranks(1, body, []) == [0]
