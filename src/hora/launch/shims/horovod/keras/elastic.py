"""``horovod.keras.elastic``."""

from hora.keras.elastic import *
