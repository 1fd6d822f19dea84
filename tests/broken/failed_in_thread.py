# ranks: 2
# verdict: rank-failed
# at-fault: 0
# within: 2
# ends: error
"""A watchdog thread of rank 0 ends the process, without an exception that anyone could see."""

import os
import threading

import torch

import hora.torch as hora


def watch(stop):
    stop.wait()
    os._exit(5)


hora.init()
stop = threading.Event()
threading.Thread(target=watch, args=(stop,), daemon=True).start()
for step in range(10_000):
    hora.allreduce(torch.ones(3), name="ones")
    if step == 30 and hora.rank() == 0:
        stop.set()
