"""What is saved is the state of the moment, though an optimizer's part of it is copied a little later."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CheckpointError
from hora.torch.checkpoint._plan import Copy


def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    parameter.grad = torch.ones(4)
    optimizer.step()
    return parameter, optimizer


@ranks(1)
def test_a_step_waits_until_the_optimizers_state_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter, optimizer = made()
    may_copy, stepped = threading.Event(), threading.Event()
    plain = Copy._rest

    def held(self: Copy) -> None:
        assert may_copy.wait(20)
        plain(self)

    monkeypatch.setattr(Copy, "_rest", held)
    save = hora.save({"parameter": parameter, "optimizer": optimizer}, 1, directory=tmp_path)

    def step() -> None:
        optimizer.step()
        stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not stepped.wait(0.2)  # it has nothing to wait for but the copy
    may_copy.set()
    thread.join(20)
    assert stepped.is_set()
    save.wait(20)
    state = {"parameter": parameter, "optimizer": optimizer}
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.5] * 4
    assert hora.restore(state, directory=tmp_path) == 1
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [1.0] * 4
    assert parameter.tolist() == [-1.0] * 4


@ranks(1)
def test_state_that_is_changed_otherwise_fails_the_save_and_later_ones_copy_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter, optimizer = made()
    may_copy = threading.Event()
    plain = Copy._rest

    def held(self: Copy) -> None:
        assert may_copy.wait(20)
        plain(self)

    monkeypatch.setattr(Copy, "_rest", held)
    state = {"parameter": parameter, "optimizer": optimizer}
    save = hora.save(state, 1, directory=tmp_path)
    optimizer.state[parameter]["momentum_buffer"].zero_()  # by hand: nothing can wait for this
    may_copy.set()
    with pytest.raises(CheckpointError, match=r"changed by something else than step\(\) while it was copied"):
        save.wait(20)
    assert hora.restore(state, directory=tmp_path) is None
    may_copy.clear()
    second = hora.save(state, 2, directory=tmp_path)
    optimizer.state[parameter]["momentum_buffer"].fill_(9)
    second.wait(20)
    assert hora.restore(state, directory=tmp_path) == 2
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [0.0] * 4


@ranks(2)
def test_steps_that_follow_at_once_are_no_change(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(50)) for _ in range(20)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones(50)
    saves = []
    for step in range(1, 101):
        optimizer.step()
        saves.append(hora.save({"optimizer": optimizer}, step, directory=tmp_path))
    for save in saves:
        save.wait(20)
    assert hora.restore({"optimizer": optimizer}, directory=tmp_path) == 100
    for parameter in parameters:
        assert optimizer.state[parameter]["momentum_buffer"].tolist() == [100.0] * 50


@ranks(2)
def test_parameters_may_be_changed_as_soon_as_save_returns(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2_000_000))
    model = torch.nn.ParameterDict({"p": parameter})
    save = hora.save({"model": model}, 1, directory=tmp_path)
    parameter.data.fill_(7)  # not even autograd sees it
    save.wait(20)
    assert hora.restore({"model": model}, directory=tmp_path) == 1
    assert not parameter.any()


@ranks(2)
def test_memory_is_used_again_until_the_objects_change(tmp_path: Path) -> None:
    from hora.torch.checkpoint import _writers

    state = {"x": torch.zeros(1000), "y": torch.zeros(3)}
    buffers = []
    for step, size in enumerate((3, 3, 4)):
        state["y"] = torch.full((size,), float(step))
        hora.save(state, step, directory=tmp_path).wait(20)
        planned = _writers[tmp_path]._plans._last
        assert planned is not None
        buffers.append(planned.buffer)
        assert hora.restore(state, directory=tmp_path) == step
        assert state["y"].tolist() == [step] * size
    assert buffers[0] is buffers[1]
    assert buffers[1] is not buffers[2]
