"""What happens between ranks that end, stall, or use Hora and Horovod's interface side by side."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.ranks import RankFailure, run_ranks

import hora.torch.horovod as hvd


def _killed_while_others_wait(folder: str) -> None:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        Path(folder, "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name="never")
    Path(folder, f"told-{hvd.rank()}").write_text(f"{time.time()} {caught.value.echo}")
    hvd.shutdown()


@pytest.mark.alone
def test_a_dead_rank_is_told_to_all_others_within_two_seconds(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="without a word"):
        run_ranks(3, _killed_while_others_wait, str(tmp_path))
    killed = float((tmp_path / "killed").read_text())
    for rank in (0, 2):
        told, echo = (tmp_path / f"told-{rank}").read_text().split()
        assert float(told) - killed < 2.0
        assert echo == "True"


def _coordinator_dies(folder: str) -> None:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.time()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1))
    Path(folder, "told").write_text(str(time.time() - began))
    hvd.shutdown()


@pytest.mark.alone
def test_the_death_of_rank_0_is_told_too(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="without a word"):
        run_ranks(2, _coordinator_dies, str(tmp_path))
    assert float((tmp_path / "told").read_text()) < 2.0


def _stalls() -> None:
    hvd.init()
    store = torch.distributed.distributed_c10d._get_default_store()
    if hvd.rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match="stalled"):
            hvd.allreduce(torch.ones(1), name="alone")
        store.set("told", "yes")
    store.get("told")
    hvd.barrier()
    hvd.shutdown()


def test_a_stall_is_reported_and_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.4")
    run_ranks(2, _stalls)
    assert "allreduce.alone [missing ranks: 1]" in capfd.readouterr().err


def _leaves_early() -> float:
    hvd.init(process_sets="dynamic")
    pair = hvd.add_process_set([1, 2])
    if hvd.rank() == 0:
        hvd.shutdown()
        return 0.0
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        hvd.allreduce(torch.ones(1))
    result = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item()
    hvd.shutdown()
    return result


def test_a_rank_that_shuts_down_fails_only_what_needs_it() -> None:
    assert run_ranks(3, _leaves_early) == [0.0, 2.0, 2.0]


def _submits_from_two_threads() -> list[float]:
    import threading

    hvd.init()
    results = [0.0, 0.0]

    def work(place: int) -> None:
        for number in range(20):
            name = f"{place}.{number}"
            results[place] += hvd.allreduce(torch.ones(1), op=hvd.Sum, name=name).item()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hvd.shutdown()
    return results


def test_two_threads_of_a_rank_may_ask() -> None:
    assert run_ranks(2, _submits_from_two_threads) == [[40.0, 40.0]] * 2


def _fuses() -> bool:
    hvd.init()
    torch.manual_seed(1)
    sizes = [1, 17, 1000, 3] * 20
    dtypes = [torch.float32, torch.int64, torch.float16, torch.float64]
    tensors = [
        (torch.arange(size) % 7 + hvd.rank()).to(dtypes[place % 4]) for place, size in enumerate(sizes)
    ]
    order = range(len(tensors)) if hvd.rank() == 0 else reversed(range(len(tensors)))
    handles = {
        place: (hvd.allreduce_async_ if place % 2 else hvd.allreduce_async)(
            tensors[place], name=str(place), op=hvd.Sum
        )
        for place in order
    }
    right = True
    for place, size in enumerate(sizes):
        result = hvd.synchronize(handles[place])
        exact = sum((torch.arange(size) % 7 + rank) for rank in range(hvd.size()))
        right &= torch.equal(result.double(), exact.double()) and (result is tensors[place]) == bool(
            place % 2
        )
    hvd.shutdown()
    return right


def _alone() -> tuple[float, int, list[int]]:
    for _ in range(2):
        hvd.init()
        model = torch.nn.Linear(1, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        hvd.broadcast_parameters(model.state_dict())
        hvd.broadcast_optimizer_state(optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        found = hvd.allreduce(torch.ones(1)).item(), hvd.join(), hvd.allgather_object(3)
        hvd.shutdown()
    return found


def test_one_worker_needs_no_other() -> None:
    assert run_ranks(1, _alone) == [(1.0, 0, [3])]


@pytest.mark.parametrize("threshold", ["0", "4000", "128000000"])
def test_batches_give_the_same_results(monkeypatch: pytest.MonkeyPatch, threshold: str) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", threshold)
    assert run_ranks(3, _fuses) == [True] * 3


def _uses_torch_distributed_meanwhile() -> tuple[int, int]:
    hvd.init()
    own, ours = 0, 0
    expected = torch.full((64,), 1000.0 * hvd.size())
    for number in range(60):
        handles = [
            hvd.allreduce_async(torch.full((64,), 1000.0), name=f"{number}.{place}", op=hvd.Sum)
            for place in range(4)
        ]
        for _ in range(5):  # while the executor runs the others, on each rank at its own pace
            mine = torch.full((64,), float(number))
            torch.distributed.all_reduce(mine)
            own += torch.equal(mine, torch.full((64,), float(number * hvd.size())))
        ours += sum(torch.equal(hvd.synchronize(each), expected) for each in handles)
    hvd.shutdown()
    return own, ours


def test_the_scripts_own_calls_of_torch_distributed_do_not_meet_ours() -> None:
    assert run_ranks(2, _uses_torch_distributed_meanwhile) == [(300, 240)] * 2


def _one_name_for_every_kind() -> list[float]:
    hvd.init()
    one = torch.ones(2)
    start = {
        "allreduce": lambda: hvd.allreduce_async(one, name="x", op=hvd.Sum),
        "grouped": lambda: hvd.grouped_allreduce_async([one, one], name="x", op=hvd.Sum),
        "broadcast": lambda: hvd.broadcast_async(one * hvd.rank(), 1, name="x"),
        "allgather": lambda: hvd.allgather_async(one, name="x"),
        "gathers": lambda: hvd.grouped_allgather_async([one], name="x"),
        "alltoall": lambda: hvd.alltoall_async(one, name="x"),
        "scatter": lambda: hvd.reducescatter_async(one, name="x", op=hvd.Sum),
        "scatters": lambda: hvd.grouped_reducescatter_async([one], name="x", op=hvd.Sum),
    }
    order = list(start) if hvd.rank() == 0 else list(reversed(start))
    handles = {kind: start[kind]() for kind in order}
    found = {kind: hvd.synchronize(handles[kind]) for kind in start}
    hvd.shutdown()
    flat = [part for value in found.values() for part in (value if isinstance(value, list) else [value])]
    return [part.sum().item() for part in flat]


def test_one_name_may_be_in_flight_for_every_kind() -> None:
    assert run_ranks(2, _one_name_for_every_kind) == [[4.0, 4.0, 4.0, 2.0, 4.0, 4.0, 2.0, 2.0, 2.0]] * 2


def _sets_of_a_job_that_goes_on() -> list[float]:
    import hora.torch as hora

    before = hora.add_process_set([0])
    results = []
    for members in ([0, 1], [1, 2]):
        hvd.init(process_sets="dynamic")
        added = hvd.add_process_set(members)
        for each in (before, added):
            if each.included():
                results.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=each).item())
        hvd.shutdown()
    return results


def test_process_sets_of_the_job_outlive_the_negotiation() -> None:
    assert run_ranks(3, _sets_of_a_job_that_goes_on) == [[1.0, 2.0, 1.0], [2.0, 2.0], [2.0]]


def _children_call_operations(folder: str) -> float:
    hvd.init()
    child = os.fork()
    if child == 0:
        said = [str(hvd.rank())]
        for call in (lambda: hvd.allreduce(torch.ones(1)), hvd.barrier, hvd.join):
            try:
                call()
            except hvd.HorovodInternalError as error:
                said.append(str(error))
        Path(folder, f"said-{hvd.rank()}").write_text("\n".join(said))
        os._exit(0)
    os.waitpid(child, 0)
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
    hvd.shutdown()
    return float(total)


def test_a_forked_child_neither_waits_nor_speaks_for_its_rank(tmp_path: Path) -> None:
    assert run_ranks(2, _children_call_operations, str(tmp_path)) == [2.0, 2.0]
    for rank in range(2):
        own, *errors = (tmp_path / f"said-{rank}").read_text().splitlines()
        assert own == str(rank)
        assert len(errors) == 3
        assert all("was called in a child process" in error for error in errors)


def _dynamic_at_the_second_call() -> list[str]:
    hvd.init()
    with pytest.raises(ValueError, match="dynamic"):
        hvd.add_process_set([0])
    hvd.init(process_sets="dynamic")
    said = [str(hvd.add_process_set([0]))]
    hvd.shutdown()
    hvd.init()
    said.append(str(hvd.add_process_set([1])))
    said.append(str(hvd.global_process_set))
    hvd.shutdown()
    return said


def test_process_sets_once_dynamic_stay_so() -> None:
    assert (
        run_ranks(2, _dynamic_at_the_second_call)
        == [
            [
                "ProcessSet(process_set_id=1, ranks=[0], mpi_comm=None)",
                "ProcessSet(process_set_id=2, ranks=[1], mpi_comm=None)",
                "ProcessSet(process_set_id=0, ranks=[0, 1], mpi_comm=None)",
            ]
        ]
        * 2
    )
