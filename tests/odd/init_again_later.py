# ranks: 3
"""After a shutdown one rank is late at the next init: it has not left the job for good."""

import time

import torch

import hora.torch as hora

for _ in range(2):
    hora.init()
    rank = hora.rank()
    assert hora.allreduce(torch.ones(1), op=hora.Sum).item() == 3
    hora.shutdown()
    time.sleep(0.5 * (rank == 1))
