"""What a rank reports of its training, seen from the other end of its socket.

The scripts in ``tests/broken`` and ``tests/odd`` run the whole way from ranks to verdicts.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

import hora.torch as hora
from hora.core.errors import VerdictError
from hora.core.settings import Settings
from hora.core.world import World
from hora.guard.board import Board
from hora.torch import _context
from hora.torch.watch._digest import digests


class Supervisor:
    """Keeps what a rank sends, and clears all its collectives."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.records: list[dict[str, Any]] = []
        self._socket, theirs = socket.socketpair()
        board = Board.make(world.size)
        self.board = Board(board, world.size)
        self.settings = dataclasses.replace(settings, guard_fd=theirs.detach(), guard_board=board)
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        rest = b""
        while data := self._socket.recv(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for record in map(json.loads, lines):
                if record["kind"] == "end":
                    self._idle.set()
                elif record["kind"] == "check":
                    answer = {"kind": "clear", "set": record["set"], "number": record["number"]}
                    self._socket.sendall(json.dumps(answer).encode() + b"\n")
                self.records.append(record)

    def all(self, *kinds: str) -> list[dict[str, Any]]:
        """The records of these kinds that have been sent so far."""
        from hora.adapter import guard

        assert guard._reporter is not None
        self._idle.clear()
        guard._reporter.send({"kind": "end"})
        assert self._idle.wait(10)
        return [record for record in self.records if record["kind"] in kinds]


def watched(body: Callable[[Supervisor], Any], size: int = 1, **changes: Any) -> list[Any]:
    """Run a body on ranks that have a supervisor each; it calls ``hora.shutdown()`` itself, or need not.

    Args:
        body: what each rank does.
        size: number of ranks.
        changes: settings.
    """

    def run(world: World, settings: Settings) -> Any:
        supervisor = Supervisor(world, dataclasses.replace(settings, **changes))
        hora.init(world, settings=supervisor.settings)
        result = body(supervisor)
        hora.shutdown()
        assert supervisor.all("trouble") == []
        return result

    return run_ranks(size, run, init=False)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def step(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, value: float = 1.0
) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 4), value)).square().mean().backward()
    optimizer.step()


def test_everything_is_put_back_by_shutdown() -> None:
    names = ("randperm", "rand", "randn", "rand_like", "randn_like", "randint", "normal", "bernoulli")
    before = {name: getattr(torch, name) for name in names}
    backward, following = torch.autograd.backward, torch.utils.data.dataloader._BaseDataLoaderIter.__next__

    def body(supervisor: Supervisor) -> None:
        assert torch.randperm is not before["randperm"]
        model = linear()
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        hora.shutdown()
        assert {name: getattr(torch, name) for name in names} == before
        assert torch.autograd.backward is backward
        assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is following
        assert not nn.modules.module._global_forward_pre_hooks
        assert not _global_optimizer_pre_hooks

    watched(body)


def test_fingerprints_come_at_doubling_steps_and_then_every_fifty() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for _ in range(101):
            step(model, optimizer)
        prints = supervisor.all("print")
        assert [record["step"] for record in prints] == [1, 2, 4, 8, 16, 32, 50, 100]
        [start] = supervisor.all("replica")
        assert start["names"] == ["weight", "bias"]
        assert start["parameters"] != prints[0]["parameters"]
        assert supervisor.board.head(hora.rank()).step == 101
        hora.shutdown()
        [final] = supervisor.all("final")
        assert final["parameters"] == digests(list(model.parameters()))

    watched(body, 2)


def test_ranks_with_equal_models_send_equal_fingerprints() -> None:
    def body(supervisor: Supervisor) -> Any:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        hora.broadcast_parameters(model)
        for _ in range(4):
            step(model, optimizer, hora.rank() + 1.0)
        keys = ("key", "step", "parameters", "gradients", "state", "rates")
        return [{key: record[key] for key in keys} for record in supervisor.all("print")]

    first, second = watched(body, 2)
    assert first == second
    assert len({tuple(record["parameters"]) for record in first}) == 3  # steps 1, 2 and 4


def test_a_write_between_steps_is_noticed() -> None:
    def body(supervisor: Supervisor) -> Any:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for number in range(1, 101):
            step(model, optimizer)
            if hora.rank() == 1 and number in (2, 70):
                with torch.no_grad():
                    model.bias.add_(1)
        return {record["step"]: record["written"] for record in supervisor.all("print")}

    clean, written = watched(body, 2)
    assert not any(clean.values())
    assert [entry["which"] for entry in written[4]] == [[1], [1]]  # by its count of writes, and by its bits
    assert [(entry["step"], entry["until"], entry["which"]) for entry in written[100]] == [(50, 100, [1])]
    assert [step for step, entries in written.items() if entries] == [4, 100]


@pytest.mark.parametrize("kind", ["plain", "distributed", "closure"])
def test_a_gradient_that_is_not_finite_is_reported_with_its_step(kind: str) -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "distributed":
            optimizer = hora.DistributedOptimizer(optimizer, model, backward_passes_per_step=1)
        for number in range(1, 4):
            value = float("inf") if number == 3 else 1.0
            if kind == "closure":

                def closure(value: float = value) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = model(torch.full((2, 4), value)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            else:
                step(model, optimizer, value)
        [record] = supervisor.all("not-finite")
        assert (record["step"], record["count"], record["value"]) == (3, 2, "nan")
        assert record["names"] == ["weight", "bias"]
        assert record["loss"] == "nan"  # infinities of both signs
        file, _, line = record["where"].rpartition(":")
        assert ".backward()" in Path(file).read_text().splitlines()[int(line) - 1]

    watched(body)


def test_a_step_that_the_scaler_leaves_out_is_no_fault() -> None:
    def body(supervisor: Supervisor) -> None:
        for fused in (False, True):
            model = linear()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            scaler = torch.amp.GradScaler("cpu")
            for value in (1.0, float("inf"), 1.0):
                optimizer.zero_grad()
                scaler.scale(model(torch.full((2, 4), value)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        assert supervisor.all("not-finite") == []

    watched(body)


def test_what_a_left_out_step_had_is_forgotten_when_the_sum_of_the_next_overflows() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        optimizer.zero_grad()
        model(torch.full((2, 4), float("inf"))).mean().backward()  # and no step
        optimizer.zero_grad()
        (model(torch.full((1, 4), 1.0)) * 1e38).sum().backward()  # five gradients of 1e38
        optimizer.step()
        assert supervisor.all("not-finite") == []

    watched(body, 2)


def test_buffers_that_the_wrapper_keeps_equal_are_not_compared() -> None:
    def body(supervisor: Supervisor) -> None:
        for kept in (True, False):
            inner = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
            model = nn.parallel.DistributedDataParallel(inner)
            model.broadcast_buffers = kept
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(2):
                step(model, optimizer, float(number))
        hora.shutdown()
        first, second = supervisor.all("final")
        assert first["buffers"] == {}
        assert "module.1.running_mean" in second["buffers"]

    watched(body, 2)


def test_own_gradients_are_looked_at_before_they_are_averaged() -> None:
    def body(supervisor: Supervisor) -> Any:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for number in range(1, 4):
            step(model, optimizer, float("nan") if (number, hora.rank()) == (2, 1) else 1.0)
        return [(record["step"], record["order"]) for record in supervisor.all("not-finite")]

    first, second = watched(body, 2)
    assert second[0] == (2, 2)
    assert first == [(3, 3)]  # it came by the average


def test_parameters_without_a_gradient_are_reported_by_name() -> None:
    def body(supervisor: Supervisor) -> None:
        model = nn.ModuleDict({"used": nn.Linear(4, 1), "spare": nn.Linear(4, 1)})
        model["frozen"] = nn.Linear(4, 1).requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hora.broadcast_parameters(model)
        for _ in range(9):
            step(model["used"], optimizer)
        [record] = supervisor.all("idle")
        assert record["names"] == {"2": "spare.weight", "3": "spare.bias"}
        assert (record["trainable"], record["silent"], record["stuck"], record["step"]) == (4, [2, 3], [], 8)

    watched(body)


def test_parts_that_are_used_by_turns_are_waited_for() -> None:
    def body(supervisor: Supervisor) -> None:
        model = nn.ModuleDict({name: nn.Linear(4, 1) for name in ("first", "second", "third", "never")})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hora.broadcast_parameters(model)
        for number in range(12):
            step(model["first" if number < 5 else "second" if number < 9 else "third"], optimizer)
        assert supervisor.all("idle") == []
        hora.shutdown()
        [record] = supervisor.all("idle")
        assert record["names"] == {"6": "never.weight", "7": "never.bias"}
        assert (record["trainable"], record["step"]) == (8, 12)

    watched(body)


def test_a_shorter_run_is_looked_at_when_it_ends() -> None:
    def body(supervisor: Supervisor) -> None:
        model = nn.ModuleDict({"used": nn.Linear(4, 1), "spare": nn.Linear(4, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model["used"], optimizer)
        assert supervisor.all("idle") == []
        hora.shutdown()
        [record] = supervisor.all("idle")
        assert (record["silent"], record["step"]) == ([2, 3], 1)

    watched(body)


def test_a_parameter_that_is_set_back_is_stuck_but_not_one_with_learning_rate_0() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        kept = model.weight.detach().clone()
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: model.weight.data.copy_(kept))
        for _ in range(8):
            step(model, optimizer)
        [record] = supervisor.all("idle")
        assert (record["silent"], record["stuck"]) == ([], [0])

    watched(body)


def test_optimizers_are_copied_pickled_and_grown_as_without_the_guard() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
        step(model, optimizer)
        other, shape = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        plain = pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
        assert type(plain) is torch.optim.Adam
        optimizer.add_param_group({"params": list(other.parameters())})
        step(lambda x: model(x) + other(x) + shape(x), optimizer)
        step(lambda x: model(x) + other(x), optimizer)
        model.to(torch.float64).to(torch.float32)
        step(lambda x: model(x) + other(x), optimizer)
        assert len(supervisor.all("print")[-1]["parameters"]) == 4
        assert supervisor.all("not-finite", "trouble") == []

    watched(body, 2)


def test_an_optimizer_and_its_model_are_not_kept_alive() -> None:
    import gc
    import weakref

    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        step(model, optimizer)
        gone = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        again = linear()
        step(again, torch.optim.SGD(again.parameters(), lr=0.1))
        assert len(supervisor.all("final")) == 1

    watched(body, 2)


def test_a_fault_of_the_watch_is_told_once_and_the_training_goes_on() -> None:
    def run(world: World, settings: Settings) -> None:
        supervisor = Supervisor(world, settings)
        hora.init(world, settings=supervisor.settings)
        watch = _context.context().watch
        assert watch is not None

        def fail(group: Any) -> None:
            raise ValueError("broken on purpose")

        watch.prints.begin = fail  # type: ignore[method-assign]
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer)
        [record] = supervisor.all("trouble")
        assert "broken on purpose" in record["text"]
        assert not _global_optimizer_pre_hooks
        hora.shutdown()

    run_ranks(1, run, init=False)


def test_nested_steps_are_one_step() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def body(supervisor: Supervisor) -> None:
        base = linear()
        step(base, torch.optim.SGD(base.parameters(), lr=0.1))  # torch hooks into the base's step too
        model = linear()
        optimizer = Twice(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, optimizer)

        def fail() -> torch.Tensor:
            raise KeyError

        with pytest.raises(KeyError):
            optimizer.step(fail)
        step(model, optimizer)
        assert supervisor.board.head(0).step == 4

    watched(body)


def test_loaders_in_other_processes_and_forked_children_report_nothing() -> None:
    class Drawing(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            torch.randperm(16)
            return super().__getitem__(index)

    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(Drawing(torch.ones(16, 4)), batch_size=4, num_workers=1):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        pid = os.fork()
        if pid == 0:
            step(model, optimizer)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert supervisor.board.head(0).step == 4

    watched(body)


def test_the_plan_and_plans_that_cannot_be() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = hora.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model, backward_passes_per_step=2
        )
        loader = hora.data_loader((torch.ones(70, 4),), global_batch=16)
        for (x,) in hora.track(loader, epochs=1):
            model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        plans = supervisor.all("plan")
        assert [record["text"] for record in plans] == (
            [
                "Plan: global batch 16 (2 workers x 8 samples in 2 backward passes); 4 batches per epoch, "
                "6 of 70 samples dropped in each; 1 epoch; SGD with learning rate 0.5."
            ]
            if hora.rank() == 0
            else []
        )

    watched(body, 2)

    def refused(supervisor: Supervisor) -> None:
        data = (torch.ones(70, 4),)
        model = linear()
        optimizer = hora.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), model, backward_passes_per_step=5
        )
        with pytest.raises(VerdictError, match="longer than the epoch") as error:
            next(iter(hora.data_loader(data, global_batch=16)))
        assert error.value.kind == "impossible-plan"
        with pytest.raises(VerdictError, match="larger than the data set"):
            hora.data_loader(data, global_batch=80)
        with pytest.raises(VerdictError, match="gives no batch"):
            iter(DataLoader(TensorDataset(*data), batch_size=71, drop_last=True))
        assert len(supervisor.all("impossible")) == 3
        del optimizer

    watched(refused)


def test_a_loader_that_is_made_for_one_epoch_is_part_of_the_plan() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in DataLoader(TensorDataset(torch.ones(11, 4)), batch_size=4, drop_last=True):
            step(model, optimizer)
        [record] = supervisor.all("plan")
        assert record["text"] == (
            "Plan: global batch 4 (1 worker x 4 samples); 2 batches per epoch, 3 samples dropped in each; "
            "SGD with learning rate 0.5."
        )

    watched(body)


def test_steps_that_a_scaler_leaves_out_are_no_accumulation() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        factor = 1000.0
        for (x,) in DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            factor *= 1e-4
        [record] = supervisor.all("plan")
        assert "Plan: global batch 4 (1 worker x 4 samples); 4 batches" in record["text"]
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        (model(x).square().mean() * 0 + float("inf")).backward()  # a scaled loss overflows, its gradient not
        scaler.step(optimizer)
        assert supervisor.all("not-finite") == []

    update = torch.amp.GradScaler.update
    watched(body)
    assert torch.amp.GradScaler.update is update


def test_time_spent_on_loading_is_counted_once() -> None:
    import time

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    def body(supervisor: Supervisor) -> None:
        watch = _context.context().watch
        assert watch is not None
        for loader in (
            hora.data_loader(Slow(torch.ones(8, 4)), global_batch=4),
            DataLoader(Slow(torch.ones(8, 4))),
        ):
            before, began = watch.data, time.perf_counter()
            for _ in loader:
                pass
            assert 0.08 <= watch.data - before <= time.perf_counter() - began

    watched(body)
