"""``import horovod.tensorflow.keras as hvd``."""

from hora.keras.horovod import *

from . import callbacks, elastic
