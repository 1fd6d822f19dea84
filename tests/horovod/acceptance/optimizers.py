"""Optimizers, state and batch norm of Horovod's interface, run by every rank."""

import copy
import warnings

import horovod.torch as hvd
import pytest
import torch
from torch.nn import functional

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}


@pytest.fixture(autouse=True, scope="module")
def job():
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def batches(steps):
    """The same on every rank: a batch of the whole job, of which each rank takes its part."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(4 * hvd.size(), 4, dtype=torch.float64, generator=generator)
        yield x, torch.randn(4 * hvd.size(), 2, dtype=torch.float64, generator=generator)


def part(tensor):
    return tensor[4 * hvd.rank() : 4 * hvd.rank() + 4]


def loss_of(model, x, y):
    return functional.mse_loss(model(x), y)


def equal(one, other, tolerance=1e-12):
    return all(
        torch.allclose(a, b, rtol=0, atol=tolerance)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def train_both(make, wrap, steps=3, clip=None):
    plain, model = network(), network()
    reference = make(plain.parameters())
    optimizer = wrap(make(model.parameters()), model)
    for x, y in batches(steps):
        reference.zero_grad()
        loss_of(plain, x, y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        reference.step()
        optimizer.zero_grad()
        loss_of(model, part(x), part(y)).backward()
        if clip is not None:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return plain, model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_plain_optimizer_on_the_union_batch(name):
    plain, model = train_both(
        OPTIMIZERS[name],
        lambda optimizer, model: hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters()
        ),
    )
    assert equal(plain, model)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 100},
        {"gradient_predivide_factor": 3.0},
        {"gradient_predivide_factor": 2.0, "groups": 2},
        {"compression": hvd.Compression.none},
    ],
)
def test_options_change_how_and_not_what(options):
    plain, model = train_both(
        OPTIMIZERS["SGD"], lambda optimizer, model: hvd.DistributedOptimizer(optimizer, **options)
    )
    assert equal(plain, model)


def test_groups_of_parameters():
    def wrap(optimizer, model):
        first, second, third, _ = model.parameters()
        return hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), groups=[[first, third], [second]]
        )

    plain, model = train_both(OPTIMIZERS["Adam"], wrap)
    assert equal(plain, model)


def test_clipping_between_synchronize_and_step():
    plain, model = train_both(
        OPTIMIZERS["SGD"], lambda optimizer, model: hvd.DistributedOptimizer(optimizer), clip=0.1
    )
    assert equal(plain, model)


def test_sum_and_half_precision():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum, compression=hvd.Compression.fp16
    )
    model(torch.full((1, 1), float(hvd.rank() + 1))).sum().backward()
    optimizer.step()
    assert model.weight.item() == -sum(range(1, hvd.size() + 1))


def test_bfloat16_model():
    model = torch.nn.Linear(2, 1, bias=False).bfloat16()
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    model(torch.full((1, 2), float(hvd.rank()), dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[-(hvd.size() - 1) / 2] * 2]


def test_several_backward_passes_are_summed():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), backward_passes_per_step=2
    )
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -2.0
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()  # fewer than said: reduced by step()
    optimizer.step()
    assert model.weight.item() == -3.0
    optimizer.zero_grad()
    with pytest.raises(AssertionError):
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    before = model.weight.item()
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == before - 1.0


def test_zero_grad_between_backward_and_step():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(AssertionError):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.zero_grad(set_to_none=False)


def test_step_after_synchronize_warns():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert len(caught) == 1
    assert "optimizer.step() called without optimizer.skip_synchronize()" in str(caught[0].message)


def test_named_parameters_are_checked():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    for wrong in (
        named[:1],
        [*named, named[0]],
        [("same", parameter) for parameter in model.parameters()],
        list(model.parameters()),
    ):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(optimizer, named_parameters=wrong)
    for options in (
        {"backward_passes_per_step": 0},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        {"groups": -1},
        {"groups": ["a"]},
        {"groups": [[named[0][1]], [named[0][1]]]},
    ):
        with pytest.raises(ValueError):
            hvd.DistributedOptimizer(optimizer, named, **options)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        hvd.DistributedOptimizer(optimizer, named, num_groups=1)


def test_the_class_stays_and_schedulers_work():
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_parameters_without_gradient_on_some_ranks():
    """Each rank uses another branch: what it lacks counts as zero."""
    first, second = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    for layer in (first, second):
        torch.nn.init.zeros_(layer.weight)
    model = torch.nn.ModuleList([first, second])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    for _ in range(2):
        optimizer.zero_grad()
        model[hvd.rank() % 2](torch.ones(1, 1)).sum().backward()
        optimizer.step()
    odd = hvd.size() // 2
    assert abs(first.weight.item() + 2 * (hvd.size() - odd) / hvd.size()) < 1e-6
    assert abs(second.weight.item() + 2 * odd / hvd.size()) < 1e-6


def test_two_optimizers_with_the_same_names():
    """A generator and a discriminator, trained in turns."""
    torch.manual_seed(3)
    models = [torch.nn.Conv2d(1, 4, 1), torch.nn.Conv2d(4, 1, 1)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for model in models
    ]
    x = torch.rand(1, 1, 5, 5)
    for trained in ((True, False), (False, True), (True, True)):
        for model, wanted in zip(models, trained, strict=True):
            for parameter in model.parameters():
                parameter.requires_grad_(wanted)
        for optimizer in optimizers:
            optimizer.zero_grad()
        models[1](models[0](x)).sum().backward()
        for model, wanted in zip(models, trained, strict=True):
            assert all((parameter.grad is not None) == wanted for parameter in model.parameters())
        for optimizer, wanted in zip(optimizers, trained, strict=True):
            if wanted:
                optimizer.step()


def test_parameter_groups_added_later_and_thawed():
    first, second = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    for layer in (first, second):
        torch.nn.init.zeros_(layer.weight)
    second.weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), lr=1.0), first.named_parameters()
    )
    optimizer.add_param_group({"params": second.parameters(), "lr": 2.0})
    second.weight.requires_grad_(True)
    x = torch.full((1, 1), float(hvd.rank()))
    (first(x) + second(x)).sum().backward()
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    assert first.weight.item() == -mean
    assert second.weight.item() == -2 * mean


def test_closures_use_reduced_gradients():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((1, 1), float(hvd.rank() + 1))).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert model.weight.item() == -(hvd.size() + 1) / 2


def test_lbfgs():
    plain, model = network(), network()
    reference = torch.optim.LBFGS(plain.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe"),
        model.named_parameters(),
    )
    x, y = next(iter(batches(1)))

    def evaluate(of, optimizer, x, y):
        optimizer.zero_grad()
        loss = loss_of(of, x, y)
        loss.backward()
        return loss

    for _ in range(2):
        reference.step(lambda: evaluate(plain, reference, x, y))
        optimizer.step(lambda: evaluate(model, optimizer, part(x), part(y)))
    assert equal(plain, model, 1e-9)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_gradients(as_dense):
    plain = torch.nn.Embedding(6, 2, sparse=True)
    torch.nn.init.ones_(plain.weight)
    model = copy.deepcopy(plain)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), sparse_as_dense=as_dense
    )
    reference = torch.optim.SGD(plain.parameters(), lr=1.0)
    (sum(plain(torch.tensor([0, 1 + rank])).sum() for rank in range(hvd.size())) / hvd.size()).backward()
    reference.step()
    model(torch.tensor([0, 1 + hvd.rank()])).sum().backward()
    optimizer.step()
    assert torch.allclose(plain.weight, model.weight, atol=1e-6)


@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_gradients_stay_sparse(as_dense):
    """SparseAdam takes no others."""
    model = torch.nn.Embedding(6, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(list(model.parameters()), lr=0.1), sparse_as_dense=as_dense
    )
    optimizer.zero_grad()
    model(torch.tensor([0, 1 + hvd.rank()])).sum().backward()
    optimizer.step()
    assert model.weight.grad.is_sparse
    touched = torch.cat(
        [torch.ones(1), torch.full((hvd.size(),), 1 / hvd.size()), torch.zeros(5 - hvd.size())]
    )
    assert torch.allclose(model.weight.grad.to_dense(), touched.unsqueeze(1).expand(6, 2))


def test_process_set_of_one_optimizer():
    pair = hvd.add_process_set([0])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=pair
    )
    model(torch.full((1, 1), float(hvd.rank() + 1))).sum().backward()
    optimizer.step()
    assert model.weight.item() == -(hvd.rank() + 1)
    assert hvd.remove_process_set(pair)


def test_optimizer_that_members_alone_have_made():
    first = hvd.add_process_set([0])
    model = torch.nn.Linear(1, 1, bias=False)
    names = [("members.weight", model.weight)]
    if first.included():
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), names, process_set=first)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), names)
    torch.nn.init.zeros_(model.weight)
    model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert model.weight.item() == -(hvd.size() - 1) / 2
    assert hvd.remove_process_set(first)


def test_uneven_data_ends_with_join():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    for _ in range(1 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert hvd.join() == hvd.size() - 1
    if hvd.rank() == hvd.size() - 1:
        expected = sum((hvd.size() - step) / hvd.size() for step in range(hvd.size()))
        assert abs(model.weight.item() + expected) < 1e-6


# --- state --------------------------------------------------------------------------------------


def test_broadcast_parameters():
    model = network(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert equal(model, network(seed=1))
    model = network(seed=hvd.rank())
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    assert equal(model, network(seed=0))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    with pytest.raises(ValueError):
        hvd.broadcast_parameters(5, root_rank=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_broadcast_optimizer_state(name):
    """Only the root has a state; afterwards all have the root's, and training goes on alike."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    if hvd.rank() == 0:
        for x, y in batches(2):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict())
    for state in states[1:]:
        assert state["param_groups"] == states[0]["param_groups"]
        for key, entry in state["state"].items():
            for field, value in entry.items():
                other = states[0]["state"][key][field]
                assert type(value) is type(other)
                assert torch.equal(value, other) if torch.is_tensor(value) else value == other


def test_broadcast_of_a_fresh_optimizer_changes_nothing():
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (1 + hvd.rank()), weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(optimizer.state) == 0
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_broadcast_of_options():
    model = network()
    options = (
        {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
        if hvd.rank() == 0
        else {"lr": 0.2}
    )
    optimizer = torch.optim.SGD(model.parameters(), **options)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 0.1, True)
    assert type(group["nesterov"]) is bool


def test_sync_batch_norm_equals_the_union_batch():
    torch.manual_seed(5)
    rows = [2 + rank for rank in range(hvd.size())]
    x = torch.randn(sum(rows), 3, 4, dtype=torch.float64)
    weights = torch.randn(sum(rows), 3, 4, dtype=torch.float64)
    plain = torch.nn.BatchNorm1d(3).double()
    union = x.clone().requires_grad_()
    expected = plain(union)
    (expected * weights).sum().backward()
    norm = hvd.SyncBatchNorm(3).double()
    mine = x.split(rows)[hvd.rank()].clone().requires_grad_()
    result = norm(mine)
    (result * weights.split(rows)[hvd.rank()]).sum().backward()
    assert torch.allclose(result, expected.split(rows)[hvd.rank()], atol=1e-12)
    assert torch.allclose(mine.grad, union.grad.split(rows)[hvd.rank()], atol=1e-12)
    assert torch.allclose(norm.running_var, plain.running_var, atol=1e-12)
    assert torch.allclose(
        hvd.allreduce(norm.weight.grad, op=hvd.Sum), plain.weight.grad, atol=1e-10
    ) or torch.allclose(norm.weight.grad, plain.weight.grad, atol=1e-10)


def test_an_elastic_script_runs_in_a_job_that_is_not_elastic():
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state):
        first = next(iter(state.sampler))
        state.sampler.record_batch(0, 2)
        state.epoch += 1
        state.commit()
        return first

    assert train(state) == hvd.rank()
    assert state.epoch == 1
    assert state.sampler.processed_indices == set(range(2 * hvd.size()))
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(7)
    state.epoch = 5
    state.restore()
    assert torch.equal(model.weight, before)
    assert state.epoch == 1


def test_a_class_made_from_the_private_one():
    """As scripts do that build the optimizer's class themselves."""
    from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer

    plain, model = network(), network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = type("SGD", (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))
    optimizer = made(inner.param_groups, model.named_parameters(), hvd.Compression.none, 1, hvd.Average)
    assert isinstance(optimizer, torch.optim.SGD)
    for x, y in batches(2):
        reference.zero_grad()
        optimizer.zero_grad()
        loss_of(plain, x, y).backward()
        loss_of(model, part(x), part(y)).backward()
        reference.step()
        optimizer.step()
    assert equal(plain, model)
    made = type("SGD", (torch.optim.SGD,), dict(_DistributedAdasumOptimizer.__dict__))
    optimizer = made(inner.param_groups, model.named_parameters(), hvd.Compression.none)
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()


def test_adasum():
    mine = torch.tensor([1.0, 0.0]) if hvd.rank() == 0 else torch.tensor([0.0, 1.0])
    if hvd.size() & (hvd.size() - 1):
        with pytest.raises((ValueError, NotImplementedError, hvd.HorovodInternalError)):
            hvd.allreduce(mine, op=hvd.Adasum)
        return
    assert hvd.allreduce(mine, op=hvd.Adasum).tolist() == [1.0, 1.0]  # orthogonal: the sum
    same = hvd.allreduce(torch.tensor([2.0, 4.0]), op=hvd.Adasum)
    assert same.tolist() == [2.0, 4.0]  # equal: the mean
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), op=hvd.Adasum
    )
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -1.0
