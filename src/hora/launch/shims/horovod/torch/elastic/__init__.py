"""``horovod.torch.elastic``: the names, which say that the elastic engine is yet to come."""

from __future__ import annotations

from hora.torch.horovod.elastic import ElasticSampler, ObjectState, State, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
