"""``horovod.torch.elastic.sampler``."""

from __future__ import annotations

from hora.torch.horovod.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
