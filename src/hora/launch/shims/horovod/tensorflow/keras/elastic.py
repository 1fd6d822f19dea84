"""``horovod.tensorflow.keras.elastic``."""

from hora.keras.elastic import *
