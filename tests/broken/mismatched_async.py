# ranks: 2
# verdict: mismatched-calls
# within: 2
# ends: error
"""Two operations are started in the background, and their order comes from a set."""

import torch

import hora.torch as hora

hora.init()
wanted = ["mean", "best"] if hora.rank() == 0 else ["best", "mean"]
values = torch.arange(6.0)
handles = {}
for what in wanted:
    if what == "mean":
        handles[what] = hora.allreduce_async(values, name="values")  # <- here
    else:
        handles[what] = hora.broadcast_async(values, root_rank=1, name="values")  # <- here
for what, handle in handles.items():
    print(what, hora.synchronize(handle))
