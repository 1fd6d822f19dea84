# ranks: 2
# verdict: mismatched-calls
# call: allreduce
# within: 2
# ends: error
"""One rank's statistic comes from numpy and is float64; the other's stays float32."""

import numpy as np
import torch

import hora.torch as hora


def statistic(values):
    if len(values) == 0:
        return torch.zeros(3)
    return torch.from_numpy(np.percentile(values, [25, 50, 75]))


hora.init()
values = np.arange(10.0) if hora.rank() == 0 else np.empty(0)
quartiles = hora.allreduce(statistic(values))  # <- here
print(quartiles)
