"""One training step of a small convolutional network with JAX: Hora against shard_map and psum written by
hand.

    python benchmarks/jax_step.py [--rounds 15] [--ranks 2]

Both contenders are jobs of their own and train the same network on the same batches with Adam; they take
turns, burst by burst. "by hand" calls ``jax.distributed.initialize``, puts its arrays on the mesh once and
averages its gradients by ``lax.pmean``. "Hora" is ``hora.spmd`` with ``DistributedOptimizer``, under ``hora
run`` with the guard, and gets NumPy arrays as its loader gives them; so does "by hand". The time is that of
the slowest rank.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _interleave import Report, arguments, interleave, long_table
from _jobs import Driver, Handler, Job, JobError, Message, Run, bursts, serve

CONTENDERS = ("by hand", "Hora")
BATCH = 64
"""Photos per rank and step."""

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
    report = Report("jax_step", base="by hand")
    with Driver() as driver:
        measures: dict[str, Callable[[], float]] = {}
        for name in CONTENDERS:
            try:
                job = start(driver, name, given.ranks)
            except JobError as error:
                report.leave_out(name, str(error), failed=True)
                continue
            job.ask({"prepare": {}})
            job.burst("step", calls=STEPS)
            measures[name] = functools.partial(job.burst, "step", calls=STEPS)
        case: dict[str, str | int] = {"step of": "a small CNN", "ranks": given.ranks}
        report.add(case, interleave(measures, given.rounds, seconds=given.seconds))
    print(long_table(report.rows), flush=True)
    return report.finish(given.json)


def start(driver: Driver, name: str, ranks: int) -> Job:
    """The job of a contender; the launcher starts both, and the guard looks at Hora's."""
    guard = "on" if name == "Hora" else "off"
    run = [sys.executable, "-m", "hora.cli", "run", "-n", str(ranks), "--guard", guard]
    folder = str(Path(os.environ.get("TMPDIR", "/tmp")) / f"jax-step-{os.getpid()}-{guard}")
    os.environ["OMP_NUM_THREADS"] = "1"
    return driver.command(name, ranks, [*run, "--run-dir", folder, __file__, "--rank-of", name])


def rank_of(name: str) -> Handler:
    """A rank of a contender."""
    step, barrier = by_hand() if name == "by hand" else with_hora()

    def prepare(_: Message) -> dict[str, Run]:
        return {"step": step}

    return bursts(prepare, barrier)


def with_hora() -> tuple[Run, Run]:
    import jax
    import optax

    import hora.jax as hora

    hora.init()
    optimizer = hora.DistributedOptimizer(optax.adam(1e-3))
    params = hora.broadcast_parameters(parameters())

    def own(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hora.allreduce(loss)

    step = hora.spmd(own, split=("x", "y"), donate=(0, 1))
    held = [params, optimizer.init(params)]
    x, y = batch(hora.rank())

    def run() -> None:
        held[0], held[1], loss = step(held[0], held[1], x, y)
        float(loss)

    return run, hora.barrier


def by_hand() -> tuple[Run, Run]:
    import jax
    import optax
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    rank, size = int(os.environ["HORA_RANK"]), int(os.environ["HORA_SIZE"])
    jax.distributed.initialize(f"127.0.0.1:{_port()}", size, rank, cluster_detection_method="deactivate")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, same = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    optimizer = optax.adam(1e-3)

    def own(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        gradients = lax.pmean(gradients, "data")
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, "data")

    step = jax.jit(
        jax.shard_map(
            own, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P(), check_vma=False
        ),
        donate_argnums=(0, 1),
    )

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(same, np.asarray(leaf)), tree)

    params = parameters()
    held = [everywhere(params), everywhere(optimizer.init(params))]
    x, y = batch(rank)

    def run() -> None:
        placed = [jax.make_array_from_process_local_data(rows, array) for array in (x, y)]
        held[0], held[1], loss = step(held[0], held[1], *placed)
        float(loss)

    return run, lambda: multihost_utils.sync_global_devices("burst")


def parameters() -> dict[str, Any]:
    """Of the network: two convolutions, two dense layers, each with a bias: 0.43 million numbers in 8
    arrays.
    """
    draw = np.random.default_rng(0)
    shapes = {
        "conv1": (3, 3, 1, 32),
        "conv2": (3, 3, 32, 64),
        "dense1": (7 * 7 * 64, 128),
        "dense2": (128, 10),
    }
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        found[name] = {
            "w": (scale * draw.normal(size=shape)).astype(np.float32),
            "b": np.zeros(shape[-1], np.float32),
        }
    return found


def loss_of(params: Any, x: Any, y: Any) -> Any:
    import jax
    import optax

    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[name]["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[name]["b"])
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense1"]["w"] + params["dense1"]["b"])
    logits = x @ params["dense2"]["w"] + params["dense2"]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batch(rank: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(rank)
    return draw.normal(size=(BATCH, 28, 28, 1)).astype(np.float32), draw.integers(0, 10, BATCH)


def _port() -> int:
    """A port that the ranks agree on: the launcher's, and one more."""
    return int(os.environ["MASTER_PORT"])


if __name__ == "__main__":
    sys.exit(main())
