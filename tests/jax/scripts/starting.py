"""How a job can begin: `starting.py used` computes first, `starting.py own` connects JAX itself."""
# ruff: noqa: PT017 - a script of asserts that runs on all ranks

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import hora.jax as hora
from hora.core.errors import AlreadyInitializedError, CollectiveError

rank, size = int(os.environ["HORA_RANK"]), int(os.environ["HORA_SIZE"])
if sys.argv[1] == "used":
    jnp.zeros(3)
    try:
        hora.init()
    except AlreadyInitializedError as error:
        assert "hora.init()" in str(error)
        print("refused", flush=True)
    sys.exit()
own = f"127.0.0.1:{os.environ['MASTER_PORT']}"
jax.distributed.initialize(own, size, rank, cluster_detection_method="deactivate")
hora.init(process_sets=[[1]])
assert hora.process_set_ids() == [0, 1]
before = hora.allreduce(np.float32(rank), op=hora.Sum)
hora.shutdown()
assert not hora.is_initialized()
assert float(before) == 1.0  # arrays live on
hora.init()
assert float(hora.allreduce(before, op=hora.Sum)) == 2.0
step = hora.spmd(lambda x: hora.allreduce(x.sum(), op=hora.Sum), split=0)
assert float(step(np.ones((2, 2)))) == 8.0
for call in (
    lambda: hora.allreduce(np.ones(2 + rank)),
    lambda: hora.broadcast(np.ones(2), root_rank=rank),
    lambda: step(np.ones((3 + rank, 2))),
):
    try:
        call()
    except CollectiveError as error:
        assert "The ranks do not call the same" in str(error), error
    else:
        raise AssertionError("ranks that differ were not told")
print("done", flush=True)
