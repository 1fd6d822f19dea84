# ranks: 4
# verdict: mismatched-calls
# call: allreduce
# within: 2
# ends: error
"""Two overlapping process sets, used in opposite order by two of their members."""

import torch

import hora.torch as hora

hora.init()
left = hora.add_process_set([0, 1, 2])
right = hora.add_process_set([0, 1, 3])
x = torch.ones(3) * hora.rank()


def both(first, second):
    for group in (first, second):
        if group.included():
            print(hora.allreduce(x, process_set=group))  # <- here


if hora.rank() == 1:
    both(right, left)
else:
    both(left, right)
