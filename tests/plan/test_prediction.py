"""Predictions: the headline, units that fit together, and questions that cannot be answered."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.core.errors import UsageError
from hora.plan import search
from hora.plan.hardware import MACHINES, machine
from hora.plan.memory import Layout
from hora.plan.models import GPTS, WORKLOADS, workload
from hora.plan.prediction import predict
from hora.plan.question import Question


def ask(name: str, on: str, gpus: int, **more: object) -> Question:
    return Question(name=name, model=workload(name), machine=machine(on), gpus=gpus, **more)  # type: ignore[arg-type]


def test_the_headline_of_2019_from_the_one_server_rows():
    found = predict(ask("resnet50", "dgx-superpod-2019", 1536, batch=59_904))
    assert found.training is not None
    assert found.training.value == pytest.approx(80, rel=0.15)
    assert found.training.low < 80 < found.training.high
    assert "one server" in found.basis


@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    on=st.sampled_from(sorted(MACHINES)),
    servers=st.integers(1, 96),
    precision=st.sampled_from(["mixed", "tf32", "fp32"]),
)
@settings(max_examples=80, deadline=None)
def test_parts_add_up_and_rates_are_batches_over_steps(name, on, servers, precision):
    found = predict(ask(name, on, servers * MACHINES[on].gpus, precision=precision))
    assert found.step.low < found.step.value < found.step.high
    assert found.parts.total == pytest.approx(found.step.value)
    assert found.rate.value == pytest.approx(found.batch / found.step.value)
    assert found.rate.low == pytest.approx(found.batch / found.step.high)
    assert 0.2 < found.efficiency <= 1.0001
    assert found.held is not None
    assert found.held.total > 0


def test_more_servers_are_faster_in_all_and_slower_each():
    rates = [predict(ask("resnet50", "dgx-a100", n, batch=256 * n)) for n in (8, 64, 512)]
    assert rates[0].rate.value < rates[1].rate.value < rates[2].rate.value
    assert rates[0].efficiency > rates[1].efficiency > rates[2].efficiency
    widths = [one.step.high / one.step.low for one in rates]
    assert widths == sorted(widths)


def test_price_and_energy_follow_from_the_time():
    found = predict(ask("resnet50", "dgx-a100", 16, price=2.0))
    assert found.training is not None
    assert found.energy is not None
    assert found.price is not None
    hours = found.training.value / 3600
    assert found.energy.value == pytest.approx(hours * 2 * 6.5)
    assert found.price.value == pytest.approx(hours * 16 * 2.0)


@pytest.mark.parametrize(
    ("question", "fix"),
    [
        (ask("resnet50", "dgx-a100", 0), "--gpus 8"),
        (ask("resnet50", "dgx-a100", 20), "--gpus 24"),
        (ask("resnet50", "dgx-superpod-2019", 1552), "--gpus 1536"),
        (ask("resnet50", "dgx-a100", 64, batch=32), "--batch 64"),
        (ask("resnet50", "dgx-a100", 64, batch=100), "--batch 128"),
        (ask("resnet50", "dgx-a100", 8, batch=800, micro_batch=7), "--micro-batch"),
        (ask("resnet50", "dgx-a100", 8, software="Caffe"), "--software"),
        (ask("gpt3-175b", "dgx-a100", 64, layout=Layout(tensor=16)), "--tensor 8"),
        (ask("gpt3-175b", "dgx-a100", 64, layout=Layout(tensor=8, pipeline=7)), "--gpus 56"),
        (ask("gpt3-175b", "dgx-a100", 80, layout=Layout(tensor=8, pipeline=5)), "pipeline"),
        (ask("gpt3-175b", "dgx-a100", 64, layout=Layout(tensor=8), software="x"), "--software megatron"),
    ],
)
def test_a_question_that_cannot_be_names_the_nearest_that_can(question, fix):
    with pytest.raises(UsageError) as caught:
        predict(question)
    assert fix in str(caught.value)


def test_an_unknown_model_names_the_nearest():
    with pytest.raises(UsageError, match="hora plan resnet50"):
        workload("resnet-50")


def test_what_does_not_fit_says_what_would():
    found = predict(ask("gpt3-175b", "dgx-a100", 64, layout=Layout(tensor=8, pipeline=8)))
    assert not found.fits
    assert found.changes
    assert found.changes[-1].fits


@pytest.mark.alone
def test_the_search_over_1024_gpus_takes_seconds_and_beats_what_it_left_out():
    start = time.perf_counter()
    found = search.best_layouts(ask("gpt3-175b", "dgx-h100", 1024, batch=1536))
    assert time.perf_counter() - start < 5
    assert all(one.fits for one in found)
    assert [one.step.value for one in found] == sorted(one.step.value for one in found)
    by_hand = ask("gpt3-175b", "dgx-h100", 1024, batch=1536)
    plain = replace(by_hand, layout=Layout(tensor=8, pipeline=16, sequence_parallel=True, zero=1))
    assert found[0].step.value <= predict(plain).step.value


def test_a_search_without_any_layout_that_fits_returns_the_nearest():
    (found,) = search.best_layouts(ask("gpt-1t", "dgx-1", 64, batch=64))
    assert not found.fits


def test_a_deadline_is_met_by_fewer_gpus_than_it_is_held_by():
    found = search.deadline(ask("resnet50", "dgx-a100", 8), 600)
    assert found.likely is not None
    assert found.safe is not None
    assert found.likely.question.gpus < found.safe.question.gpus
    assert found.safe.training is not None
    assert found.safe.training.high <= 600
    fewer = replace(found.likely.question, gpus=found.likely.question.gpus - 8, batch=0)
    training = predict(search.best_batch(fewer)).training
    assert training is not None
    assert training.value > 600


def test_an_impossible_deadline_tells_the_fastest():
    found = search.deadline(ask("maskrcnn", "dgx-1", 8), 1)
    assert found.likely is None
    assert found.fastest.training is not None


def test_a_sweep_doubles_and_ends_where_it_was_told():
    assert search.doublings(8, 1536, MACHINES["dgx-2h"]) == [8, 16, 32, 64, 128, 256, 512, 1024, 1536]
    assert search.doublings(1, 8, MACHINES["dgx-a100"]) == [1, 2, 4, 8]
    with pytest.raises(UsageError, match=r"gpus=8\.\.64"):
        search.doublings(64, 8, MACHINES["dgx-a100"])


def test_an_answer_takes_half_a_second_and_no_framework():
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "from hora.cli import main; main(['plan', 'resnet50', '--on', 'dgx-a100'])\n"
        "loaded = {'torch', 'tensorflow', 'jax', 'keras'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    question = ask("bert-large", "dgx-a100", 256)
    predict(question)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        predict(question)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05


def test_every_gpt_preset_has_the_parameters_of_its_name():
    for name, shape in GPTS.items():
        size = float(name.split("-")[-1][:-1]) * (1e12 if name.endswith("t") else 1e9)
        assert shape.parameters == pytest.approx(size, rel=0.06), name
