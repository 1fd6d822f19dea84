"""A collective of Gloo's that waits can be ended from another thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks

import hora.torch as hora
from hora.torch._connections import Connections


@pytest.mark.alone
@ranks(2, 3)
def test_closing_ends_what_waits_and_nothing_else() -> None:
    connections = Connections()
    with connections.made():
        group = dist.new_group(list(range(hora.size())), backend="gloo")
    dist.all_reduce(torch.ones(3), group=group)
    if hora.rank() == 0:
        timer = threading.Timer(0.2, connections.close)
        timer.start()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3), group=group)
        assert 0.1 < time.monotonic() - began < 2
        timer.join()
    # The group of the job itself was not made there, and goes on working.
    assert hora.allreduce(torch.ones(()), op=hora.Sum) == hora.size()


@ranks(1)
def test_without_a_group_there_is_nothing_to_close() -> None:
    connections = Connections()
    with connections.made():
        pass
    connections.close()
    assert hora.mean(2.0) == 2.0
