"""What each rank of a test job does: ``hora run -n 2 tests/keras/job.py``. Cases assert on every rank."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# As if the other frameworks were not installed: nothing may need them.
for other in {"torch", "tensorflow", "jax"} - {os.environ["KERAS_BACKEND"]}:
    sys.modules[other] = None  # type: ignore[assignment]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import hora.keras as hora  # noqa: E402
from hora.core.errors import CollectiveError, GlobalBatchError, GradientError, UsageError  # noqa: E402
from hora.keras._metrics import average  # noqa: E402
from hora.keras._optimizer import Distributed  # noqa: E402

T = TypeVar("T")
BACKEND = keras.backend.backend()
PLAIN = {"jit_compile": BACKEND == "jax"}
"""How plain models are compiled: TensorFlow's would go through XLA for a few seconds each."""
RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 8)).astype("float32")
Y = (X @ RNG.normal(size=(8, 1)) + 0.1 * RNG.normal(size=(48, 1))).astype("float32")
GLOBAL = 12


def network(seed: int = 0, *, built: bool = True) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers] if built else layers)


def weights(model: keras.Model) -> np.ndarray:
    parts = [np.ravel(keras.ops.convert_to_numpy(each.value)) for each in model.trainable_variables]
    return np.concatenate(parts)


def same_everywhere(array: np.ndarray) -> bool:
    """Whether it is the same on all ranks, bit by bit."""
    return len({each.tobytes() for each in hora.allgather_object(np.asarray(array))}) == 1


def share(rows: int = 48) -> np.ndarray:
    """Rows of this rank, so that batches of GLOBAL / size in order are its part of the global batches."""
    per = GLOBAL // hora.size()
    starts = range(hora.rank() * per, rows, GLOBAL)
    return np.concatenate([np.arange(start, start + per) for start in starts])


def once(call: Callable[[], T]) -> T:
    """What one worker would find, by plain Keras: rank 0 computes it, and tells the others."""
    return hora.broadcast_object(call() if hora.rank() == 0 else None)


def alone(optimizer: keras.optimizers.Optimizer) -> tuple[np.ndarray, dict]:
    """The weights and the history of the same training by plain Keras, on the whole batches."""

    def train() -> tuple[np.ndarray, dict]:
        model = network(seed=0)
        model.compile(optimizer, "mse", metrics=["mae"], **PLAIN)
        history = model.fit(X, Y, batch_size=GLOBAL, epochs=3, shuffle=False, verbose=0)
        return weights(model), history.history

    return once(train)


def together(optimizer: keras.optimizers.Optimizer, *more: object, built: bool = True, **compiled: object):
    """The training on all ranks, which begin with their own weights: only rank 0 has those of ``alone``."""
    model = network(seed=hora.rank(), built=built)
    model.compile(optimizer, "mse", **{"metrics": ["mae"]} | compiled)
    calls = [
        hora.callbacks.BroadcastGlobalVariablesCallback(0),
        hora.callbacks.MetricAverageCallback(),
        *more,
    ]
    rows = share()
    history = model.fit(
        X[rows],
        Y[rows],
        batch_size=GLOBAL // hora.size(),
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=calls,
    )
    return model, history.history


@functools.cache
def reference() -> np.ndarray:
    """The weights of one worker after its training by plain SGD."""
    return alone(keras.optimizers.SGD(0.05))[0]


def case_fit_is_that_of_one_worker() -> None:
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
        "adam": lambda: keras.optimizers.Adam(0.01),
    }
    for name, call in made.items():
        plain, expected = alone(call())
        model, history = together(hora.DistributedOptimizer(call()))
        assert same_everywhere(weights(model)), name
        np.testing.assert_allclose(weights(model), plain, rtol=0, atol=1e-6, err_msg=name)
        for key in ("loss", "mae"):
            np.testing.assert_allclose(history[key], expected[key], rtol=1e-5, err_msg=f"{name} {key}")


def case_a_model_without_an_input_shape_is_built_before_its_first_step() -> None:
    model, _ = together(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), built=False)
    np.testing.assert_allclose(weights(model), reference(), rtol=0, atol=1e-6)


def case_accumulated_batches_make_one_step() -> None:
    # Two batches of 12 whose gradients make a mean are one of 24; their sum is as a rate twice as large.
    def train() -> np.ndarray:
        model = network()
        model.compile(keras.optimizers.SGD(0.05), "mse", **PLAIN)
        model.fit(X, Y, batch_size=2 * GLOBAL, epochs=3, shuffle=False, verbose=0)
        return weights(model)

    expected = once(train)
    for rate, averaged in ((0.05, True), (0.025, False))[BACKEND != "torch" :]:
        optimizer = hora.DistributedOptimizer(
            keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=averaged
        )
        model, _ = together(optimizer)
        assert same_everywhere(weights(model))
        np.testing.assert_allclose(weights(model), expected, rtol=0, atol=1e-6)
        assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 6
    with_error(
        GradientError,
        lambda: hora.DistributedOptimizer("adam", backward_passes_per_step=0),
        "backward_passes_per_step=0",
    )


def case_sums_factors_and_compression() -> None:
    summed = hora.DistributedOptimizer(keras.optimizers.SGD(0.05 / hora.size()), op=hora.Sum)
    short = hora.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=hora.Compression.fp16, gradient_predivide_factor=4.0
    )
    for optimizer, tolerance in ((summed, 1e-6), (short, 3e-3)):
        model, _ = together(optimizer)
        assert same_everywhere(weights(model))
        np.testing.assert_allclose(weights(model), reference(), rtol=0, atol=tolerance)


def case_an_embedding() -> None:
    rows = np.arange(48).reshape(48, 1) % 7

    def made(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((1,)), *layers])

    # On TensorFlow Keras squares the parts of a row for Adam before it adds them, so whole tensors give other
    # steps there; for SGD it does not matter.
    for kind, dense in ((keras.optimizers.Adam, False), (keras.optimizers.SGD, True))[
        : 1 + (BACKEND != "jax")
    ]:

        def train(optimizer: keras.optimizers.Optimizer) -> np.ndarray:
            model = made(0)
            model.compile(optimizer, "mse", **PLAIN)
            model.fit(rows, Y, batch_size=GLOBAL, epochs=2, shuffle=False, verbose=0)
            return weights(model)

        expected = once(functools.partial(train, kind(0.01)))
        model = made(hora.rank())
        model.compile(hora.DistributedOptimizer(kind(0.01), sparse_as_dense=dense), "mse")
        mine = share()
        model.fit(
            rows[mine], Y[mine], batch_size=GLOBAL // hora.size(), epochs=2, shuffle=False, verbose=0,
            callbacks=[hora.callbacks.BroadcastGlobalVariablesCallback()],
        )  # fmt: skip
        assert same_everywhere(weights(model))
        np.testing.assert_allclose(weights(model), expected, rtol=0, atol=1e-6)


def case_a_process_set_trains_by_itself() -> None:
    if hora.size() < 3:
        return
    pair = hora.ProcessSet([0, 1])
    hora.add_process_set(pair)
    model = network()
    model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05), process_set=pair), "mse")
    model.fit(X[share()], Y[share()], batch_size=4, epochs=1, shuffle=False, verbose=0)
    first, second, third = hora.allgather_object(weights(model))
    assert first.tobytes() == second.tobytes()
    assert np.abs(first - third).max() > 1e-5
    hora.remove_process_set(pair)


def case_all_ranks_skip_a_step_when_one_overflows() -> None:
    made = hora.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=4.0)
    )
    model = network()
    model.compile(made, "mse", auto_scale_loss=False)
    before = weights(model)
    x = X[share(12)].copy()
    if hora.rank() == 1:
        x[0] = np.inf
    model.fit(x, Y[share(12)], batch_size=len(x), epochs=1, shuffle=False, verbose=0)
    np.testing.assert_array_equal(weights(model), before)
    assert float(keras.ops.convert_to_numpy(made.dynamic_scale)) == 2.0
    model.fit(X[share(12)], Y[share(12)], batch_size=len(x), epochs=1, shuffle=False, verbose=0)
    assert np.abs(weights(model) - before).max() > 1e-5
    assert same_everywhere(weights(model))
    with_error(
        UsageError,
        lambda: hora.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)))
        ),
        "inside LossScaleOptimizer",
    )


def case_compile_scales_the_loss_of_a_half_precision_model() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
    finally:
        keras.config.set_dtype_policy("float32")
    inner = keras.optimizers.SGD(0.05)
    model.compile(hora.DistributedOptimizer(inner), "mse")
    before = weights(model)
    x = X[share(12)].copy()
    if hora.rank() == 1:
        x[0] = np.inf
    for data in (x, X[share(12)], X[share(12)]):
        model.fit(data, Y[share(12)], batch_size=len(x), epochs=1, shuffle=False, verbose=0)
        assert same_everywhere(weights(model))
    assert isinstance(model.optimizer, Distributed)
    assert not isinstance(inner, Distributed)
    assert np.abs(weights(model) - before).max() > 1e-5


def case_some_layers_stay_on_their_rank() -> None:
    model = network()
    layer = model.layers[-1]
    optimizer = hora.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=layer)
    model.compile(optimizer, "mse")
    calls = [hora.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layer.variables)]
    model.fit(X[share(12)], Y[share(12)], batch_size=48, epochs=1, shuffle=False, verbose=0, callbacks=calls)
    shared, own = (np.ravel(keras.ops.convert_to_numpy(each.kernel.value)) for each in model.layers)
    assert same_everywhere(shared)
    assert not same_everywhere(own)


def case_metrics_are_those_of_all_samples() -> None:
    labels, x = (Y > 0).astype("float32"), X / 4 + 0.5
    model = network()
    optimizer = hora.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=[keras.metrics.Precision(thresholds=0.4, name="precision")])
    whole = model.evaluate(x, labels, batch_size=GLOBAL, verbose=0, return_dict=True)
    expected = model.evaluate(x[:43], labels[:43], batch_size=GLOBAL, verbose=0, return_dict=True)
    part = hora.data_loader(x[:43], labels[:43], global_batch=GLOBAL, shuffle=False, tail="uneven")
    found = hora.evaluate(model, part, verbose=0)
    # fit gives them by the callback, also where the shares are uneven: no mean of ranks is right there.
    rows = share()
    history = model.fit(
        x[rows],
        labels[rows],
        batch_size=GLOBAL // hora.size(),
        shuffle=False,
        verbose=0,
        validation_data=part,
        callbacks=[hora.callbacks.MetricAverageCallback()],
    ).history
    assert set(found) == set(expected) == {"loss", "precision"}
    for name in expected:
        assert abs(found[name] - expected[name]) < 1e-6, name
        assert abs(history[f"val_{name}"][0] - expected[name]) < 1e-6, name
        assert abs(history[name][0] - whole[name]) < 1e-6, name
    assert average({"rank": float(hora.rank())}) == {"rank": (hora.size() - 1) / 2}


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def case_learning_rates_are_those_on_paper() -> None:
    size, rates = hora.size(), Rates()
    warm = hora.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    later = hora.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch, start_epoch=2)
    _, history = together(hora.DistributedOptimizer(keras.optimizers.SGD(0.4)), warm, later, rates)
    # 4 batches in each of 3 epochs: from 0.4 / size, in 8 equal parts, to 0.4; then 0.4 / 4.
    expected = [0.4 / size * (1 + (size - 1) * (done + 1) / 8) for done in range(8)] + [0.1] * 4
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [expected[3], 0.4, 0.1], rtol=1e-6)
    model = network()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.momentums[0].assign(np.ones((8, 16)))
    for start, end, rate, momentum in ((1, None, 0.1, 1.0), (0, 1, 0.3, 3.0), (0, 0, 0.3, 3.0)):
        callback = hora.callbacks.LearningRateScheduleCallback(0.2, 1.5, start_epoch=start, end_epoch=end)
        callback.set_model(model)
        callback.on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        now = keras.ops.convert_to_numpy(model.optimizer.momentums[0].value)
        np.testing.assert_allclose(now, momentum, rtol=1e-6)
        reached = keras.ops.convert_to_numpy(model.optimizer.learning_rate)
        np.testing.assert_allclose(reached, rate, rtol=1e-6)


def case_saved_models_go_on() -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"hora-keras-{hora.rank()}-"))
    try:
        model, _ = together(hora.DistributedOptimizer(keras.optimizers.Adam(0.01)))
        model.save(folder / "model.keras")
        plain = keras.models.load_model(folder / "model.keras")
        assert not isinstance(plain.optimizer, Distributed)
        assert type(plain.optimizer).__name__ == "Adam"
        again = hora.load_model(folder / "model.keras")
        assert isinstance(again.optimizer, Distributed)
        for loaded in (plain, again):
            assert int(keras.ops.convert_to_numpy(loaded.optimizer.iterations)) == 12
        for mine, theirs in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
            one, other = (keras.ops.convert_to_numpy(each.value) for each in (mine, theirs))
            np.testing.assert_array_equal(one, other)
        # Rank 0 alone reads the file: the others begin anew, and are given all of it.
        if hora.rank() > 0:
            again = network(seed=hora.rank())
            again.compile(hora.DistributedOptimizer(keras.optimizers.Adam(0.5)), "mse", metrics=["mae"])
        rows = share()
        for each, calls in ((model, []), (again, [hora.callbacks.BroadcastGlobalVariablesCallback(0)])):
            each.fit(
                X[rows], Y[rows], batch_size=GLOBAL // hora.size(), shuffle=False, verbose=0, callbacks=calls
            )
        np.testing.assert_array_equal(weights(again), weights(model))
        copy = model.optimizer.from_config(model.optimizer.get_config())
        assert isinstance(copy, Distributed)
        assert copy.get_config() == model.optimizer.get_config()
        assert isinstance(model.optimizer, keras.optimizers.Adam)
        with_error(UsageError, lambda: hora.DistributedOptimizer(model.optimizer), "is distributed already")

        path = folder / "best.keras"
        best = hora.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
        model.fit(X[rows], Y[rows], batch_size=GLOBAL // hora.size(), shuffle=False, verbose=0,
                  callbacks=[hora.callbacks.MetricAverageCallback(), best])  # fmt: skip
        assert path.exists() == (hora.rank() == 0)
    finally:
        shutil.rmtree(folder)


def case_a_state_is_committed_and_restored() -> None:
    x, y = X[:24], Y[:24]
    data = hora.data_loader(x, y, global_batch=GLOBAL, seed=3)
    model = network()
    model.compile(hora.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hora.elastic.KerasState(model, loader=data, batch=0, epoch=0)
    seen: list[tuple[int, int, int]] = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            seen.append((state.epoch, state.batch, state._commits))

    def train(state: object) -> None:
        model.fit(data, epochs=2, verbose=0, initial_epoch=state.epoch, callbacks=[
            hora.callbacks.UpdateBatchStateCallback(state),
            hora.callbacks.UpdateEpochStateCallback(state),
            hora.callbacks.CommitStateCallback(state, batches_per_commit=2),
            Seen(),
        ])  # fmt: skip

    hora.elastic.run(train)(state)
    assert seen == [(0, 1, 0), (0, 2, 1), (1, 1, 2), (1, 2, 3)]
    assert (state.epoch, state.batch, state._commits) == (2, 0, 4)
    assert data.epoch == 2
    committed = weights(model)
    model.fit(data, epochs=1, verbose=0)
    state.epoch = 7
    assert np.abs(weights(model) - committed).max() > 1e-5
    state.restore()
    np.testing.assert_array_equal(weights(model), committed)
    assert (state.epoch, data.epoch) == (2, 2)
    # A job that is started anew in the same run directory begins there.
    fresh = network(seed=5 + hora.rank())
    fresh.compile(hora.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    again = hora.data_loader(x, y, global_batch=GLOBAL, seed=3)
    resumed = hora.elastic.KerasState(fresh, loader=again, batch=0, epoch=0)
    resumed.sync()
    np.testing.assert_array_equal(weights(fresh), committed)
    assert (resumed.epoch, again.epoch, resumed._commits) == (2, 2, 4)


def case_loops_of_ones_own() -> None:
    def train() -> np.ndarray:
        model = network()
        model.compile(keras.optimizers.Adam(0.01), "mse", **PLAIN)
        model.fit(X[:24], Y[:24], batch_size=GLOBAL, epochs=1, shuffle=False, verbose=0)
        return weights(model)

    expected = once(train)
    model = network()
    model.compile(hora.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    data = hora.data_loader(X[:24], Y[:24], global_batch=GLOBAL, shuffle=False)
    for x, y in data:
        model.train_on_batch(x, y)
    np.testing.assert_allclose(weights(model), expected, rtol=0, atol=1e-6)
    own = network()
    optimizer = hora.DistributedOptimizer(keras.optimizers.Adam(0.01))
    optimizer.build(own.trainable_variables)
    {"torch": loop_in_torch, "tensorflow": loop_in_tensorflow, "jax": loop_in_jax}[BACKEND](
        own, optimizer, data
    )
    assert same_everywhere(weights(own))
    np.testing.assert_allclose(weights(own), expected, rtol=0, atol=1e-6)


def loop_in_torch(model: keras.Model, optimizer: keras.optimizers.Optimizer, data: hora.Batches) -> None:
    import torch

    for x, y in data:
        model.zero_grad()
        torch.mean((model(x) - torch.from_numpy(y)) ** 2).backward()
        gradients = [variable.value.grad for variable in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)


def loop_in_tensorflow(model: keras.Model, optimizer: keras.optimizers.Optimizer, data: hora.Batches) -> None:
    import tensorflow as tf

    @tf.function
    def step(x: object, y: object) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x, y in data:
        step(tf.constant(x), tf.constant(y))


def loop_in_jax(model: keras.Model, optimizer: keras.optimizers.Optimizer, data: hora.Batches) -> None:
    import jax
    import jax.numpy as jnp

    import hora.jax

    def loss_of(trainable: list, fixed: list, x: object, y: object) -> object:
        out, _ = model.stateless_call(trainable, fixed, x)
        return jnp.mean((out - y) ** 2)

    def step(trainable: list, fixed: list, state: list, x: object, y: object) -> tuple:
        gradients = jax.grad(loss_of)(trainable, fixed, x, y)
        return optimizer.stateless_apply(state, gradients, trainable)

    compiled = hora.jax.spmd(step, split=("x", "y"))
    trainable = [variable.value for variable in model.trainable_variables]
    fixed = [variable.value for variable in model.non_trainable_variables]
    state = [variable.value for variable in optimizer.variables]
    for x, y in data:
        trainable, state = compiled(trainable, fixed, state, x, y)
    for variable, value in zip(model.trainable_variables, hora.jax.local(trainable), strict=True):
        variable.assign(value)


def case_values_of_every_kind() -> None:
    size, rank = hora.size(), hora.rank()
    assert hora.allreduce(float(rank)) == (size - 1) / 2
    total = hora.allreduce(np.full(3, rank, np.int32), op=hora.Sum)
    np.testing.assert_array_equal(total, np.full(3, size * (size - 1) // 2))
    tensor = keras.ops.convert_to_tensor(np.full(2, rank, np.float32))
    assert keras.ops.is_tensor(hora.allreduce(tensor, op=hora.Max))
    rows = hora.allgather(np.full((rank + 1, 2), rank, np.float32))
    expected = np.concatenate([np.full((each + 1, 2), each) for each in range(size)])
    np.testing.assert_array_equal(rows, expected)
    assert hora.broadcast(rank + 1.5, root_rank=size - 1) == size + 0.5
    variable = keras.Variable(np.full((2, 2), rank, np.float32))
    hora.broadcast_variables([variable], root_rank=1)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable.value), np.ones((2, 2)))
    odd = keras.Variable(np.zeros(2 + rank, np.float32))
    with_error(CollectiveError, lambda: hora.broadcast_variables([odd]), "number 0 of rank 0 is (2,) float32")


def case_the_order_of_samples_does_not_depend_on_the_number_of_workers() -> None:
    from hora.adapter.order import epoch_order

    ids = np.arange(40)
    data = hora.data_loader({"a": ids}, global_batch=GLOBAL, seed=7)
    assert len(data) == data.num_batches == 3
    for epoch in range(2):
        order = epoch_order(40, seed=7, epoch=epoch, shuffle=True)
        for step, (x,) in enumerate(data):
            together_now = np.concatenate(hora.allgather_object(x["a"]))
            np.testing.assert_array_equal(together_now, order[step * GLOBAL : (step + 1) * GLOBAL])

    # fit shuffles whole batches by default, with a generator that differs between ranks; not here.
    def train() -> np.ndarray:
        model = network()
        model.compile(keras.optimizers.SGD(0.05), "mse", **PLAIN)
        for epoch in range(2):
            order = epoch_order(48, seed=1, epoch=epoch, shuffle=True)
            model.fit(X[order], Y[order], batch_size=GLOBAL, shuffle=False, verbose=0)
        return weights(model)

    expected = once(train)
    model = network()
    model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    data = hora.data_loader(X, Y, global_batch=GLOBAL, seed=1)
    model.fit(data, epochs=2, verbose=0)
    assert data.epoch == 2
    np.testing.assert_allclose(weights(model), expected, rtol=0, atol=1e-6)
    with_error(GlobalBatchError, lambda: hora.data_loader(X, global_batch=7), "global_batch=7")
    with_error(UsageError, lambda: hora.data_loader(X, Y[:5], global_batch=GLOBAL), "48, 5 rows")


def case_batch_normalization_over_all_ranks() -> None:
    def made(layer: type, seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dense(4), layer(momentum=0.5), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((8,)), *layers])

    def train() -> list[np.ndarray]:
        model = made(keras.layers.BatchNormalization, 0)
        model.compile(keras.optimizers.SGD(0.05), "mse", **PLAIN)
        model.fit(X, Y, batch_size=GLOBAL, epochs=2, shuffle=False, verbose=0)
        return [keras.ops.convert_to_numpy(variable.value) for variable in model.variables]

    expected = once(train)
    model = made(hora.SyncBatchNormalization, hora.rank())
    model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    rows = share()
    model.fit(X[rows], Y[rows], batch_size=GLOBAL // hora.size(), epochs=2, shuffle=False, verbose=0,
              callbacks=[hora.callbacks.BroadcastGlobalVariablesCallback(0)])  # fmt: skip
    for mine, other in zip(model.variables, expected, strict=True):
        one = keras.ops.convert_to_numpy(mine.value)
        assert same_everywhere(one), mine.path
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6, err_msg=mine.path)


def case_the_guard_sees_the_training() -> None:
    """Each training has a fault that is told; the test looks for them."""

    def trained(x: np.ndarray, *layers: keras.Layer) -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="guarded"), *layers])
        model.add(keras.layers.Dense(1))
        model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        hora.broadcast_global_variables(0, model=model)
        model.fit(hora.data_loader(x, Y, global_batch=GLOBAL), epochs=2, verbose=0)
        return model

    spoilt = X.copy()
    spoilt[int(next(iter(hora.data_loader(np.arange(48), Y, global_batch=GLOBAL)))[0][-1])] = np.nan
    trained(spoilt)
    trained(X, keras.layers.Dropout(0.5, seed=1))
    trained(X).fit(X, Y, batch_size=8, shuffle=False, verbose=0)


def case_only_rank_0_shows_progress() -> None:
    model = network()
    model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        model.fit(X[:12], Y[:12], batch_size=12, epochs=2, verbose=2)
        model.evaluate(X[:12], Y[:12], verbose=1)
    assert ("Epoch 2/2" in shown.getvalue()) == (hora.rank() == 0)
    assert bool(shown.getvalue()) == (hora.rank() == 0), shown.getvalue()


def case_what_only_one_backend_has() -> None:
    if BACKEND == "torch":
        # A rank whose loss does not depend on a variable gives zeros; if it is so on all, nothing is done.
        import torch

        used, unused = (keras.Variable(np.ones(2, np.float32)) for _ in range(2))
        optimizer = hora.DistributedOptimizer(keras.optimizers.SGD(1.0, weight_decay=0.1))
        optimizer.build([used, unused])
        given = None if hora.rank() else torch.full((2,), float(hora.size()))
        optimizer.apply([given, None], [used, unused])
        # Decay first: 1 - 0.1; then the mean of (size, 0, ...) is 1.
        np.testing.assert_allclose(keras.ops.convert_to_numpy(used.value), -0.1, atol=1e-6)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(unused.value), 1.0)
    if BACKEND == "tensorflow":
        told = io.StringIO()
        model = network()
        model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", jit_compile=True)
        with contextlib.redirect_stderr(told):
            model.fit(X[:12], Y[:12], batch_size=12, verbose=0)
        assert not model.jit_compile
        assert ("is not compiled by XLA" in told.getvalue()) == (hora.rank() == 0)
    if BACKEND == "jax":
        # Traced by plain jit, nobody could tell a rank's gradients from global ones: it is said, not guessed.
        import jax

        optimizer = hora.DistributedOptimizer(keras.optimizers.SGD(0.05))
        variable = keras.Variable(np.ones(2, np.float32))
        optimizer.build([variable])
        state = [each.value for each in optimizer.variables]
        with_error(
            CollectiveError,
            lambda: jax.jit(optimizer.stateless_apply)(state, [variable.value], [variable.value]),
            "spmd",
        )


def case_the_face_is_what_the_reference_tells() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "keras.md").read_text()
    own = [name for name, value in vars(hora).items() if not inspect.ismodule(value) and name[0] != "_"]
    assert {*own} - {"annotations", "Any"} == {*hora.__all__}
    assert list(hora.__all__) == sorted(hora.__all__)
    headings = dict(re.findall(r"^### `([A-Za-z_.]+)(.*)`$", text, flags=re.MULTILINE))
    calls = {f"callbacks.{name}": getattr(hora.callbacks, name) for name in hora.callbacks.__all__}
    states = {f"elastic.{name}": getattr(hora.elastic, name) for name in ("KerasState", "run")}
    public = {name: getattr(hora, name) for name in hora.__all__} | calls | states
    assert set(headings) == set(public)
    for name, value in public.items():
        assert inspect.getdoc(value), name
        if inspect.isfunction(value) and value.__module__.startswith("hora.keras"):
            for parameter in inspect.signature(value).parameters:
                assert re.search(rf"\b{parameter}\b", headings[name]), (name, parameter)


def with_error(kind: type[Exception], call: Callable[[], object], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


class Ending(keras.callbacks.Callback):
    """A rank is killed in the midst of a training; or its model parts from the other's, and it raises."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if self._how == "kill" and hora.rank() == 0 and batch == 2:
            print(f"failing at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "raise" and hora.rank() == 1 and batch == 0:
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel.value * 1.5)
        if self._how == "raise" and hora.rank() == 1 and batch == 9:
            time.sleep(1)  # the verdict is on its way; nobody could tell when it has come
            print(f"failing at {time.time()}", flush=True)
            raise RuntimeError("this rank fails on purpose")


def end(how: str) -> None:
    model = network()
    model.compile(hora.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    model.fit(X, Y, batch_size=4, epochs=1000, verbose=0, callbacks=[Ending(how)])


CASES = [(name, call) for name, call in dict(globals()).items() if name.startswith("case_")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="parts of the names of cases; all by default")
    parser.add_argument("--end", choices=("raise", "kill"), help="how a rank fails afterwards")
    options = parser.parse_args()
    hora.init()
    warnings.simplefilter("ignore")
    for name, call in CASES:
        if options.words and not any(word in name for word in options.words):
            continue
        start = time.perf_counter()
        call()
        hora.barrier()
        if hora.rank() == 0:
            print(f"{name}: {time.perf_counter() - start:.2f} s", flush=True)
    print(f"rank {hora.rank()} of {hora.size()} on {BACKEND}: passed", flush=True)
    if options.end:
        end(options.end)
    hora.shutdown()


if __name__ == "__main__":
    main()
