# ranks: 2
# verdict: mismatched-calls
# call: mean
# within: 2
# ends: error
"""A metric is logged under one more name on the rank that has positive samples."""

import torch

import hora.torch as hora

hora.init()
torch.manual_seed(hora.rank())
metrics = {"loss": 0.5}
if hora.rank() == 1:
    metrics["recall"] = 0.7
print(hora.mean(metrics, weight=8))  # <- here
