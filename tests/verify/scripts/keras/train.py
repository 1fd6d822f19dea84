"""``model.fit`` on any backend: ``train.py [FAULT...]`` trains rightly, or with faults."""

import sys

import keras
import numpy as np

import hora.keras as hora

faults = set(sys.argv[1:])
hora.init()
rank, size = hora.rank(), hora.size()
rng = np.random.default_rng(1)
x, y = rng.normal(size=(48, 5)).astype(np.float32), rng.integers(0, 3, 48)
keras.utils.set_random_seed(1 + ("not-broadcast" in faults) * rank)
layers = [keras.Input((5,)), keras.layers.Dense(6, activation="tanh")]
if "batch-norm" in faults:
    layers.append(keras.layers.BatchNormalization())
if "sync-batch-norm" in faults:
    layers.append(hora.SyncBatchNormalization())
if "dropout" in faults:
    layers.append(keras.layers.Dropout(0.5, seed=rank))
model = keras.Sequential([*layers, keras.layers.Dense(3)])
rate = 0.05 * (size if "rate" in faults else 1)
optimizer = keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=1.0)
if "never-averaged" not in faults:
    op = hora.Sum if "summed" in faults else hora.Average
    optimizer = hora.DistributedOptimizer(optimizer, op=op)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
callbacks = [] if "not-broadcast" in faults else [hora.callbacks.BroadcastGlobalVariablesCallback()]
if "same-data" in faults:
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0, callbacks=callbacks)
elif "own-shuffle" in faults:
    keras.utils.set_random_seed(rank)
    model.fit(x, y, batch_size=12, verbose=0, callbacks=callbacks)
elif "batch-per-worker" in faults:
    model.fit(x[rank::size], y[rank::size], batch_size=12, shuffle=False, verbose=0, callbacks=callbacks)
elif "unequal" in faults:
    share = slice(0, 9) if rank == 0 else slice(9, 12)
    share = share if size > 1 else slice(0, 12)
    batches = ((x[i : i + 12][share], y[i : i + 12][share]) for i in range(0, 48, 12))
    model.fit(batches, verbose=0, callbacks=callbacks)
else:
    model.fit(hora.data_loader(x, y, global_batch=12, seed=1), epochs=2, verbose=0, callbacks=callbacks)
