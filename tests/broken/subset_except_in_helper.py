# ranks: 3
# verdict: subset-call
# at-fault: 1
# call: allgather_object
# within: 2
# ends: error
"""A rank that meets a bad file gathers the names of bad files from all."""

import torch

import hora.torch as hora


def report(name):
    names = hora.allgather_object(name)  # <- here
    print("bad files:", names)


hora.init()
total = torch.zeros(1)
for i in range(12):
    try:
        if i == 7 and hora.rank() == 1:
            raise OSError("truncated")
        value = torch.full((1,), float(i))
    except OSError:
        report(f"file-{i}")
        value = torch.zeros(1)
    total += hora.allreduce(value, name="value")
