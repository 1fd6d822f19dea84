"""Do the ranks train on different samples, with different noise, in a new order each epoch?

The verdicts ``same-data``, ``same-noise`` and ``same-order``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Data"]

STEPS = 3
"""Steps in a row, from the first, in which the same data is no chance."""

NOISE_STEPS = 2
"""Steps with the same noise that are no chance."""


SEEDS = {"torch": "torch.manual_seed", "numpy": "numpy.random.seed", "random": "random.seed"}
"""What seeds a generator."""

KINDS = {"torch": "torch's", "numpy": "numpy's", "random": "Python's", "own": "the data set's own"}
"""Whose random numbers a data set draws."""


@dataclass
class _Group:
    """One optimizer's first steps on all ranks."""

    key: str
    members: list[int]
    where: str | None
    reports: dict[int, dict[int, Mapping[str, Any]]] = field(default_factory=dict)
    seen: int = 0
    alike: list[set[int]] | None = None
    """Sets of ranks that were fed the same in all steps so far."""
    inputs: dict[int, set[str]] = field(default_factory=dict)
    like: bool = True
    """Whether ranks that were fed the same had the same gradients, as far as each step showed them."""
    noisy: int = 0
    drawn: str = ""
    whose: str | None = None
    """Whose generators the model draws from, if not the framework's global one."""
    generator: str = "torch"
    """Whose random numbers those drawn while loading are."""
    done: bool = False


class Data:
    """Compares what the ranks were fed."""

    kinds = frozenset({"fed", "order", "noise"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._groups: dict[str, _Group] = {}

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        if record["kind"] == "order":
            self._tell_order(record)
            return
        if record["kind"] == "noise":
            self._tell_repeated(record)
            return
        members = [int(member) for member in record["members"]]
        if len(members) < 2:
            return
        key = str(record["key"])
        group = self._groups.setdefault(key, _Group(key, members, record["where"]))
        if group.done:
            return
        group.reports.setdefault(int(record["step"]), {})[rank] = record
        self._advance(str(record["key"]), group)

    def ended(self, rank: int) -> None:
        return

    def tick(self, now: float) -> None:
        gone = self._judge.gone | self._judge.dead
        for key, group in self._groups.items():
            if not group.done and group.seen and all(member in gone for member in group.members):
                self._decide(key, group)
                group.done = True

    def _advance(self, key: str, group: _Group) -> None:
        while not group.done:
            reports = group.reports.get(group.seen + 1)
            if reports is None or any(member not in reports for member in group.members):
                return
            del group.reports[group.seen + 1]
            group.seen += 1
            self._compare(group, reports)
            if group.seen >= STEPS:
                self._decide(key, group)

    def _compare(self, group: _Group, reports: Mapping[int, Mapping[str, Any]]) -> None:
        fed = {rank: record["inputs"] or record["local"] for rank, record in reports.items()}
        for rank, record in reports.items():
            if record["inputs"]:
                group.inputs.setdefault(rank, set()).add(record["inputs"])
        if any(fed.values()):
            before = group.alike if group.alike is not None else [set(group.members)]
            group.alike = [
                part for known in before for part in _parts({rank: fed[rank] for rank in known if fed[rank]})
            ]
            for part in group.alike:
                local = {reports[rank]["local"] for rank in part}
                group.like &= len(local) == 1 and None not in local
        different = len({value for value in fed.values() if value}) > 1
        if different:
            self._compare_noise(group, list(reports.values()))

    def _compare_noise(self, group: _Group, reports: Sequence[Mapping[str, Any]]) -> None:
        for what in ("states", "noise"):
            drawn = {record[what] for record in reports}
            if len(drawn) == 1 and None not in drawn:
                group.noisy += 1
                group.drawn = group.drawn or what
                group.whose = reports[0].get("generator")
                return
        for kind, state in reports[0]["fetched"].items():
            if all(record["fetched"].get(kind) == state for record in reports):
                group.noisy += 1
                group.drawn = group.drawn or "fetched"
                group.generator = kind
                return

    def _decide(self, key: str, group: _Group) -> None:
        if not self._judge.replicas.is_one_training(key, steps=group.seen):
            return
        # Constant inputs tell nothing: the samples may be drawn inside the model.
        constant = bool(group.inputs) and all(len(inputs) == 1 for inputs in group.inputs.values())
        if group.alike and (group.like if constant and group.seen > 1 else True):
            group.done = True
            self._tell_data(group, sorted(group.alike, key=len)[-1])
        elif group.noisy >= NOISE_STEPS:
            group.done = True
            self._tell_noise(group)

    def _tell_data(self, group: _Group, ranks: Iterable[int]) -> None:
        from hora.guard.judge import ranks_text

        same = sorted(ranks)
        how = (
            "their models were fed the same"
            if group.inputs
            else "their own gradients are equal to the last bit"
        )
        span = "step 1" if group.seen == 1 else f"each of steps 1 to {group.seen}"
        self._judge.find(
            Verdict(
                kind="same-data",
                text=f"{ranks_text(same).capitalize()} train on the same samples: in {span} {how}. So they "
                "repeat each "
                "other's work, and an epoch goes through the data once per rank.",
                advice="Write loader = hora.data_loader(dataset, global_batch=...), which gives each rank "
                "its own part; "
                "or give torch's DataLoader a DistributedSampler; or let a stream skip to every size()-th "
                "sample, "
                "starting at rank().",
                ranks=same,
                where=group.where,
                step=group.seen,
            ),
            key=("same-data",),
        )

    def _tell_noise(self, group: _Group) -> None:
        what = {
            "states": "the model's random numbers (dropout, say) started from the same state of the "
            "generator on "
            "all ranks",
            "noise": "all ranks drew the same random tensors",
            "fetched": "the random numbers drawn while samples were loaded started from the same state on "
            "all ranks",
        }[group.drawn]
        self._judge.find(
            Verdict(
                kind="same-noise",
                text=f"Ranks draw the same random noise for different samples: in {group.noisy} of the first "
                f"{group.seen} steps {what}. The ranks' noise then does not average out as it does on one "
                "worker.",
                advice=_seed_advice(group.whose or group.generator),
                ranks=group.members,
                where=group.where,
                step=group.seen,
            ),
            key=("same-noise",),
        )

    def _tell_repeated(self, record: Mapping[str, Any]) -> None:
        whose = KINDS[str(record["generator"]).rpartition(" ")[2]]
        text = {
            "workers": "The loader workers of a rank draw the same random numbers for different samples: "
            f"{whose} random generator starts from the same state in each of them.",
            "epochs": f"The loader workers draw the same random numbers in each epoch: {whose} random "
            "generator starts from the same state whenever they are started, though the samples come in a "
            "new order.",
        }[record["how"]]
        self._judge.find(
            Verdict(
                kind="same-noise",
                text=text,
                advice=_seed_advice(record["generator"]),
                ranks=list(range(self._judge.size)),
                where=record["where"],
                step=int(record["step"]),
            ),
            key=("same-noise",),
        )

    def _tell_order(self, record: Mapping[str, Any]) -> None:
        text, advice = {
            "set_epoch": (
                f"Every epoch goes through the samples in the same order: the {record['what']} was not "
                "told that a "
                "new epoch has begun.",
                "Write sampler.set_epoch(epoch) at the start of each epoch; or use hora.data_loader, which "
                "counts its "
                "epochs itself.",
            ),
            "generator": (
                f"Every epoch goes through the samples in the same order, though a {record['what']} "
                "shuffles them: its "
                "random generator is set back before each epoch.",
                "Seed once, before the first epoch; or use hora.data_loader(dataset, global_batch=..., "
                "seed=...).",
            ),
            "loader": (
                "Every epoch goes through the samples in the same order: each has a new data loader with "
                "the same "
                "seed, which begins with its epoch 0.",
                "Make the loader once, before the first epoch; it counts its epochs itself.",
            ),
            "permutation": (
                "Every epoch goes through the samples in the same order: this line draws the same "
                "permutation each time, "
                "since its random generator is set back before.",
                "Seed once, before the first epoch, or with seed + epoch.",
            ),
        }[record["how"]]
        self._judge.find(
            Verdict(
                kind="same-order",
                text=text,
                advice=advice,
                ranks=list(range(self._judge.size)),
                where=record["where"],
                step=int(record["step"]),
            ),
            key=("same-order",),
        )


def _seed_advice(generator: str) -> str:
    """What to do about a generator that several draw from in the same state."""
    place, _, kind = generator.rpartition(" ")
    if kind == "keras":
        return (
            "Write keras.utils.set_random_seed(seed + hora.rank()) before the model is built, and let "
            "hora.callbacks.BroadcastGlobalVariablesCallback() give all ranks the weights of one."
        )
    if kind == "own":
        return (
            "The data set keeps a random generator of its own, and each rank and loader worker has a copy. "
            "Draw from torch's or numpy's global one, or seed it from torch.initial_seed() in each worker "
            "(worker_init_fn), with torch.manual_seed(seed + hora.rank()) in the script."
        )
    if place:
        return (
            "Write torch.manual_seed(seed + hora.rank()) before the loop: each epoch, torch draws from it "
            "what seeds the generators of its loader workers, numpy's and Python's too. A worker_init_fn "
            "that seeds them itself must do so from torch.initial_seed()."
        )
    return (
        "Seed alike only while the model is built, and after that differently: "
        f"{SEEDS.get(kind, SEEDS['torch'])}(seed + hora.rank())."
    )


def _parts(values: Mapping[int, str]) -> Sequence[set[int]]:
    """Sets of two or more ranks with the same value."""
    classes: dict[str, set[int]] = {}
    for rank, value in values.items():
        classes.setdefault(value, set()).add(rank)
    return [ranks for ranks in classes.values() if len(ranks) > 1]
