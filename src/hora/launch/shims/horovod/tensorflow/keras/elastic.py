"""``horovod.tensorflow.keras.elastic``."""

from hora.keras.horovod_elastic import *
