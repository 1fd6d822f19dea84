"""Memory per GPU against published estimators and sums worked out by hand."""

from dataclasses import replace

import pytest

from hora.core.errors import UsageError
from hora.plan import memory
from hora.plan.memory import Layout, Transformer

GPT3 = Transformer(layers=96, hidden=12_288, heads=96, sequence=2048, vocabulary=51_200)
GPT2_8B = Transformer(layers=72, hidden=3072, heads=32, sequence=1024, vocabulary=51_200)
MT_NLG = Transformer(layers=105, hidden=20_480, heads=128, sequence=2048, vocabulary=51_200)
TRILLION = Transformer(layers=128, hidden=25_600, heads=160, sequence=2048, vocabulary=51_200)
LLAMA_8B = Transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, feed_forward=14_336, gated=True, tied=False,
    positions=False, sequence=8192, vocabulary=128_256,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "billions"), [(GPT2_8B, 8.3), (GPT3, 175), (MT_NLG, 530), (TRILLION, 1008), (LLAMA_8B, 8.03)]
)
def test_parameters_are_the_published_numbers(model, billions):
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("zero", "gibibytes"), [(2, 15.93), (3, 6.10)])
def test_deepspeeds_estimators(zero, gibibytes):
    # T5-3B on 8 GPUs: 2851M parameters, the largest layer 32M; their "GB" are 2**30 bytes.
    bytes_ = memory.states(2851e6, precision=memory.DEEPSPEED, zero=zero, data=8, largest=32e6).total
    assert bytes_ / 2**30 == pytest.approx(gibibytes, rel=0.005)


@pytest.mark.parametrize(
    ("zero", "per_parameter"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)]
)
def test_zero_divides_as_its_paper_says(zero, per_parameter):
    # Figure 1 of the paper: 7.5B parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB.
    bytes_ = memory.states(7.5e9, precision=memory.ADAM_MIXED, zero=zero, data=64).total
    assert bytes_ == pytest.approx(7.5e9 * per_parameter)
    assert bytes_ / 1e9 == pytest.approx({0: 120, 1: 31.4, 2: 16.6, 3: 1.9}[zero], rel=0.02)


def test_activations_of_a_layer_are_the_papers_formulas():
    sbh, t, scores = 2048 * 12_288, 8, 5 * 96 * 2048 / 12_288

    def layer(**layout):
        return memory.activations_per_layer(GPT3, Layout(**layout)) / sbh

    assert scores == 80
    assert layer() == pytest.approx(34 + scores)
    assert layer(tensor=t) == pytest.approx(10 + 24 / t + scores / t)
    assert layer(tensor=t, sequence_parallel=True) == pytest.approx((34 + scores) / t)
    assert layer(tensor=t, sequence_parallel=True, recompute="selective") == pytest.approx(34 / t)
    assert layer(flash=True) == pytest.approx(34)
    assert layer(recompute="full", tensor=t) == pytest.approx(2)


@pytest.mark.parametrize(("model", "saved"), [(GPT3, 0.70), (MT_NLG, 0.65)])
def test_selective_recomputation_saves_what_is_published(model, saved):
    # arXiv:2205.05198, section 5 (quoted from memory): 70 % for GPT-3, 65 % for MT-NLG.
    plain = memory.activations_per_layer(model, Layout())
    selective = memory.activations_per_layer(model, Layout(recompute="selective"))
    assert 1 - selective / plain == pytest.approx(saved, rel=0.01)


def test_a_grouped_gated_layer_by_hand():
    # Of h: norms 4, QKV's input 2, block's input 2, masks 2; queries 2, keys 0.5, values 0.5,
    # projection's input 2; gate, up and their product 3 x 2 x 3.5.
    kept = memory.activations_per_layer(LLAMA_8B, Layout(flash=True)) / (8192 * 4096)
    assert kept == pytest.approx(10 + (2 + 2 * 0.25 * 2 + 2) + 21)


def test_a_pipeline_holds_a_micro_batch_per_stage_first():
    base = Layout(tensor=8, sequence_parallel=True, recompute="selective", micro_batches=64)
    one = memory.activations_per_layer(GPT3, base)
    deep = memory.estimate(GPT3, replace(base, pipeline=8)).activations
    layers = deep - (2048 * 12_288 * 8 / 8) - (80 / 8) * 2048 * 12_288  # embedding's masks; the layer rebuilt
    assert layers == pytest.approx(96 * one)  # p micro-batches of l/p layers: l layers whatever p is
    woven = memory.estimate(GPT3, replace(base, pipeline=8, interleaved=3)).activations
    assert woven - deep == pytest.approx(96 * one * 7 / 24)
    short = memory.estimate(GPT3, replace(base, pipeline=8, micro_batches=2)).activations
    assert short < deep / 3


def test_parts_add_up_and_divide():
    whole = memory.estimate(GPT2_8B, Layout(micro_batch=2))
    assert (
        whole.total == whole.parameters + whole.gradients + whole.optimizer + whole.activations + whole.other
    )
    assert whole.optimizer == pytest.approx(6 * whole.parameters)
    halves = memory.estimate(GPT2_8B, Layout(micro_batch=2, tensor=2, sequence_parallel=True))
    assert whole.activations / 2 == pytest.approx(halves.activations, rel=1e-3)
    assert whole.parameters / 2 == pytest.approx(halves.parameters, rel=1e-3)


def test_gpt2_8b_does_not_fit_a_v100_and_megatrons_layout_does():
    capacity = 32e9
    assert memory.estimate(GPT2_8B, Layout(recompute="full")).total > capacity
    # Megatron trained it with 8-way tensor parallelism and recomputation on V100 of 32 GB.
    assert memory.estimate(GPT2_8B, Layout(tensor=8, recompute="full", data=64)).total < capacity


def test_what_would_fit_is_tried_in_order():
    start = Layout(micro_batch=8, data=64)
    changes = memory.what_would_fit(GPT2_8B, start, capacity=32e9)
    assert [change.fits for change in changes] == [False] * (len(changes) - 1) + [True]
    sizes = [change.memory.total for change in changes]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 32e9 < sizes[-2]
    assert memory.estimate(GPT2_8B, changes[-1].layout) == changes[-1].memory
    assert "flash" in changes[0].what
    assert "ZeRO stage 1" in changes[1].what
    assert memory.what_would_fit(GPT2_8B, start, capacity=1e15) == []


def test_a_trillion_parameters_need_tensor_and_pipeline():
    changes = memory.what_would_fit(TRILLION, Layout(), capacity=80e9)
    assert changes[-1].fits
    assert changes[-1].layout.tensor == 8
    assert changes[-1].layout.pipeline > 1
    hopeless = memory.what_would_fit(TRILLION, Layout(), capacity=1e9)
    assert not any(change.fits for change in hopeless)


def test_a_cnn_is_states_and_its_samples():
    model = memory.Cnn(parameters=25.6e6, activation_bytes=80e6)
    found = memory.estimate_cnn(model, micro_batch=208)
    assert found.total == pytest.approx(25.6e6 * 12 + 208 * 80e6 + found.other)
    with pytest.raises(UsageError, match="micro_batch=0"):
        memory.estimate_cnn(model, micro_batch=0)


def test_wrong_layouts_name_the_nearest_valid_ones():
    with pytest.raises(UsageError, match=r"pipeline=7 does not divide layers=72\. Use 6 or 8"):
        memory.estimate(GPT2_8B, Layout(pipeline=7))
    with pytest.raises(UsageError, match=r"tensor=5 does not divide heads=32\. Use 4 or 8"):
        memory.estimate(GPT2_8B, Layout(tensor=5))
    with pytest.raises(UsageError, match="zero=4"):
        memory.states(1e9, precision=memory.ADAM_MIXED, zero=4)
    with pytest.raises(UsageError, match="data=0"):
        memory.estimate(GPT2_8B, Layout(data=0))
