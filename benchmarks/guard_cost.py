"""What the guard costs: CPU time of a step with it and without, in turn, in one job.

    python benchmarks/guard_cost.py [--seconds 40] [--ranks 2] [--models tiny] [--control] [--parts]

Three trainings are measured, on synthetic data out of torch's data loader: the small ResNet of the workload,
a small transformer, and the same on so few tokens that a step is mostly overhead. It takes under 3 minutes.

Each job of ``hora run`` makes its steps in pairs, one with the guard and one without, in random order. A
step's time is the CPU time of the thread that trains, the mean over the ranks. Waiting for other ranks is not
in it, so other work on the machine disturbs less, and the ratio is rather above than below that of durations.
What disturbs both parts of a step alike is seen in the forward pass, in which the guard does nothing, and
taken off. The ratio is that of means without the fifth of the pairs at each end, with an interval of 95 %
from a bootstrap over pairs. 1.01 means that the guard takes 1 % of a step. Fingerprints are rare, so they are
timed by themselves, and their mean per step is added.

In it is all that the guard does in that thread: the board, the look at the gradients and the loss, the hooks
of steps, backward and data loaders, and the fingerprints at their cadence. Not in it are the first 60 steps,
in which more is looked at; the guard's own thread of a rank, which sleeps; and the supervisor, one process
per host. What share of a core these two use is printed beside.

``--control`` never switches the guard on, so the ratio must be 1: how sharp the measurement is.
``--parts`` measures what each part takes of a step instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy
import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import dataloader as loaders

import hora.torch as hora
from _interleave import Case, Report, Spread, arguments, long_table
from hora.adapter.prints import EVERY
from hora.torch import _context

Numbers = numpy.ndarray[Any, Any]
MODELS = ("resnet", "transformer", "tiny")
WITH, WITHOUT, STEP = "with the guard", "without the guard", "whole step"
BLOCKS = 25
"""Of pairs one after the other: what is shown as a round."""

WARM = 60
"""Steps before the first that is measured."""

TRIMMED = 0.2
CADENCE = EVERY

STAND_INS: list[tuple[Any, str]] = [
    (torch.autograd, "backward"),
    (loaders._BaseDataLoaderIter, "__next__"),
    (loaders._BaseDataLoaderIter, "_next_index"),
]
"""Functions of torch in whose place the guard puts its own."""

originals = [getattr(owner, name) for owner, name in STAND_INS]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=40, help="of each training")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    if "HORA_RANK" in os.environ:
        measure(given)
        return 0
    report = Report("guard_parts", base=STEP) if given.parts else Report("guard_cost", base=WITHOUT)
    for model in given.models:
        case: Case = {"model": model, "ranks": given.ranks}
        found = run(given, model)
        before = len(report.rows)
        if given.parts:
            report.add(case | {"measure": "time"}, found)
        else:
            add_cost(report, case, found, control=given.control)
        report.finish(given.json)
        print(long_table(report.rows[before:]), flush=True)
    return report.finish(given.json)


def run(given: argparse.Namespace, model: str) -> Any:
    """What rank 0 of a job has measured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "hora", "run", "-n", str(given.ranks), "--run-dir", f"{folder}/run"]
        command += [__file__, "--models", model, "--seconds", str(given.seconds), "--json", str(file)]
        command += [f"--{name}" for name in ("control", "parts") if getattr(given, name)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return json.loads(file.read_text(encoding="utf-8"))


def measure(given: argparse.Namespace) -> None:
    """Measure one training; rank 0 writes what was found."""
    hora.init()
    torch.manual_seed(1)
    [model] = given.models
    training = {"resnet": resnet, "transformer": transformer, "tiny": tiny}[model]()
    switch = Switch(training.optimizer)
    for _ in range(WARM):
        training.step()
    began = time.perf_counter()
    for _ in range(10):
        training.step()
    once = hora.allreduce(torch.tensor((time.perf_counter() - began) / 10), op=hora.Max)
    steps = max(2 * CADENCE, round(given.seconds / float(once)))
    switch.prints[:] = [0]
    found: Any
    if given.parts:
        from guard_parts import parts

        found = parts(training, switch, steps=steps, blocks=min(10, steps // CADENCE), whole=STEP)
    else:
        pairs = run_pairs(training, switch, count=steps // 2, never=given.control)
        mine = {
            "pairs": pairs,
            "prints": sum(switch.prints) / max(len(switch.prints) - 1, 1) / CADENCE,
            "thread": switch.own_thread(),
            "supervisor": supervisor(),
        }
        found = hora.allgather_object(mine)
    if hora.rank() == 0:
        given.json.write_text(json.dumps(found), encoding="utf-8")


def run_pairs(training: Training, switch: Switch, *, count: int, never: bool) -> list[Any]:
    """Pairs of steps, with the guard and without.

    Each step is a pair of CPU times in nanoseconds: of the forward pass, and of the rest.
    """
    random = numpy.random.default_rng(1)  # the same on all ranks: they must call the same
    clock = time.thread_time_ns

    def timed(on: bool) -> tuple[int, int]:
        switch(on and not never)
        start = clock()
        loss = training.forward()
        middle = clock()
        training.learn(loss)
        return middle - start, clock() - middle

    pairs = []
    for _ in range(count):
        if not never and switch.steps % CADENCE >= CADENCE - 2:
            while switch.steps % CADENCE != 1:  # with a fingerprint, and the step after it, which looks again
                timed(True)
        if random.random() < 0.5:
            pairs.append((timed(True), timed(False)))
        else:
            pairs.append((timed(False), timed(True))[::-1])
    switch(True)
    return pairs


def add_cost(report: Report, case: Case, found: list[dict[str, Any]], *, control: bool) -> None:
    """Estimate the ratio and its interval, from what each rank has measured."""
    pairs = numpy.array([rank["pairs"] for rank in found], dtype=float).mean(0) / 1e9  # over the ranks
    prints = 0.0 if control else float(numpy.mean([rank["prints"] for rank in found])) / 1e9
    forward, rest = (pairs[:, 0] - pairs[:, 1]).T
    slope = float(forward @ rest / (forward @ forward))
    differences, bases = rest - slope * forward, pairs[:, 1].sum(1)

    def ratio(chosen: Numbers) -> float:
        return 1 + (trimmed(differences[chosen]) + prints) / trimmed(bases[chosen])

    random, count = numpy.random.default_rng(2), len(pairs)
    found_ratio, base = ratio(numpy.arange(count)), trimmed(bases)
    low, high = numpy.quantile(
        [ratio(random.integers(count, size=count)) for _ in range(2000)], [0.025, 0.975]
    )
    blocks = numpy.array_split(numpy.arange(count), min(BLOCKS, count))
    without = [trimmed(bases[block]) for block in blocks]
    more = [trimmed(differences[block]) + prints for block in blocks]
    values = {WITHOUT: without, WITH: [one + other for one, other in zip(without, more, strict=True)]}
    ratios = {WITH: Spread(1 / found_ratio, 1 / float(high), 1 / float(low))}
    report.add(case | {"measure": "step"}, values, ratios=ratios)
    report.note(
        f"{case['model']}, {WITH}",
        f"{'never on' if control else 'on'}: a step takes x {found_ratio:.4f} ({low:.4f} to {high:.4f} with "
        f"95 %; {count} pairs); fingerprints {100 * prints / base:.2f} % of it; its thread "
        f"{100 * found[0]['thread']:.2f} % and the supervisor {100 * found[0]['supervisor']:.1f} % of a core",
    )


def trimmed(values: Numbers) -> float:
    """The mean without both ends."""
    cut = int(TRIMMED * len(values))
    return float(numpy.sort(values)[cut : len(values) - cut].mean())


class Switch:
    """Takes the guard away and puts it back: its board, and its watch of the training."""

    def __init__(self, optimizer: Any) -> None:
        self.context = _context.context()
        guard, watch = self.context.guard, self.context.watch
        if guard is None or watch is None:
            raise SystemExit("There is no guard here: write hora run, without HORA_GUARD=off.")
        self.guard, self.watch = guard, watch
        self.group = watch.groups[optimizer]
        self.reducer = optimizer._hora.reducer
        self._packed = self.reducer.packed
        self._stand_ins = [getattr(owner, name) for owner, name in STAND_INS]
        hooks: Any = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        self.hooks = [(each, dict(each)) for each in hooks]
        self.prints = [0]
        """CPU nanoseconds of each fingerprint so far, with the second look before the next step."""
        for name in ("_print", "look_between"):
            setattr(watch.prints, name, self._timed(getattr(watch.prints, name), new=name == "_print"))
        self._without = 0
        self._began = time.perf_counter()

    @property
    def steps(self) -> int:
        """Steps that the guard has seen."""
        return self.group.steps

    def __call__(self, on: bool) -> None:
        self.context.guard = self.guard if on else None
        self.reducer.packed = self._packed if on else None
        for (owner, name), function in zip(STAND_INS, self._stand_ins if on else originals, strict=True):
            setattr(owner, name, function)
        for hooks, kept in self.hooks:
            hooks.clear()
            if on:
                hooks.update(kept)
        if on and self._without:  # these steps' writes are no surprise
            versions = zip(self.group.versions, self.group.own_writes, strict=True)
            self.group.versions = [version + self._without * own for version, own in versions]
            self._without = 0
        self._without += not on

    def _timed(self, function: Callable[[Any], None], *, new: bool) -> Callable[[Any], None]:
        def call(group: Any) -> None:
            start = time.thread_time_ns()
            function(group)
            taken = time.thread_time_ns() - start
            if new:
                self.prints.append(taken)
            else:
                self.prints[-1] += taken

        return call

    def own_thread(self) -> float:
        """Share of a core that the guard's own thread has used."""
        thread = self.guard.reporter._thread.native_id
        used = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
        return used / 1e9 / (time.perf_counter() - self._began)


def supervisor() -> float:
    """Share of a core that ``hora run`` has used since it started."""
    process = psutil.Process(os.getppid())
    times = process.cpu_times()
    return float((times.user + times.system) / (time.time() - process.create_time()))


class Training:
    """A model, its optimizer, and its data."""

    def __init__(
        self, loss: Callable[..., torch.Tensor], optimizer: Any, data: TensorDataset, batch: int
    ) -> None:
        self._loss = loss
        self.optimizer = optimizer
        self._batches = self._endless(DataLoader(data, batch_size=batch, shuffle=True, drop_last=True))
        self._batch = next(self._batches)

    def step(self) -> None:
        """A whole step."""
        self.learn(self.forward())

    def forward(self) -> torch.Tensor:
        """What the guard has no part in."""
        return self._loss(*self._batch)

    def learn(self, loss: torch.Tensor) -> None:
        """The rest of a step, and the next batch."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._batch = next(self._batches)

    def _endless(self, loader: DataLoader[Any]) -> Iterator[Any]:
        while True:
            yield from loader


def resnet() -> Training:
    from hora.torch.optim import decay_groups
    from hora.workloads.resnet.config import SMALL
    from hora.workloads.resnet.model import ResNet

    model = ResNet(SMALL)
    groups = [
        {key: value for key, value in group.items() if key != "trust"}
        for group in decay_groups(model, weight_decay=4e-4)
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, fused=True)
    optimizer = hora.DistributedOptimizer(optimizer, model)
    hora.broadcast_parameters(model)
    generator = torch.Generator().manual_seed(hora.rank())
    images = torch.randn(2048, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (2048,), generator=generator)

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    return Training(loss, optimizer, TensorDataset(images, labels), 32)


def tiny() -> Training:
    """The transformer on so few tokens that a step is mostly overhead: the worst case for the guard."""
    return transformer(batch=8, tokens=32)


def transformer(*, batch: int = 16, tokens: int = 64) -> Training:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(1000, 128),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(128, 1000),
    )
    optimizer = hora.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    hora.broadcast_parameters(model)
    generator = torch.Generator().manual_seed(hora.rank())
    text = torch.randint(1000, (64 * batch, tokens + 1), generator=generator)

    def loss(text: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return Training(loss, optimizer, TensorDataset(text), batch)


if __name__ == "__main__":
    raise SystemExit(main())
