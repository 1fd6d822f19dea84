"""join(): ranks without data answer the steps of the others, and all end in the same state."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import ranks, run_ranks

import hora.torch as hora
from hora.core.errors import CollectiveError, GradientError, HoraError
from hora.torch import _buckets, _join, _presence
from hora.torch._marks import Marks
from hora.torch._reducer import Reducer

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


class Net(torch.nn.Module):
    """Layers that every step uses, and one that some ranks use in some steps."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(6, 5)
        self.sometimes = torch.nn.Linear(5, 5)
        self.never = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 1)
        self.double()

    def forward(self, x: torch.Tensor, *, sometimes: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if sometimes:
            x = x + self.sometimes(x)
        result: torch.Tensor = self.last(x)
        return result


def batch(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def loss_of(net: torch.nn.Module, step: int, part: int, **options: bool) -> torch.Tensor:
    loss: torch.Tensor = net(batch(step, part), **options).square().mean()
    return loss


def reference(counts: list[int], make: Make = sgd, *, clip: float | None = None, passes: int = 1) -> Net:
    """One worker that takes in each step the mean over the ranks that have data."""
    net = Net()
    optimizer = make(net.parameters())
    for step in range(max(counts)):
        optimizer.zero_grad()
        active = [rank for rank, count in enumerate(counts) if step < count]
        losses = [loss_of(net, step, passes * rank + each) for rank in active for each in range(passes)]
        torch.stack(losses).mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return net


def train(
    count: int, net: Net, optimizer: Any, *, clip: float | None = None, passes: int = 1, first: int = 0
) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        for each in range(passes):
            loss_of(net, step, passes * hora.rank() + each).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All numbers of an optimizer's state, in one order."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = optimizer.state.get(parameter, {})
            found += [torch.as_tensor(entry[key]).double() for key in sorted(entry) if entry[key] is not None]
    return found


def agree(tensors: list[torch.Tensor]) -> bool:
    """Whether all ranks hold the same bits."""
    return all(torch.equal(tensor, hora.broadcast(tensor.detach(), 0)) for tensor in tensors)


def close(net: torch.nn.Module, other: torch.nn.Module, bound: float = 1e-12) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=bound, atol=bound) for a, b in pairs)


def uneven(size: int) -> list[list[int]]:
    """How many steps each rank makes."""
    return [
        [2 + rank for rank in range(size)],  # the last rank joins last
        [4 - rank for rank in range(size)],  # the first one does
        [0 if rank % 2 else 3 for rank in range(size)],  # some join as first thing
        [2] * size,  # all at once
        [0] * size,
    ]


@pytest.fixture(params=["copied", "viewed"])
def each_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small nets with several buckets; gradients that are copied, and gradients that are views."""
    monkeypatch.setattr(_buckets, "FIRST_BUCKET_MB", 1e-4)
    if request.param == "viewed":
        monkeypatch.setattr(_buckets, "SMALL", 0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_presence, "FIRST_LOOK", 0.02)
    monkeypatch.setattr(_presence, "LONGEST_PAUSE", 0.1)


each_kind_of_gradient = pytest.mark.usefixtures("each_kind")


@each_kind_of_gradient
@ranks(1, 2, 3, 4)
def test_the_mean_is_one_of_the_ranks_with_data() -> None:
    for make, counts in zip(itertools.cycle([sgd, adam]), uneven(hora.size()), strict=False):
        net = Net()
        optimizer = hora.DistributedOptimizer(make(net.parameters()), net, bucket_mb=1e-4)
        train(counts[hora.rank()], net, optimizer)
        last = hora.join()
        assert counts[last] == max(counts)
        assert hora.allgather(torch.tensor([last])).unique().numel() == 1
        assert close(net, reference(counts, make))
        assert agree([*net.parameters(), *state_of(optimizer)])
        assert net.never.weight.grad is None


@each_kind_of_gradient
@ranks(2, 3)
def test_engines_that_do_not_let_the_host_wait_are_answered_unseen() -> None:
    """The way of NCCL, here on Gloo."""
    _join._rendezvous.engines = lambda group: {"cpu": "another"}  # type: ignore[assignment]
    read = Marks.read
    # The count is a tensor there.
    Marks.read = lambda self, marks: torch.as_tensor(read(self, marks))  # type: ignore[method-assign]
    for counts in uneven(hora.size()):
        net = Net()
        optimizer = hora.DistributedOptimizer(adam(net.parameters()), net, bucket_mb=1e-4)
        train(counts[hora.rank()], net, optimizer)
        last = hora.join()
        assert counts[last] == max(counts)
        assert close(net, reference(counts, adam))
        assert agree([*net.parameters(), *state_of(optimizer)])
        hora.barrier()
    other = Net()
    optimizers = [optimizer, hora.DistributedOptimizer(sgd(other.parameters()), other)]
    with pytest.raises(CollectiveError, match="there are 2"):
        hora.join()
    assert len(optimizers) == 2


@ranks(2, 3)
def test_training_goes_on_after_a_join_and_joins_again() -> None:
    size, rank = hora.size(), hora.rank()
    net, plain = Net(), Net()
    optimizer = hora.DistributedOptimizer(adam(net.parameters()), net)
    alone = adam(plain.parameters())
    first = 0
    for counts in (uneven(size)[0], uneven(size)[2], [1] * size, uneven(size)[1]):
        train(counts[rank], net, optimizer, first=first)
        hora.join()
        for step in range(first, first + max(counts)):
            alone.zero_grad()
            active = [other for other, count in enumerate(counts) if step - first < count]
            torch.stack([loss_of(plain, step, other) for other in active]).mean().backward()
            alone.step()
        assert close(net, plain)
        assert hora.mean(float(rank)) == (size - 1) / 2  # ordinary operations work again
        first += max(counts)


@ranks(2, 3)
def test_clipping_accumulation_and_factors() -> None:
    size, rank = hora.size(), hora.rank()
    counts = uneven(size)[0]
    for options, passes, clip in (
        ({}, 1, 0.1),
        ({"backward_passes_per_step": 2}, 2, 0.1),
        ({"gradient_predivide_factor": 2.5}, 1, None),
        ({"compression": hora.TopK(1.0)}, 1, None),
        ({"compression": hora.PowerSGD(6)}, 1, None),
        ({"groups": 2}, 1, None),
    ):
        net = Net()
        optimizer: Any = hora.DistributedOptimizer(sgd(net.parameters()), net, **options)  # type: ignore[arg-type]
        train(counts[rank], net, optimizer, clip=clip, passes=passes)
        hora.join()
        assert close(net, reference(counts, clip=clip, passes=passes)), options
        assert agree(list(net.parameters()))


@ranks(3)
def test_sum_and_half_precision_on_the_way() -> None:
    counts = [1, 3, 2]
    net, plain = Net(), Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net, op=hora.Sum)
    alone = sgd(plain.parameters())
    train(counts[hora.rank()], net, optimizer)
    assert hora.join() == 1
    for step in range(3):
        alone.zero_grad()
        active = [rank for rank in range(3) if step < counts[rank]]
        torch.stack([loss_of(plain, step, rank) for rank in active]).sum().backward()
        alone.step()
    assert close(net, plain)
    for compression in (hora.Compression.fp16, hora.Compression.bf16):
        net = Net()
        optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net, compression=compression)
        train(counts[hora.rank()], net, optimizer)
        hora.join()
        assert close(net, reference(counts), 5e-2)
        assert agree(list(net.parameters()))


@ranks(2, 3)
def test_parameters_unused_on_some_ranks() -> None:
    size, rank = hora.size(), hora.rank()
    counts = uneven(size)[0]
    net, plain = Net(), Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    alone = sgd(plain.parameters())
    for step in range(counts[rank]):
        optimizer.zero_grad()
        loss_of(net, step, rank, sometimes=(step + rank) % 2 == 0).backward()
        optimizer.step()
    hora.join()
    for step in range(max(counts)):
        alone.zero_grad()
        active = [other for other, count in enumerate(counts) if step < count]
        losses = [loss_of(plain, step, other, sometimes=(step + other) % 2 == 0) for other in active]
        torch.stack(losses).mean().backward()
        alone.step()
    assert close(net, plain)


@ranks(2, 3)
def test_several_optimizers_in_any_order() -> None:
    """Two nets as in a GAN: the second one's backward goes through the first, whose gradients come too."""

    def steps(judge: Net, maker: Net, first: Any, second: Any, parts: list[list[int]]) -> None:
        for step, active in enumerate(parts):
            first.zero_grad()
            torch.stack([loss_of(judge, step, part) for part in active]).mean().backward()
            first.step()
            if step % 2 == 0:  # the order of operations differs from step to step
                second.zero_grad()
                made = [torch.cat([maker(batch(step, part))] * 6, 1) for part in active]
                torch.stack([judge(each).mean() for each in made]).mean().backward()
                second.step()

    size, rank = hora.size(), hora.rank()
    for counts in (uneven(size)[0], uneven(size)[2], [1 + rank for rank in range(size)]):
        judge, maker, plain_judge, plain_maker = Net(1), Net(2), Net(1), Net(2)
        first = hora.DistributedOptimizer(adam(judge.parameters()), judge)
        second = hora.DistributedOptimizer(sgd(maker.parameters()), maker)
        steps(judge, maker, first, second, [[rank]] * counts[rank])
        hora.join()
        everyone = [[other for other in range(size) if step < counts[other]] for step in range(max(counts))]
        steps(
            plain_judge, plain_maker, adam(plain_judge.parameters()), sgd(plain_maker.parameters()), everyone
        )
        assert close(judge, plain_judge)
        assert close(maker, plain_maker)


@ranks(2, 3)
def test_closures() -> None:
    def lbfgs(net: Net) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def steps(net: Net, optimizer: Any, parts: list[list[int]]) -> None:
        for step, active in enumerate(parts):

            def closure(step: int = step, active: list[int] = active) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.stack([loss_of(net, step, part) for part in active]).mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    size, rank = hora.size(), hora.rank()
    counts = [1 + other for other in range(size)]
    net, plain = Net(), Net()
    optimizer = hora.DistributedOptimizer(lbfgs(net), net)
    steps(net, optimizer, [[rank]] * counts[rank])
    hora.join()
    everyone = [[other for other in range(size) if step < counts[other]] for step in range(max(counts))]
    steps(plain, lbfgs(plain), everyone)
    assert close(net, plain, 1e-9)  # a line search amplifies the last bits


@ranks(2, 4)
def test_zeros_count_for_nothing_in_adasum() -> None:
    size, rank = hora.size(), hora.rank()
    counts = [1] * (size - 1) + [3]
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net, op=hora.Adasum)
    train(1, net, optimizer)
    plain = Net()
    plain.load_state_dict(net.state_dict())
    alone = sgd(plain.parameters())
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if rank == size - 1:
        train(2, net, optimizer, first=1)
        train(2, plain, alone, first=1)  # with the changes of one rank alone, Adasum changes nothing
        assert close(net, plain)
    assert hora.join() == counts.index(3)
    assert agree([*net.parameters(), *state_of(optimizer)])


@ranks(2, 3)
def test_learning_rates_come_from_the_last_rank() -> None:
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(1 + hora.rank()):
        train(1, net, optimizer, first=step)
        scheduler.step()
    hora.join()
    assert optimizer.param_groups[0]["lr"] == 0.05 * 0.5 ** hora.size()


def test_nothing_to_wait_for() -> None:
    assert run_ranks(1, hora.join) == [0]
    for result in run_ranks(3, lambda: [hora.join(), hora.join(0)]):
        assert result[0] in range(3)


CALLS: dict[str, Callable[[], Any]] = {
    "mean": lambda: hora.mean(1.0),
    "allreduce": lambda: hora.allreduce(torch.ones(2)),
    "allreduce-async": lambda: hora.synchronize(hora.allreduce_async(torch.ones(2))),
    "adasum": lambda: hora.allreduce(torch.ones(2), op=hora.Adasum),
    "allgather": lambda: hora.allgather(torch.ones(2)),
    "broadcast": lambda: hora.broadcast(torch.ones(2), 1),
    "alltoall": lambda: hora.alltoall(torch.ones(2), splits=[1, 1]),
    "reducescatter": lambda: hora.reducescatter(torch.ones(2)),
    "barrier": hora.barrier,
    "broadcast_object": lambda: hora.broadcast_object(3, 1),
    "allgather_object": lambda: hora.allgather_object(3),
    "broadcast_parameters": lambda: hora.broadcast_parameters(Net()),
    "SyncBatchNorm": lambda: hora.SyncBatchNorm(2)(torch.ones(3, 2)),
    "DistributedOptimizer": lambda: hora.DistributedOptimizer(sgd([torch.nn.Parameter(torch.ones(1))])),
}


def _refused(call: Callable[[], Any], steps: int) -> tuple[float, str]:
    """Rank 0 joins; rank 1 makes steps and then calls what rank 0 cannot answer."""
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    train(1, net, optimizer)
    train(steps if hora.rank() == 1 else 0, net, optimizer)
    start = time.monotonic()
    with pytest.raises(HoraError) as raised:
        if hora.rank() == 0:
            hora.join()
        else:
            call()
            hora.join()
    assert isinstance(raised.value, CollectiveError)
    return time.monotonic() - start, str(raised.value)


@pytest.mark.alone
@pytest.mark.parametrize("name", CALLS)
def test_what_a_joined_rank_cannot_answer_is_an_error_on_all(name: str) -> None:
    # Without a step in between nobody knows yet that rank 0 has joined.
    for steps in (0, 2) if name in ("mean", "broadcast") else (0,):
        for seconds, message in run_ranks(2, _refused, CALLS[name], steps, limit=10):
            assert seconds < 2
            assert "rank 0 had joined" in message
            assert "Let every rank call hora.join() first" in message
            function = name.partition("-")[0].replace("adasum", "allreduce")
            if name not in ("SyncBatchNorm", "DistributedOptimizer"):  # these call others
                assert message.startswith(function)


@ranks(3)
def test_an_operation_that_the_joined_rank_took_part_in_is_no_error() -> None:
    """Rank 0 joins while its broadcast is still on its way to a rank that is late."""
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    if hora.rank() == 2:
        time.sleep(0.5)  # what is tested is that the others see a late rank
    handle = hora.broadcast_async(torch.full((3,), float(hora.rank())), 0)
    if hora.rank():
        assert hora.synchronize(handle).tolist() == [0, 0, 0]
        train(2, net, optimizer)
    last = hora.join()
    assert last > 0
    assert agree(list(net.parameters()))


@ranks(2)
def test_gradients_that_no_step_used_are_an_error_on_all() -> None:
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net, backward_passes_per_step=2)
    if hora.rank() == 0:
        loss_of(net, 0, 0).backward()
        with pytest.raises(GradientError, match="after 1 of backward_passes_per_step=2"):
            hora.join()
    else:
        with pytest.raises(CollectiveError, match="after 1 of backward_passes_per_step=2"):
            train(1, net, optimizer, passes=2)


@ranks(2)
def test_left_over_passes_are_stepped_before_joining() -> None:
    """Rank 0 has an odd number of batches: its last step has one pass, which rank 1 answers in join()."""
    net, plain = Net(), Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net, backward_passes_per_step=2)
    alone = sgd(plain.parameters())
    if hora.rank() == 0:
        loss_of(net, 0, 0).backward()
        optimizer.step()
    hora.join()
    loss_of(plain, 0, 0).backward()
    alone.step()
    assert close(net, plain)


@ranks(3)
def test_optimizers_of_some_ranks_are_refused() -> None:
    pair = hora.add_process_set([0, 1])
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net, process_set=pair)
    with pytest.raises(CollectiveError, match="DistributedOptimizer of some ranks"):
        hora.join()
    assert optimizer is not None


@ranks(3)
def test_operations_of_some_ranks_while_another_has_joined() -> None:
    """Ranks 1 and 2 go on among themselves; what wants rank 0 is an error on all."""
    rank = hora.rank()
    with_it, without = hora.add_process_set([0, 1]), hora.add_process_set([1, 2])
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    train(2 if rank else 0, net, optimizer)
    if rank:
        assert hora.allreduce(torch.tensor(float(rank)), process_set=without).item() == 1.5
    with pytest.raises(CollectiveError, match="allreduce was called.* while rank 0 had joined"):
        if rank == 1:
            hora.allreduce(torch.ones(1), process_set=with_it)
        hora.join()


@ranks(2)
def test_an_optimizer_that_is_gone_is_an_error_on_all() -> None:
    net = Net()
    optimizer: Any = hora.DistributedOptimizer(sgd(net.parameters()), net)
    if hora.rank() == 0:
        optimizer = None
    with pytest.raises(CollectiveError, match="number 0"):
        train(hora.rank(), net, optimizer)
        hora.join()


def test_a_rank_that_ends_without_joining_is_named() -> None:
    def body() -> None:
        net = Net()
        optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
        train(2 * hora.rank(), net, optimizer)
        if hora.rank() == 0:
            with pytest.raises(CollectiveError, match="Rank 1 has ended without hora.join()"):
                hora.join()

    run_ranks(2, body, limit=10)


@ranks(2)
def test_nothing_is_sent_or_looked_up_while_nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is not touched, and the messages of a step are those of its buckets."""
    monkeypatch.setattr(_presence, "FIRST_LOOK", 20.0)  # a busy machine makes ranks late
    context = hora.context()
    touched: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            touched.append(name)
            raise AssertionError(name)

    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    hora.barrier()
    store, context.presence._store = context.presence._store, Watched()
    sent: list[int] = []
    launch = Reducer._launch
    Reducer._launch = lambda self, bucket, **rest: (sent.append(1), launch(self, bucket, **rest))[1]  # type: ignore[method-assign,assignment,func-returns-value]
    train(3, net, optimizer)
    context.presence._store = store
    assert touched == []
    assert len(sent) == 3


@ranks(2)
def test_keys_of_earlier_joins_are_deleted() -> None:
    net = Net()
    optimizer = hora.DistributedOptimizer(sgd(net.parameters()), net)
    presence = hora.context().presence
    for round_ in range(3):
        train(2 * hora.rank(), net, optimizer)
        first = presence._counts[0]
        hora.join()
        hora.barrier()
        if round_:
            key = f"{presence._prefix}/{round_ - 1}/operation/"
            assert not any(presence._store.check([f"{key}{number}"]) for number in range(first + 4))
        hora.barrier()
