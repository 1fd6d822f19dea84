"""The parts that `make bench` consists of: each is one call of one benchmark, and writes one file."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

STATES = "parts.json"
"""The file of the results that says how each part ended."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of a benchmark.

    Attributes:
        name: of its file, without the ending.
        title: what it measures.
        benchmark: the file in this folder.
        words: its arguments when all is measured.
        quick: its arguments when it only has to be seen that all works, and roughly how fast.
        limit: seconds after which it is stopped, some three times what it takes on two idle cores.
        quick_limit: the same for the quick way; all of them and the end take less than ten minutes.
    """

    name: str
    title: str
    benchmark: str
    words: str = ""
    quick: str
    limit: float
    quick_limit: float

    def command(self, *, quick: bool, results: Path) -> list[str]:
        """Behind the name of the interpreter."""
        words = self.quick if quick else self.words
        return [f"benchmarks/{self.benchmark}.py", *shlex.split(words), "--json", str(self.file(results))]

    def file(self, results: Path) -> Path:
        return results / f"{self.name}.json"


PARTS = (
    Part(
        name="collectives",
        title="Collectives of 2 ranks",
        benchmark="collectives",
        quick="--rounds 3 --seconds 1.5 --sizes 4 1KiB 64KiB 1MiB 4MiB 16MiB 100MB",
        limit=600,
        quick_limit=80,
    ),
    Part(
        name="train_vs_peers",
        title="Training steps and memory of 2 ranks",
        benchmark="train_vs_peers",
        quick="--models transformer resnet --rounds 3 --seconds 8 --contenders 'one worker' "
        "Hora 'Hora, sharded' DDP 'DDP + ZeRO' FSDP2 Accelerate Horovod",
        limit=1500,
        quick_limit=220,
    ),
    Part(
        name="guard_cost",
        title="What the guard costs",
        benchmark="guard_cost",
        quick="--models resnet transformer --seconds 4",
        limit=600,
        quick_limit=120,
    ),
    Part(
        name="collectives-more-ranks",
        title="Collectives of 4 and 8 ranks",
        benchmark="collectives",
        words="--ranks 4 8 --sizes 4 1KiB 64KiB 1MiB 16MiB 64MiB",
        quick="--ranks 4 8 --rounds 3 --seconds 1.5 --sizes 4 64KiB 1MiB 16MiB",
        limit=600,
        quick_limit=90,
    ),
    Part(
        name="scaling",
        title="Growth with ranks and with parameters",
        benchmark="scaling",
        quick="--rounds 3 --seconds 2 --parameters 100000 1000000 5000000",
        limit=900,
        quick_limit=100,
    ),
    Part(
        name="start_up",
        title="Start-up and its memory",
        benchmark="start_up",
        quick="--rounds 1",
        limit=400,
        quick_limit=90,
    ),
    Part(
        name="train_vs_peers-4-ranks",
        title="Memory of 4 ranks",
        benchmark="train_vs_peers",
        words="--ranks 4 --models transformer --rounds 5 --contenders Hora 'Hora, sharded' "
        "DDP 'DDP + ZeRO' FSDP2",
        quick="--ranks 4 --models embedding --rounds 3 --seconds 3 --contenders Hora 'Hora, sharded' DDP",
        limit=600,
        quick_limit=60,
    ),
    Part(
        name="collectives-others",
        title="Other collectives of 2 ranks",
        benchmark="collectives",
        words="--collectives reduce-scatter all-gather broadcast all-to-all --sizes 4 64KiB 1MiB 16MiB 100MB",
        quick="--collectives reduce-scatter all-gather broadcast all-to-all --rounds 3 --seconds 1 "
        "--sizes 64KiB 16MiB",
        limit=600,
        quick_limit=60,
    ),
    Part(
        name="resnet_speed",
        title="What makes one worker fast on ResNet",
        benchmark="resnet_speed",
        quick="--rounds 3 --micro-batch 16",
        limit=300,
        quick_limit=60,
    ),
    Part(
        name="horovod_overhead",
        title="What matching by name costs",
        benchmark="horovod_overhead",
        quick="--rounds 5",
        limit=200,
        quick_limit=40,
    ),
    Part(
        name="guard_judge",
        title="How fast the guard judges",
        benchmark="guard_judge",
        quick="--sizes 64 256 --rounds 3",
        limit=400,
        quick_limit=60,
    ),
)
