"""``horovod.tensorflow.keras.callbacks``."""

from hora.keras.callbacks import *
