"""``horovod.keras.callbacks``."""

from hora.keras.callbacks import *
