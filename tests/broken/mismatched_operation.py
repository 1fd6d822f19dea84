# ranks: 3
# verdict: mismatched-calls
# at-fault: 0
# call: allreduce
# within: 2
# ends: error
"""The rank that writes the log wants the sum, the others the mean."""

import torch

import hora.torch as hora

hora.init()
loss = torch.tensor([0.5 + hora.rank()])
operation = hora.Sum if hora.rank() == 0 else hora.Average
loss = hora.allreduce(loss, name="loss", op=operation)  # <- here
print(loss.item())
