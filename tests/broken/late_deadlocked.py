# ranks: 2
# verdict: late-rank
# at-fault: 1
# call: allgather
# options: --stall-after 1 --stall-abort 2
# ends: hang
"""Rank 1 takes its own lock twice while it writes a log."""

import threading

import torch

import hora.torch as hora


class Journal:
    def __init__(self):
        self.lock = threading.Lock()
        self.lines = []

    def write(self, line):
        with self.lock:
            self.lines.append(line)
            if len(self.lines) > 3:
                self.flush()

    def flush(self):
        with self.lock:  # <- here
            self.lines.clear()


hora.init()
journal = Journal()
for step in range(8):
    seen = hora.allgather(torch.full((1,), step + hora.rank()))
    if hora.rank() == 1:
        journal.write(f"step {step}: {seen.tolist()}")
