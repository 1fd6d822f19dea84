"""Trainings with Horovod's interface for TensorFlow and Keras, run by every rank of 1, 2 and 3.

What a step makes of the gradients is known on paper: each rank's loss is linear in its variables.
"""

import os
import runpy
import shutil
from pathlib import Path

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as khvd
import keras
import numpy as np
import pytest
import tensorflow as tf

WORKERS = int(os.environ["HOROVOD_SIZE"])
MEAN = (WORKERS + 1) / 2
"""Of rank + 1, over the ranks."""


@pytest.fixture(autouse=True, scope="module")
def job():
    khvd.init()
    yield
    khvd.shutdown()


def gradients(tape_of, *, graph, sources, weights=None):
    """Of ``(rank + 1) * sum``, by a tape that ``tape_of`` makes of a plain one."""

    def compute():
        with tape_of(tf.GradientTape()) as tape:
            loss = sum(
                tf.reduce_sum(source) * (hvd.rank() + 1) * weight
                for source, weight in zip(sources, weights or [1] * len(sources), strict=True)
                if weight is not None
            )
        return tape.gradient(loss, sources)

    return (tf.function(compute) if graph else compute)()


def test_the_two_modules_are_one():
    """A script may use both, whichever it has initialized."""
    assert hvd.is_initialized()
    assert khvd.is_initialized()
    assert (khvd.rank(), khvd.size()) == (hvd.rank(), hvd.size())
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == khvd.allreduce(1.0, op=khvd.Sum) == WORKERS
    assert khvd.Average is hvd.Average
    assert khvd.Compression.fp16 is hvd.Compression.fp16
    assert khvd.global_process_set is hvd.global_process_set


@pytest.mark.parametrize("graph", [False, True])
def test_tape(graph):
    variables = [tf.Variable(tf.ones([3])), tf.Variable(1.0), tf.Variable(tf.ones([2], tf.float64))]
    for options, factor in (
        ({}, MEAN),
        ({"op": hvd.Sum}, MEAN * WORKERS),
        ({"compression": hvd.Compression.fp16}, MEAN),
        ({"gradient_predivide_factor": 2.0}, MEAN),
        ({"num_groups": 2}, MEAN),
        ({"groups": [variables[:2], variables[2:]]}, MEAN),
        ({"sparse_as_dense": True, "device_dense": "/cpu:0"}, MEAN),
        ({"process_set": hvd.global_process_set}, MEAN),
    ):
        found = gradients(
            lambda tape, options=options: hvd.DistributedGradientTape(tape, **options),
            graph=graph,
            sources=variables[:2],
        )
        for gradient in found:
            assert np.allclose(gradient, factor), options
    tape = hvd.DistributedGradientTape
    nested = tf.nest.flatten(gradients(tape, graph=graph, sources=variables[:2], weights=[1, None]))
    assert np.allclose(nested[0], MEAN)
    assert len(nested) == 1 or nested[1] is None


def test_tape_of_all_kinds_of_sources_and_targets():
    x, y = tf.Variable(2.0), tf.Variable([1.0, 1.0])
    rank = hvd.rank()
    with tf.GradientTape(persistent=True) as tape:
        loss = (rank + 1) * (x * x + tf.reduce_sum(y))
    tape = hvd.DistributedGradientTape(tape)  # one that has recorded already
    assert isinstance(tape, tf.GradientTape)
    found = tape.gradient(loss, {"x": x, "more": [y, (x,)]})
    assert float(found["x"]) == float(found["more"][1][0]) == 4 * MEAN
    assert np.allclose(found["more"][0], MEAN)
    assert float(tape.gradient(loss, x)) == 4 * MEAN
    assert float(tape.gradient(loss, x, tf.constant(2.0), use_generic_names=True)) == 8 * MEAN
    assert tape.gradient(loss, tf.Variable(1.0)) is None
    zeros = tape.gradient(loss, tf.Variable(1.0), unconnected_gradients=tf.UnconnectedGradients.ZERO)
    assert float(zeros) == 0
    with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
        tape.watch(x)
        loss = x * y[0] * (rank + 1)
    assert [None if each is None else float(each) for each in tape.gradient(loss, [x, y])] == [MEAN, None]
    with pytest.raises(ValueError):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Max)


@pytest.mark.parametrize("dense", [False, True])
def test_tape_with_sparse_gradients(dense):
    table = tf.Variable(tf.ones([WORKERS + 1, 2]))

    def compute():
        with hvd.DistributedGradientTape(tf.GradientTape(), sparse_as_dense=dense) as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), hvd.rank(), WORKERS]))
        return tape.gradient(loss, table)

    wanted = np.array([[2 / WORKERS] * 2] * WORKERS + [[1, 1]])
    for form in (compute, tf.function(compute)):
        found = form()
        assert isinstance(found, tf.Tensor if dense else tf.IndexedSlices)
        assert np.allclose(tf.convert_to_tensor(found), wanted)


@pytest.mark.parametrize("scaled", [False, True])
def test_tape_with_local_variables(scaled):
    mine, ours = tf.Variable(1.0), tf.Variable(1.0)
    wanted = (hvd.rank() + 1) / (WORKERS if scaled else 1)

    def tape_of(tape):
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
        tape.register_local_source(mine)
        return tape

    for graph in (False, True):
        found = gradients(tape_of, graph=graph, sources=[mine, ours])
        assert np.allclose(found, [wanted, MEAN])
    layers = [keras.layers.Dense(1, use_bias=False) for _ in range(2)]
    for layer in layers:
        layer.build((None, 1))
    for given in (layers[0], layers[:1]):
        with hvd.PartialDistributedGradientTape(
            tf.GradientTape(), local_layers=given, scale_local_gradients=scaled
        ) as tape:
            loss = sum(tf.reduce_sum(layer.kernel.value) * (hvd.rank() + 1) for layer in layers)
        found = tape.gradient(loss, [layer.kernel.value for layer in layers])
        assert np.allclose(np.ravel(found), [wanted, MEAN])


def one_step(optimizer, variables, *, graph):
    def step():
        pairs = [(tf.ones(each.shape) * (hvd.rank() + 1), each) for each in variables]
        optimizer.apply_gradients(pairs)

    (tf.function(step) if graph else step)()


@pytest.mark.parametrize("module", [hvd, khvd])
@pytest.mark.parametrize("graph", [False, True])
def test_optimizer(module, graph):
    for options, factor in (
        ({}, MEAN),
        ({"op": hvd.Sum}, MEAN * WORKERS),
        ({"compression": hvd.Compression.fp16}, MEAN),
        ({"gradient_predivide_factor": 2.0}, MEAN),
        ({"num_groups": 1, "name": "mine", "device_dense": "", "sparse_as_dense": True}, MEAN),
    ):
        variables = [keras.Variable(np.ones(3, np.float32)), keras.Variable(np.float32(1.0))]
        optimizer = module.DistributedOptimizer(keras.optimizers.SGD(0.25), **options)
        assert isinstance(optimizer, keras.optimizers.SGD)
        optimizer.build(variables)

        one_step(optimizer, variables, graph=graph)
        for variable in variables:
            assert np.allclose(variable, 1 - 0.25 * factor), options
        assert int(optimizer.iterations) == 1
    with pytest.raises(ValueError):
        module.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Max)


@pytest.mark.parametrize("module", [hvd, khvd])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_several_backward_passes_to_a_step(module, average, graph):
    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer = module.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    optimizer.build([variable])

    def step(x):
        optimizer.apply_gradients([(tf.ones([2]) * x * (hvd.rank() + 1), variable)])

    call = tf.function(step) if graph else step
    wanted = 0.0
    for number in range(6):
        call(tf.constant(float(number)))
        if number % 2:
            wanted -= MEAN * (2 * number - 1) / (2 if average else 1)
        assert np.allclose(variable, wanted), number
    assert int(optimizer.iterations) == (6 if module is hvd else 3)  # Keras counts steps


def test_optimizer_of_tensorflow_1():
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    variable = tf.Variable(1.0)
    optimizer.minimize(lambda: variable * (hvd.rank() + 1), var_list=[variable])
    assert np.allclose(variable, 1 - 0.5 * MEAN)


def test_batch_norm_over_all_ranks():
    """As of one worker with the union of the batches, which differ in size."""
    rng = np.random.default_rng(7)
    rows = [2 + rank for rank in range(WORKERS)]
    whole = rng.normal(3, 2, (sum(rows), 4)).astype(np.float32)
    start = sum(rows[: hvd.rank()])
    part = whole[start : start + rows[hvd.rank()]]
    for layer in (
        hvd.SyncBatchNormalization(momentum=0.5, epsilon=1e-4),
        hvd.SyncBatchNormalization(axis=-1, momentum=0.5, epsilon=1e-4),
    ):
        output = layer(part, training=True)
        mean, variance = whole.mean(0, dtype=np.float64), whole.var(0, dtype=np.float64)
        assert np.allclose(output, (part - mean) / np.sqrt(variance + 1e-4), atol=1e-5)
        assert np.allclose(layer.moving_mean, 0.5 * mean, atol=1e-6)
        assert np.allclose(layer.moving_variance, 0.5 + 0.5 * variance, atol=1e-5)
        assert np.allclose(
            layer(part, training=False),
            (part - layer.moving_mean) / np.sqrt(layer.moving_variance + 1e-4),
            atol=1e-5,
        )
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)


def test_values():
    rank = hvd.rank()
    assert khvd.allreduce(float(rank), name="mean") == (WORKERS - 1) / 2
    assert khvd.allreduce(float(rank), average=False) == WORKERS * (WORKERS - 1) / 2
    assert khvd.allreduce(
        np.array([1.0, 2.0]), op=khvd.Sum, prescale_factor=0.5, postscale_factor=4.0
    ).tolist() == [2 * WORKERS, 4 * WORKERS]
    assert khvd.allgather(np.full((rank + 1, 2), rank)).tolist() == [
        [k, k] for k in range(WORKERS) for _ in range(k + 1)
    ]
    assert khvd.broadcast(np.arange(3) + rank, 0).tolist() == [0, 1, 2]
    assert khvd.broadcast(float(rank), root_rank=WORKERS - 1, name="one") == WORKERS - 1
    rows = np.array_split(np.arange(4.0), WORKERS)[rank]
    assert np.allclose(khvd.reducescatter(np.arange(4.0), op=khvd.Sum), WORKERS * rows)
    assert np.allclose(khvd.reducescatter(np.arange(4.0)), rows)
    with pytest.raises(ValueError):
        khvd.allreduce(1.0, average=True, op=khvd.Sum)


def made(seed, units=3):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])


def alike(model):
    states = hvd.allgather_object([np.asarray(each).tobytes() for each in model.get_weights()])
    return all(state == states[0] for state in states)


@pytest.mark.parametrize("eager", [False, True])
def test_fit(eager):
    """Replicas that begin apart end alike, and as one worker's with the union of the batches."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), rng.normal(size=(12, 1)).astype(np.float32)
    alone = made(0)
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=eager)
    alone.fit(x, y, batch_size=12, epochs=4, shuffle=False, verbose=0)
    model = made(hvd.rank())
    optimizer = khvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eager)
    history = model.fit(
        np.array_split(x, WORKERS)[hvd.rank()],
        np.array_split(y, WORKERS)[hvd.rank()],
        batch_size=12,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[
            khvd.callbacks.BroadcastGlobalVariablesCallback(0),
            khvd.callbacks.MetricAverageCallback(),
        ],
    ).history
    assert alike(model)
    for here, there in zip(model.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(here, there, atol=1e-5)
    assert len({tuple(losses) for losses in hvd.allgather_object(history["loss"])}) == 1


def test_learning_rates():
    model = made(0)
    model.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)), "mse")
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    callbacks = [
        khvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1),
        khvd.callbacks.LearningRateScheduleCallback(
            initial_lr=0.4, multiplier=1.0, start_epoch=2, end_epoch=3
        ),
        khvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=0.1, start_epoch=3, end_epoch=4),
        khvd.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 10.0**-epoch, start_epoch=4),
        Look(),
    ]
    x = np.ones((6, 4), np.float32)
    history = model.fit(x, x[:, :1], batch_size=2, epochs=5, verbose=0, callbacks=callbacks).history
    warm = [0.4 / WORKERS * (1 + (WORKERS - 1) * step / 6) for step in range(1, 7)]
    assert np.allclose(seen, warm + [0.4] * 3 + [0.04] * 3 + [0.4e-4] * 3)
    assert np.allclose(history["lr"], [seen[place] for place in (2, 5, 8, 11, 14)])


def test_models_in_files(tmp_path):
    class Own(keras.optimizers.SGD):
        pass

    for optimizer, given in (
        (keras.optimizers.Adam(0.125), {}),
        (Own(0.125), {"custom_optimizers": [Own], "custom_objects": {"unused": Own}}),
    ):
        model = made(0)
        model.compile(khvd.DistributedOptimizer(optimizer), keras.losses.MeanSquaredError())
        x = np.ones((4, 4), np.float32) * (hvd.rank() + 1)
        model.train_on_batch(x, x[:, :1])
        for name in ("model.keras", "model.h5")[: 1 + (type(optimizer) is Own)]:
            path = str(tmp_path / name)
            model.save(path)
            loaded = khvd.load_model(path, compression=khvd.Compression.fp16, **given)
            assert isinstance(loaded.optimizer, type(optimizer).__mro__[1])
            assert float(loaded.optimizer.learning_rate) == 0.125
            for here, there in zip(loaded.get_weights(), model.get_weights(), strict=True):
                assert np.array_equal(here, there)
            if name == "model.keras":  # plain Keras cannot train a model from the other one either
                loaded.train_on_batch(x, x[:, :1])
                assert alike(loaded)
    config = model.optimizer.get_config()
    assert model.optimizer.from_config(config).get_config() == config


def test_callbacks_of_elastic_states(tmp_path):
    model = made(0)
    model.compile(khvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    state = khvd.elastic.KerasState(model, batch=0, epoch=0)
    best = khvd.callbacks.BestModelCheckpoint(monitor="loss", mode="min", save_freq="epoch")
    best.filepath = str(tmp_path / "best.keras")
    x = np.ones((6, 4), np.float32)
    model.fit(
        x,
        x[:, :1],
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[
            khvd.elastic.UpdateBatchStateCallback(state),
            khvd.elastic.UpdateEpochStateCallback(state),
            khvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            best,
        ],
    )
    assert (state.epoch, state.batch) == (2, 0)
    kept = model.get_weights()
    model.set_weights([each + hvd.rank() + 1 for each in kept])
    state.restore()
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), kept, strict=True))


def test_elastic_states_of_tensorflow():
    variables = [tf.Variable([1.0 + hvd.rank()]), tf.Variable(hvd.rank())]
    state = hvd.elastic.TensorFlowState(variables=variables, batch=hvd.rank(), epoch=5)
    state.sync()
    assert [each.numpy().tolist() for each in variables] == [[1.0], 0]
    assert (state.batch, state.epoch) == (0, 5)
    variables[0].assign([7.0])
    state.batch = 9
    state.restore()
    assert (variables[0].numpy().tolist(), state.batch) == ([1.0], 0)
    variables[0].assign([8.0])
    state.batch = 3
    state.commit()
    variables[0].assign([0.0])
    state.restore()
    assert (variables[0].numpy().tolist(), state.batch) == ([8.0], 3)
    called = []
    state.register_reset_callbacks([lambda: called.append("reset")])
    state.on_reset()
    assert called == ["reset"]


def test_an_elastic_function_begins_again_at_the_last_commit():
    state = hvd.elastic.TensorFlowState(variables=[tf.Variable(0.0)], batch=0)
    tries = []

    @hvd.elastic.run
    def train(state):
        tries.append(state.batch)
        while state.batch < 4:
            state.batch += 1
            hvd.allreduce(tf.ones([2]), name="step")
            if state.batch == 2:
                state.commit()
            if state.batch == 3 and len(tries) == 1:
                raise hvd.HorovodInternalError("on purpose, on every rank")
        return state.batch

    assert train(state) == 4
    assert tries == [0, 2]


def test_timeline_of_keras(tmp_path):
    path = str(tmp_path / "timeline.json")
    khvd.start_timeline(path)
    khvd.allreduce(1.0, name="seen")
    khvd.stop_timeline()
    if hvd.rank() == 0:
        assert "seen" in Path(path).read_text()


@pytest.mark.skipif(WORKERS == 1, reason="all sets are of one rank")
def test_process_sets_of_keras():
    khvd.shutdown()
    khvd.init(process_sets="dynamic")
    few = khvd.add_process_set([0])
    if few.included():
        assert khvd.allreduce(2.0, op=khvd.Sum, process_set=few) == 2.0
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = khvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=few)
    optimizer.apply_gradients([(tf.ones([1]) * (hvd.rank() + 1), variable)])
    assert np.allclose(variable, -(hvd.rank() + 1))
    assert khvd.remove_process_set(few)


@pytest.mark.skipif(WORKERS == 1, reason="several are what they are written for")
@pytest.mark.parametrize("name", ["tensorflow2_mnist", "tensorflow2_keras_mnist"])
def test_whole_scripts(name):
    khvd.shutdown()
    ran = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / f"{name}.py"))
    assert np.mean(ran["losses"][-3:]) < 0.8 * ran["losses"][0]
    assert alike(ran["model"])
    steps = {int(each) for each in hvd.allgather_object(np.asarray(ran["opt"].iterations))}
    assert steps == {40}
    if hvd.rank() == 0:
        assert any(Path(ran["folder"]).iterdir())
        shutil.rmtree(ran["folder"])
