# ranks: 2
"""All ranks make a call that cannot work, catch its error and go on."""

import torch

import hora.torch as hora
from hora.core.errors import CollectiveError

hora.init()
try:
    hora.allreduce(torch.tensor([1, 2]))
except CollectiveError as error:
    print("refused:", type(error).__name__)
print(hora.allreduce(torch.tensor([1, 2]), op=hora.Sum).tolist())
