# ranks: 2
# verdict: late-rank
# at-fault: 0
# call: allreduce
# options: --stall-after 1 --stall-abort 3
# ends: hang
"""Rank 0 is inside C code that never gives the interpreter back: a regular expression that explodes."""

import re

import torch

import hora.torch as hora


def clean(text):
    return re.match(r"(\w+\s?)+$", text)  # <- here


hora.init()
logs = ["epoch 1 done", "loss " + "a" * 60 + "!"]
score = torch.zeros(4)
for epoch in range(2):
    if hora.rank() == 0:
        clean(logs[epoch])
    score += hora.allreduce(torch.full((4,), float(epoch)), name="score")
print(score.tolist())
