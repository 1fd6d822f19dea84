# ranks: 2
# verdict: mismatched-calls
# call: allreduce
# within: 2
# ends: error
"""Per-class counts have as many classes as this rank happened to see."""

import torch

import hora.torch as hora

hora.init()
labels = torch.arange(60) % 10
mine = labels[labels < 8] if hora.rank() == 0 else labels
counts = torch.bincount(mine).float()
counts = hora.allreduce(counts, name="class_counts", op=hora.Sum)  # <- here
weights = counts.sum() / counts
print(weights.tolist())
