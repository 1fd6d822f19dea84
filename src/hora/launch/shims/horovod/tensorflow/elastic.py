"""``horovod.tensorflow.elastic``."""

from hora.tensorflow.horovod.elastic import *
