"""What is saved is what is restored, at any number of workers, with and without shards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.ranks import ranks, run_ranks
from tests.torch.checkpoint.training import Training, equal

import hora.torch as hora
from hora.core.errors import CheckpointError

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex128", "float8_e4m3fn")


def saved(directory: Path, shard: Any = None, steps: int = 3) -> dict[str, torch.Tensor]:
    training = Training(shard)
    training.steps(steps)
    training.state["best"] = [1.5, {"step": 2, (1, 2): {3}}]
    hora.save(training.state, steps, directory=directory).wait(20)
    return training.tensors()


def restored(directory: Path, shard: Any = None) -> tuple[int | None, dict[str, torch.Tensor], Any]:
    training = Training(shard)
    step = hora.restore(training.state, directory=directory)
    rest = (training.state["best"], training.loader.state_dict(), training.schedule.last_epoch)
    return step, training.tensors(), rest


@pytest.mark.parametrize("shard", [None, "optimizer", "all"])
@pytest.mark.parametrize("size", [1, 2])
def test_training_goes_on_to_the_same_bits(tmp_path: Path, shard: Any, size: int) -> None:
    def body() -> None:
        undisturbed = Training(shard)
        undisturbed.steps(3)
        handle = hora.save(undisturbed.state, 3, directory=tmp_path)
        losses = undisturbed.steps(4)
        assert handle.wait(20).name == "step-00000003"
        resumed = Training(shard)
        assert hora.restore(resumed.state, directory=tmp_path) == 3
        assert resumed.steps(4) == losses
        assert equal(resumed.tensors(), undisturbed.tensors())

    run_ranks(size, body)


@pytest.mark.parametrize("wrote", [(1, None), (2, "optimizer"), (2, "all"), (3, "optimizer")], ids=str)
@pytest.mark.parametrize("reads", [(1, None), (2, None), (2, "optimizer"), (3, "all")], ids=str)
def test_any_number_of_workers_reads_any(tmp_path: Path, wrote: Any, reads: Any) -> None:
    (there, *_) = run_ranks(wrote[0], saved, tmp_path, wrote[1])
    for step, here, rest in run_ranks(reads[0], restored, tmp_path, reads[1]):
        assert step == 3
        assert equal(here, there)
        assert rest == ([1.5, {"step": 2, (1, 2): {3}}], {"position": 36}, 3)


@ranks(2)
def test_each_rank_has_its_own_streams_and_statistics_back(tmp_path: Path) -> None:
    training = Training()
    random.seed(hora.rank())
    numpy.random.seed(hora.rank())
    training.steps(2)
    hora.save(training.state, 2, directory=tmp_path).wait(20)
    draws = torch.rand(3).tolist(), numpy.random.rand(3).tolist(), [random.random() for _ in range(3)]
    mean = training.model[1].running_mean.clone()
    everyone = hora.allgather(mean[None])
    assert not torch.equal(everyone[0], everyone[1])  # ranks see different samples
    training.steps(1)
    hora.restore(training.state, directory=tmp_path)
    assert (
        torch.rand(3).tolist(),
        numpy.random.rand(3).tolist(),
        [random.random() for _ in range(3)],
    ) == draws
    assert torch.equal(training.model[1].running_mean, mean)


def test_on_another_number_of_workers_streams_are_new_and_differ(tmp_path: Path) -> None:
    run_ranks(2, saved, tmp_path)

    def drawn() -> tuple[float, float, float]:
        training = Training()
        torch.manual_seed(hora.rank())  # as a script does whose ranks draw for themselves
        numpy.random.seed(hora.rank())
        random.seed(hora.rank())
        hora.restore(training.state, directory=tmp_path)
        return torch.rand(()).item(), float(numpy.random.rand()), random.random()

    first, again = run_ranks(3, drawn), run_ranks(3, drawn)
    assert first == again
    for kind in zip(*first, strict=True):
        assert len(set(kind)) == 3


@ranks(1)
def test_plain_values_generators_and_tensors_come_back_in_place(tmp_path: Path) -> None:
    generator, tensor = torch.Generator().manual_seed(1), torch.arange(3.0)
    values = {
        "numbers": (1, 2.5, float("-inf"), True, None, 3 + 4j),
        "texts": {"a": b"\x00\xff", "b": "ü", 3: torch.float16},
        "array": numpy.arange(6, dtype=numpy.int32).reshape(2, 3),
    }
    state = {"generator": generator, "tensor": tensor, **values}
    hora.save(state, 1, directory=tmp_path).wait(20)
    drawn = torch.rand(2, generator=generator)
    tensor.zero_()
    state |= dict.fromkeys(values, 0)
    assert hora.restore(state, directory=tmp_path) == 1
    assert torch.equal(torch.rand(2, generator=generator), drawn)
    assert state["tensor"] is tensor
    assert tensor.tolist() == [0, 1, 2]
    assert state["numbers"] == values["numbers"]
    assert state["texts"] == values["texts"]
    assert state["array"].dtype == numpy.int32
    assert state["array"].tolist() == [[0, 1, 2], [3, 4, 5]]


@ranks(1)
@pytest.mark.parametrize(
    "dtype",
    [getattr(torch, name) for name in DTYPES],
    ids=str,
)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 3.0], [1.0, 0.5, 2.0]]).to(dtype).T
    state = {"tensor": tensor, "empty": torch.empty(0, 4, dtype=dtype), "number": torch.ones((), dtype=dtype)}
    hora.save(state, 0, directory=tmp_path).wait(20)
    there = {name: torch.zeros_like(value) for name, value in state.items()}
    assert hora.restore(there, directory=tmp_path) == 0
    for name, value in there.items():
        assert value.tolist() == state[name].tolist()


@ranks(2)
def test_none_is_restored_where_there_is_none(tmp_path: Path) -> None:
    state = {"step": 7}
    assert hora.restore(state, directory=tmp_path / "new") is None
    assert state == {"step": 7}


@ranks(1)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), _Rule()
    )
    with pytest.raises(CheckpointError, match=r"schedule/lr_lambdas/0/rule is of the class .*Path"):
        hora.save({"schedule": schedule}, 1, directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"layout torch.sparse_coo.*to_dense"):
        hora.save({"x": torch.eye(2).to_sparse()}, 1, directory=tmp_path)
    with pytest.raises(CheckpointError, match="'a/b' cannot name"):
        hora.save({"a/b": 1}, 1, directory=tmp_path)


class _Rule:
    def __init__(self) -> None:
        self.rule = Path("x")

    def __call__(self, step: int) -> float:
        return 1.0


@ranks(1)
def test_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    hora.save({"model": model, "count": 1}, 1, directory=tmp_path).wait(20)
    wider = torch.nn.Linear(4, 2)
    before = wider.weight.detach().clone()
    with pytest.raises(
        CheckpointError,
        match=r"model/weight has the shape \(2, 3\) in the checkpoint, and the shape \(2, 4\)",
    ):
        hora.restore({"model": wider, "count": 0}, directory=tmp_path)
    assert torch.equal(wider.weight, before)
    with pytest.raises(CheckpointError, match="of what 'model' has, it has 'bias' besides"):
        hora.restore({"model": torch.nn.Linear(3, 2, bias=False), "count": 0}, directory=tmp_path)
    with pytest.raises(CheckpointError, match="The state has 'model', the checkpoint 'count', 'model'"):
        hora.restore({"model": model}, directory=tmp_path)
    with pytest.raises(CheckpointError, match="has a value under 'count', the state a module"):
        hora.restore({"model": model, "count": model}, directory=tmp_path)


@ranks(2)
def test_ranks_at_different_steps_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"different steps: \[5, 6\]"):
        hora.save({"x": 1}, 5 + hora.rank(), directory=tmp_path)


@ranks(1)
def test_an_optimizer_without_a_model_goes_by_place(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    parameter.grad = torch.arange(4.0)
    optimizer.step()
    hora.save({"optimizer": optimizer}, 1, directory=tmp_path).wait(20)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
    hora.restore({"optimizer": other}, directory=tmp_path)
    assert other.param_groups[0]["lr"] == 0.5
    (state,) = other.state.values()
    assert state["momentum_buffer"].tolist() == [0, 1, 2, 3]


@ranks(1)
def test_the_order_of_parameters_may_change(tmp_path: Path) -> None:
    first = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    for place, parameter in enumerate(first.parameters()):
        parameter.grad = torch.full_like(parameter, float(place))
    optimizer.step()
    hora.save({"model": first, "optimizer": optimizer}, 1, directory=tmp_path).wait(20)
    second = torch.nn.ModuleDict({"b": torch.nn.Linear(3, 1), "a": torch.nn.Linear(2, 1)})
    other = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    hora.restore({"model": second, "optimizer": other}, directory=tmp_path)
    buffers = {
        name: other.state[value]["momentum_buffer"].unique().tolist()
        for name, value in second.named_parameters()
    }
    assert buffers == {"a.weight": [0.0], "a.bias": [1.0], "b.weight": [2.0], "b.bias": [3.0]}
    assert torch.equal(first["b"].weight, second["b"].weight)
