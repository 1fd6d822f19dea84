# ranks: 3
# verdict: mismatched-calls
# call: allreduce
# within: 2
# ends: error
"""The teachers reduce in their own set, the student in the set of all, and all wait for each other."""

import torch

import hora.torch as hora

hora.init()
teachers = hora.add_process_set([0, 1])
logits = torch.ones(4) * hora.rank()
if hora.rank() == 0:
    print("a teacher")
    logits = hora.allreduce(logits, process_set=teachers)  # <- here
else:
    logits = hora.allreduce(logits)  # <- here
print(logits.tolist())
