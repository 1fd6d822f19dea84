"""Horovod's interface in its breadth: every kind of operation, process sets, join and every optimizer of
PyTorch, in the combinations that scripts use. Run by every rank.
"""

import inspect
import io
import itertools
import random
import warnings

import horovod.torch as hvd
import numpy as np
import pytest
import torch

DTYPES = (torch.float32, torch.int64, torch.float16, torch.float64, torch.int32)
CLASSES = sorted(
    (kind for kind in torch.optim.Optimizer.__subclasses__() if kind.__module__.startswith("torch.optim")),
    key=lambda kind: kind.__name__,
)
REFUSED = (ValueError, TypeError, hvd.HorovodInternalError)


@pytest.fixture(autouse=True, scope="module")
def job():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def same_on_every_rank(tensors):
    rows = hvd.allgather(torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])[None])
    return bool((rows == rows[0]).all())


# --- operations ---------------------------------------------------------------------------------


def test_kinds_dtypes_and_forms_in_flight_at_once_in_another_order_on_each_rank():
    def value(number, rank):
        return (torch.arange(number % 40 + 1) % 7 + rank).to(DTYPES[number % len(DTYPES)])

    chance = random.Random(hvd.rank())
    order = list(range(150))
    chance.shuffle(order)
    mine = {number: value(number, hvd.rank()) for number in order}
    start = (
        lambda tensor, name: hvd.allreduce_async(tensor, name=name, op=hvd.Sum),
        lambda tensor, name: hvd.allreduce_async_(tensor, name=name, op=hvd.Sum),
        lambda tensor, name: hvd.allgather_async(tensor, name=name),
        lambda tensor, name: hvd.broadcast_async(tensor, 1, name=name),
    )
    handles = {number: start[number % 4](mine[number], str(number)) for number in order}
    chance.shuffle(order)
    for number in order:
        result = hvd.synchronize(handles[number])
        parts = [value(number, rank) for rank in range(hvd.size())]
        exact = (sum(parts), sum(parts), torch.cat(parts), parts[1])[number % 4]
        assert torch.equal(result, exact)
        assert (result is mine[number]) == (number % 4 == 1)


def test_forms_of_splits():
    size, rank = hvd.size(), hvd.rank()
    tensor = torch.arange(2.0 * size) + 100 * rank
    exact = torch.cat([torch.arange(2.0) + 2 * rank + 100 * other for other in range(size)])
    for splits in ([2] * size, np.array([2] * size), torch.tensor([2] * size)):
        output, received = hvd.alltoall(tensor, splits=splits)
        assert torch.equal(output, exact)
        assert received.tolist() == [2] * size
    for wrong in (
        torch.ones(size + 1, dtype=torch.int32),
        torch.tensor([-1] + [1] * (size - 1), dtype=torch.int32),
        torch.ones(size),
        torch.ones(size, 1, dtype=torch.int32),
        torch.full((size,), 100, dtype=torch.int32),
    ):
        with pytest.raises(REFUSED):
            hvd.alltoall(torch.ones(size, 2), wrong)
    with pytest.raises(REFUSED):
        hvd.alltoall(torch.tensor(1.0))
    assert hvd.allreduce(torch.ones(1)).item() == 1.0


def test_shapes_that_are_easily_forgotten():
    assert hvd.allgather(torch.zeros(0, 5)).shape == (0, 5)
    assert hvd.allgather(torch.zeros(2, 0)).shape == (2 * hvd.size(), 0)
    turned = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(hvd.allgather(turned)[:4], turned)
    base = torch.ones(4)
    hvd.synchronize(hvd.allreduce_async_(base[1:3], op=hvd.Sum))
    assert base.tolist() == [1, hvd.size(), hvd.size(), 1]
    handles = [hvd.allreduce_async(base, name=f"alias.{number}") for number in range(3)]
    first, second, _ = [hvd.synchronize(handle) for handle in handles]
    first.zero_()
    assert torch.equal(second, base)
    parameter = torch.nn.Parameter(torch.full((2,), float(hvd.rank())))
    hvd.broadcast_(parameter, 1)
    hvd.allreduce_(parameter, op=hvd.Sum)
    assert parameter.tolist() == [hvd.size()] * 2
    with torch.inference_mode():
        assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]


def test_names_may_come_again_once_they_are_done():
    for _ in range(3):
        hvd.allreduce(torch.ones(1), name="again")
        result = hvd.grouped_allreduce((torch.ones(3), torch.ones(2, 2)), name="again", op=hvd.Sum)
        assert result[1].tolist() == [[hvd.size()] * 2] * 2
        hvd.grouped_allgather([torch.ones(1)], name="again")
        hvd.grouped_reducescatter([torch.ones(hvd.size())], name="again")
        hvd.broadcast_object(3, name="again")
    hvd.allreduce(torch.ones(1), name="a/b: c\né")


def test_gradients_of_groups_factors_and_compression():
    size, rank = hvd.size(), hvd.rank()

    def leaves(*shape):
        return [torch.ones(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    for function, shape, factor in (
        (lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum), (3,), size),
        (hvd.grouped_allreduce, (), 1),
        (hvd.grouped_allgather, (rank + 1, 2), 1),
        (lambda xs: hvd.grouped_reducescatter(xs, op=hvd.Sum), (2 * size, 2), size),
        (lambda xs: [hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0) for x in xs], (2,), 3 * size),
        (lambda xs: [hvd.allreduce(x, compression=hvd.Compression.fp16) for x in xs], (2,), 1),
    ):
        inputs = leaves(*shape)
        sum(result.sum() for result in function(inputs)).backward()
        assert all(torch.equal(x.grad, torch.full_like(x, factor)) for x in inputs)


def test_objects_of_every_kind():
    sent = {"array": np.arange(3), "function": lambda x: x + 1} if hvd.rank() == 0 else None
    got = hvd.broadcast_object(sent, name="object")
    assert got["function"](1) == 2
    assert got["array"].tolist() == [0, 1, 2]
    for empty in (None, b"", [], {}):
        assert hvd.broadcast_object(empty) == empty
    assert hvd.broadcast_object_fn(root_rank=1)(hvd.rank()) == 1


def test_parameters_in_every_form():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(hvd.rank())
    for form in (list(model.named_parameters()), model.named_parameters(), model.state_dict()):
        hvd.broadcast_parameters(form, np.int64(1))
    assert model[1].num_batches_tracked.item() == 1
    assert all(bool((tensor == 1).all()) for tensor in model.state_dict().values())
    for wrong in (model, "weight", 3):
        with pytest.raises(ValueError, match="broadcast_parameters"):
            hvd.broadcast_parameters(wrong, 0)


# --- process sets and join ----------------------------------------------------------------------

EVERY = {
    "allreduce": lambda one, **where: hvd.allreduce(one, op=hvd.Sum, **where),
    "grouped_allreduce": lambda one, **where: hvd.grouped_allreduce([one], op=hvd.Sum, **where)[0],
    "allgather": hvd.allgather,
    "alltoall": hvd.alltoall,
    "broadcast": lambda one, **where: hvd.broadcast(one, where["process_set"].ranks[0], **where),
    "reducescatter": lambda one, **where: hvd.reducescatter(one, op=hvd.Sum, **where),
}


def test_every_operation_in_two_process_sets_at_once():
    size, rank = hvd.size(), hvd.rank()
    sets = [hvd.add_process_set(range(start, size, 2)) for start in (0, 1)]
    mine, others = sets[rank % 2], sets[1 - rank % 2]
    count, root = mine.size(), mine.ranks[0]
    values = {"allreduce": count, "grouped_allreduce": count, "reducescatter": count}
    factors = values | {"broadcast": float(rank == root)}
    for name, operation in EVERY.items():
        x = torch.ones(2 * count, requires_grad=True)
        result = operation(x, process_set=mine)
        assert bool((result == values.get(name, 1)).all()), name
        result.sum().backward()
        assert x.grad.tolist() == [factors.get(name, 1)] * (2 * count), name
        with pytest.raises(REFUSED):
            operation(torch.ones(2), process_set=others)
    with pytest.raises(REFUSED):
        hvd.barrier(process_set=others)
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    assert mine.mpi_comm is None
    for wrong in ([], [0, 0], [-1], [size], "ab", [0.5], None):
        with pytest.raises(REFUSED):
            hvd.add_process_set(wrong)
    with pytest.raises(REFUSED):
        hvd.process_set_included(12345)
    for made in sets:
        assert hvd.remove_process_set(made)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("before", [False, True], ids=["new", "repeated"])
@pytest.mark.filterwarnings("ignore:.*average.*:DeprecationWarning")
def test_join_of_names_that_are_new_or_were_there_before(first, before):
    size = hvd.size()

    def reduced(tensors):
        handles = [
            hvd.allreduce_async(one, name=f"j{place}", average=True) for place, one in enumerate(tensors)
        ]
        return [hvd.synchronize(handle) for handle in handles]

    for dtype in (torch.int32, torch.float64):
        tensors = [(torch.arange(count) - 9).to(dtype) for count in (5, 25)]
        if before:
            reduced(tensors)
        if hvd.rank() != first:
            for one, result in zip(tensors, reduced(tensors), strict=True):
                exact = one.double() * (size - 1) / size
                assert torch.allclose(result.double(), exact if dtype.is_floating_point else exact.trunc())
        last = hvd.join()
        assert last != first
        assert hvd.allgather_object(last) == [last] * size


def test_uneven_training_ends_with_the_last_ones_model():
    model = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(2 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), last)
    assert same_on_every_rank(model.parameters())


# --- optimizers ---------------------------------------------------------------------------------


def made(kind, **options):
    torch.manual_seed(hvd.rank())
    if kind.__name__ == "SparseAdam":
        model = torch.nn.Embedding(10, 4, sparse=True)
    else:
        bias = kind.__name__ != "Muon"  # which takes matrices only
        model = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=bias), torch.nn.Linear(5, 4, bias=bias))
    known = inspect.signature(kind).parameters
    optimizer = kind(model.parameters(), **{key: value for key, value in options.items() if key in known})
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def train(model, optimizer):
    inputs = torch.tensor([1, 2, 3]) if isinstance(model, torch.nn.Embedding) else torch.randn(8, 6)

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).pow(2).sum()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_state_of_every_optimizer_restored_on_rank_0(kind):
    for options in ({"lr": 0.02}, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "amsgrad": True}):
        model, optimizer = made(kind, **options)
        hvd.broadcast_parameters(model.state_dict(), 0)
        train(model, optimizer)
        expected = hvd.broadcast_object(optimizer.state_dict(), 0)
        fresh, again = made(kind, **options)
        if hvd.rank() == 0:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            again.load_state_dict(torch.load(file, weights_only=False))
            fresh.load_state_dict(model.state_dict())
        hvd.broadcast_parameters(fresh.state_dict(), 0)
        hvd.broadcast_optimizer_state(again, 0)
        found = again.state_dict()["state"]
        assert found.keys() == expected["state"].keys()
        for place, entry in expected["state"].items():
            assert found[place].keys() == entry.keys()
            for key, value in entry.items():
                same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: one == other
                assert isinstance(value, list) or same(found[place][key], value)
        train(fresh, again)
        assert same_on_every_rank(fresh.parameters())


@pytest.mark.parametrize("as_dense", [True, False])
@pytest.mark.parametrize("cleared", [True, False])
def test_sparse_gradients_with_and_without_zero_grad(as_dense, cleared):
    model = torch.nn.Embedding(10, 3, sparse=True)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(list(model.parameters()), lr=0.1), sparse_as_dense=as_dense
    )
    for _ in range(2):
        if cleared:
            optimizer.zero_grad()
        model(torch.tensor([[1, 2, 4], [4, 3, hvd.rank()]])).sum().backward()
        optimizer.step()
    assert model.weight.grad.is_sparse
    assert same_on_every_rank(model.parameters())


def test_parts_that_train_by_turns():
    generator, judge = torch.nn.Conv2d(1, 10, 1), torch.nn.Conv2d(10, 1, 1)
    parts = [
        (part, hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1), part.named_parameters()))
        for part in (generator, judge)
    ]
    for model, _ in parts:
        hvd.broadcast_parameters(model.state_dict(), 0)
    for turn in itertools.islice(itertools.cycle((0, 1)), 6):
        for place, (model, optimizer) in enumerate(parts):
            model.requires_grad_(place == turn)
            optimizer.zero_grad()
        judge(generator(torch.rand(2, 1, 5, 5))).sum().backward()
        for place, (model, optimizer) in enumerate(parts):
            moved = [p.grad is not None and bool(p.grad.any()) for p in model.parameters()]
            assert moved == [place == turn] * 2
            if place == turn:
                optimizer.step()
    assert same_on_every_rank([*generator.parameters(), *judge.parameters()])


def test_schedulers_scaled_losses_and_copies():
    model = torch.nn.Linear(2, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as: lr_scheduler.step() before optimizer.step()
        for scheduler in (
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        ):
            optimizer.zero_grad()
            model(torch.ones(1, 2) * hvd.rank()).sum().backward()
            optimizer.step()
            scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    assert model.bias.grad.tolist() == [1.0, 1.0]
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    torch.save(model, io.BytesIO())
    optimizer.load_state_dict(optimizer.state_dict())
    assert same_on_every_rank(model.parameters())


def test_fewer_passes_than_promised_and_more():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), backward_passes_per_step=3
    )
    for passes, expected in ((3, -2.0), (1, -3.0)):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert model.weight.tolist() == [[expected] * 2]
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()


def test_what_is_called_outside_of_a_job_says_so():
    everyone = list(range(hvd.size()))
    hvd.shutdown()
    hvd.shutdown()
    for call in (hvd.rank, hvd.join, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"called before hvd\.init\(\)"):
            call()
    for comm in (None, [], everyone):
        hvd.init(comm)
        assert hvd.allreduce(torch.ones(1)).item() == 1.0
        hvd.shutdown()
    hvd.init(process_sets="dynamic")
    handle = hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="hora explain collective"):
        hvd.poll(handle)
