"""``horovod.torch.elastic``: the names, which say that the elastic engine is yet to come."""

from hora.torch.horovod.elastic import *

from . import sampler, state
