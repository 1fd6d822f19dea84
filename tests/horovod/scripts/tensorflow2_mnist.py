"""A loop of one's own with a distributed tape, as scripts for Horovod on TensorFlow 2 are written."""

import os
import tempfile

import horovod.tensorflow as hvd
import tensorflow as tf

from hora.workloads.resnet import fashion_mnist

STEPS = int(os.environ.get("STEPS", "40"))

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

(images, labels), _ = fashion_mnist.load(None, subset=True)
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], 2, activation="relu"),
        tf.keras.layers.Conv2D(16, [3, 3], 2, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dropout(0.2),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()

# Adjust the learning rate to the number of workers.
opt = tf.optimizers.Adam(0.001 * hvd.size())

folder = tempfile.mkdtemp()
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: average the gradients.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905 - as such scripts do

    # Horovod: all start from rank 0's variables; after the first step, so that the optimizer has its own.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


losses = []
for batch, (images, labels) in enumerate(dataset.take(STEPS)):
    loss_value = training_step(images, labels, batch == 0)
    losses.append(float(loss_value))
    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}", flush=True)

if hvd.rank() == 0:
    checkpoint.save(os.path.join(folder, "checkpoint"))  # noqa: PTH118
