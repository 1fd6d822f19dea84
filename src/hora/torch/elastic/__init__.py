"""Elastic training: workers come and go, and the training goes on in the processes that live.

::

    hora.init()
    model, optimizer, loader = ...
    state = hora.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @hora.elastic.run
    def train(state):
        for x, y in hora.track(loader, epochs=10):
            ...
            optimizer.step()
            state.commit()

    train(state)
"""

from __future__ import annotations

from hora.torch.elastic._run import run
from hora.torch.elastic._sampler import ElasticSampler
from hora.torch.elastic._state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
