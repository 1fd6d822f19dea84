"""``horovod.keras.elastic``."""

from hora.keras.horovod_elastic import *
