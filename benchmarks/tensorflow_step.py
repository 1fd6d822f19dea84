"""One training step of a small convolutional network with TensorFlow: Hora against
MultiWorkerMirroredStrategy.

    python benchmarks/tensorflow_step.py [--rounds 15] [--ranks 2]

Both contenders are jobs of their own and train the same Keras 3 model on the same batches with Adam, in a
loop of their own: Keras 3 has no ``fit`` that works with the strategy. They take turns, burst by burst.
"strategy" is ``strategy.run`` inside a ``tf.function``; "Hora" is ``DistributedGradientTape`` inside one,
under ``hora run`` with the guard. The time is that of the slowest rank. Beside it stands the processor time
of all ranks: on a machine that does other things as well, whoever has more threads gets a larger share of
it, and the time says less than on one that does not.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _interleave import Report, arguments, interleave, long_table
from _jobs import Driver, Handler, Job, JobError, Message, Run, bursts, serve

CONTENDERS = ("strategy", "Hora")
BATCHES = (64, 16)
"""Photos per rank and step: as in ``jax_step.py``, and for two ranks the 32 in all that Keras takes when it
is told nothing. The less a rank computes, the more the exchange counts."""

STEPS = 20
"""Of a burst."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=120.0, help="rounds end early after this")
    parser.add_argument("--rank-of", choices=CONTENDERS, help="be a rank: what the benchmark starts itself")
    given = parser.parse_args()
    if given.rank_of:
        serve(lambda: rank_of(given.rank_of), rank=int(os.environ["HORA_RANK"]))
        return 0
    report = Report("tensorflow_step", base="strategy")
    with Driver() as driver:
        jobs: dict[str, Job] = {}
        for name in CONTENDERS:
            try:
                jobs[name] = start(driver, name, given.ranks)
            except JobError as error:
                report.leave_out(name, str(error), failed=True)
        for size in BATCHES:
            for job in jobs.values():
                job.ask({"prepare": {"batch": size}})
                job.burst("step", calls=STEPS)
            measures = {name: functools.partial(both_times, job) for name, job in jobs.items()}
            found = interleave(measures, given.rounds, seconds=given.seconds / len(BATCHES))
            for which, what in enumerate(("time", "processor time")):
                case: dict[str, str | int] = {"batch": size, "ranks": given.ranks, "a step's": what}
                values = {name: [each[which] for each in of] for name, of in found.items()}
                report.add(case, values)
    print(long_table(report.rows), flush=True)
    return report.finish(given.json)


def both_times(job: Job) -> tuple[float, float]:
    """Seconds of a step of the slowest rank, and seconds that all ranks together compute for one."""
    before = processor_time(job)
    seconds = job.burst("step", calls=STEPS)
    return seconds, (processor_time(job) - before) / (STEPS + 1)  # the first is not timed


def processor_time(job: Job) -> float:
    return sum(float(answer["seconds"]) for answer in job.ask({"processor": {}}))


def start(driver: Driver, name: str, ranks: int) -> Job:
    """The job of a contender; the launcher starts both, and the guard looks at Hora's."""
    guard = "on" if name == "Hora" else "off"
    run = [sys.executable, "-m", "hora.cli", "run", "-n", str(ranks), "--guard", guard]
    folder = str(Path(os.environ.get("TMPDIR", "/tmp")) / f"tensorflow-step-{os.getpid()}-{guard}")
    os.environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return driver.command(name, ranks, [*run, "--run-dir", folder, __file__, "--rank-of", name])


def rank_of(name: str) -> Handler:
    """A rank of a contender."""
    make, barrier = with_strategy() if name == "strategy" else with_hora()
    handle = bursts(lambda order: {"step": make(order["batch"])}, barrier)

    def handler(order: Message) -> Message:
        return {"seconds": time.process_time()} if "processor" in order else handle(order)

    return handler


def with_hora() -> tuple[Callable[[int], Run], Run]:
    import tensorflow as tf

    import hora.tensorflow as hora

    hora.init()
    model, optimizer, loss_of = training()
    hora.broadcast_variables(model.variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        with hora.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def make(size: int) -> Run:
        x, y = map(tf.constant, batch(hora.rank(), size))
        return lambda: float(step(x, y))

    return make, hora.barrier


def with_strategy() -> tuple[Callable[[int], Run], Run]:
    import tensorflow as tf

    rank, size = int(os.environ["HORA_RANK"]), int(os.environ["HORA_SIZE"])
    first = int(os.environ["MASTER_PORT"])
    workers = [f"127.0.0.1:{first + 1 + number}" for number in range(size)]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(task)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer, loss_of = training()
        optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any, y: Any) -> Any:
        def own(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True)) / size
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.run(own, args=(x, y))

    @tf.function  # type: ignore[untyped-decorator]
    def meet() -> Any:
        def sum_of_ones() -> Any:
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))

        return strategy.run(sum_of_ones)

    def make(size: int) -> Run:
        x, y = map(tf.constant, batch(rank, size))
        return lambda: float(step(x, y))

    return make, lambda: float(meet())


def training() -> tuple[Any, Any, Any]:
    """Two convolutions, two dense layers, each with a bias: 0.43 million numbers in 8 variables."""
    import tensorflow as tf

    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    model = tf.keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(64, 3, 2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum_over_batch_size")
    return model, tf.keras.optimizers.Adam(1e-3), loss_of


def batch(rank: int, size: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(rank)
    return draw.normal(size=(size, 28, 28, 1)).astype(np.float32), draw.integers(0, 10, size)


if __name__ == "__main__":
    sys.exit(main())
