"""The closed form: FLOPs by hand, what must hold of any layout, and published steps on one server."""

from dataclasses import replace

import pytest

from hora.plan.calibration import kernels
from hora.plan.hardware import MACHINES
from hora.plan.memory import Layout
from hora.plan.models import GPTS
from hora.plan.transformer import SOFTWARE, flops, step

GPT = GPTS["gpt-7.5b"]
A100 = MACHINES["dgx-a100"]


def seconds(layout: Layout, model=GPT, machine=A100, software="megatron-2021") -> float:
    return step(model, layout, machine, kernels(), SOFTWARE[software]).total


def test_flops_are_counted_from_the_products():
    # forward: QKV 6bsh^2, projection 2bsh^2, feed-forward 16bsh^2, scores and their use 4bs^2h, logits 2bshV
    b, s, h = 3, GPT.sequence, GPT.hidden
    forward = GPT.layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * GPT.vocabulary
    assert flops(GPT, b) == pytest.approx(3 * forward, rel=1e-12)
    again = forward - 2 * b * s * h * GPT.vocabulary
    assert flops(GPT, b, recomputed=True) == pytest.approx(3 * forward + again, rel=1e-12)


def test_tensor_parallelism_divides_compute_and_costs_collectives():
    one = step(GPT, Layout(micro_batch=2), A100, kernels(), SOFTWARE["megatron-2021"])
    four = step(GPT, Layout(micro_batch=2, tensor=4), A100, kernels(), SOFTWARE["megatron-2021"])
    assert one.communication["tensor"] == 0
    assert one.compute / 4 < four.compute < one.compute / 2
    assert four.communication["tensor"] > 0


def test_the_bubble_is_p_minus_1_over_v_micro_batches():
    base = Layout(pipeline=4, micro_batches=16)
    found = step(GPT, base, A100, kernels(), SOFTWARE["megatron-2021"])
    stage = found.bubble / 3
    inner = step(GPT, replace(base, interleaved=3), A100, kernels(), SOFTWARE["megatron-2021"])
    assert inner.bubble == pytest.approx(stage * 3 / 3, rel=0.1)
    more = step(GPT, replace(base, micro_batches=32), A100, kernels(), SOFTWARE["megatron-2021"])
    assert more.bubble == pytest.approx(found.bubble)


def test_recomputation_costs_up_to_a_third_and_selective_less():
    none, selective, full = (seconds(Layout(recompute=kind)) for kind in ("none", "selective", "full"))
    assert none < selective < full < 1.36 * none


def test_data_parallelism_costs_more_without_overlap():
    alone = seconds(Layout(micro_batches=4))
    hidden = seconds(Layout(micro_batches=4, data=64))
    pipeline = step(
        GPT, Layout(micro_batches=4, pipeline=2, data=32), A100, kernels(), SOFTWARE["megatron-2021"]
    )
    assert alone < hidden < 1.4 * alone
    assert pipeline.communication["data"] > 0


def test_faster_machines_are_faster_and_smaller_models_too():
    layout = Layout(tensor=4, micro_batch=2)
    times = [
        seconds(layout, machine=MACHINES[name]) for name in ("dgx-1", "dgx-a100", "dgx-h100", "dgx-b200")
    ]
    assert times == sorted(times, reverse=True)
    assert seconds(layout, GPTS["gpt-1.7b"]) < seconds(layout)
