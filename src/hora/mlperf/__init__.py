"""MLPerf's log format. A run of Hora's workloads is format-compliant; it is not an MLPerf result."""

from __future__ import annotations

from hora.mlperf.detection import maskrcnn_hyperparameters, ssd_hyperparameters
from hora.mlperf.log import MLPerfLog, resnet_hyperparameters

__all__ = ["MLPerfLog", "maskrcnn_hyperparameters", "resnet_hyperparameters", "ssd_hyperparameters"]
