"""A quick training that survives: ``elastic`` holds its state in memory, ``checkpoints`` writes it down.

In float64, so that the number of workers, which changes the order of additions, changes next to nothing.
"""

from __future__ import annotations

import argparse
import time

import torch

import hora.torch as hora

Tracker = hora.Tracker[tuple[torch.Tensor, torch.Tensor]]
SAMPLES, GLOBAL_BATCH, EVERY = 960, 48, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("elastic", "checkpoints"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of work besides, in each step")
    chosen = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    hora.init()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    data = (inputs, (inputs @ torch.randn(8, 1)).tanh())
    loader = hora.data_loader(data, global_batch=GLOBAL_BATCH, seed=1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = hora.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    hora.broadcast_parameters(model)

    def epochs() -> Tracker:
        return hora.track(loader, epochs=chosen.epochs)

    def step(tracker: Tracker, x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        torch.autograd.backward(loss)
        time.sleep(chosen.pause)
        optimizer.step()
        tracker.log(loss=hora.mean(loss.detach(), weight=len(x)))

    if chosen.how == "checkpoints":
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpoints = hora.Checkpoints(state, every=EVERY, keep=2)
        checkpoints.restore()
        for x, y in (tracker := epochs()):
            step(tracker, x, y)
            checkpoints.step()
        return

    @hora.elastic.run
    def train(state: hora.elastic.TorchState) -> None:
        for x, y in (tracker := epochs()):
            step(tracker, x, y)
            if tracker.step % EVERY == 0:
                state.commit()

    train(hora.elastic.TorchState(model=model, optimizer=optimizer, loader=loader))


if __name__ == "__main__":
    main()
