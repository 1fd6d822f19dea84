# ranks: 2
# verdict: mismatched-calls
# call: allreduce
# within: 2
# ends: error
"""Metrics are reduced in another order on each rank, so precision would be averaged with recall."""

import torch

import hora.torch as hora

hora.init()
metrics = {"precision": torch.tensor(0.9), "recall": torch.tensor(0.4)}
best_first = sorted(metrics, reverse=hora.rank() == 1)
reduced = {}
for name in best_first:
    reduced[name] = hora.allreduce(metrics[name], name=name)  # <- here
print(reduced)
