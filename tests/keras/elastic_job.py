"""``model.fit`` with commits; `elastic_job.py RANK OUT` kills RANK (-1: none) in the third epoch at first;
`elastic_job.py stop RANK` stops it there (SIGSTOP).
"""

import os
import signal
import sys
import time

import keras
import numpy as np

import hora.keras as hora

hora.init()
stop = sys.argv[1] == "stop"
victim = int(sys.argv[2] if stop else sys.argv[1])
first = os.environ.get("HORA_ATTEMPT", "1") == "1"
random = np.random.default_rng(3)
inputs = random.normal(size=(48, 4)).astype(np.float32)
targets = inputs @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)

keras.utils.set_random_seed(7)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
model.compile(hora.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss="mse")
data = hora.data_loader(inputs, targets, global_batch=12, seed=5)
state = hora.elastic.KerasState(model, loader=data, batch=0, epoch=0)


class Victim(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if first and state.epoch == 2 and batch == 2 and hora.rank() == victim:
            print(f"stopping at {time.time():.3f}", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)


@hora.elastic.run
def train(state: hora.elastic.KerasState) -> None:
    model.fit(
        data,
        epochs=4,
        initial_epoch=state.epoch,
        verbose=0,
        callbacks=[
            hora.callbacks.BroadcastGlobalVariablesCallback(0),
            hora.callbacks.UpdateBatchStateCallback(state),
            hora.callbacks.UpdateEpochStateCallback(state),
            hora.callbacks.CommitStateCallback(state, batches_per_commit=0),
            Victim(),
        ],
    )


train(state)
if hora.rank() == 0:
    np.savez(sys.argv[2], epoch=state.epoch, **{str(i): w for i, w in enumerate(model.get_weights())})
