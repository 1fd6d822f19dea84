"""Lines to write, in the vocabulary of each adapter: advice is written in that of PyTorch."""

from __future__ import annotations

__all__ = ["written_for"]

_BROADCAST = "hora.broadcast_parameters(model, root_rank=0)"
_LOADER = "loader = hora.data_loader(dataset, global_batch=...)"
_SAMPLER = "or give torch's DataLoader a DistributedSampler; "
_SCALER = "a GradScaler for float16"
_BATCH_NORM = "model = hora.SyncBatchNorm.convert_sync_batchnorm(model) before the optimizer is made"
_LAYER = "hora.SyncBatchNormalization() in place of keras.layers.BatchNormalization()"

_LINES = {
    "hora.tensorflow": {
        _BROADCAST: "hora.broadcast_variables(model.variables, root_rank=0)",
        _LOADER: "loader = hora.data_loader((x, y), global_batch=...)",
        _SAMPLER: "or dataset = hora.shard(dataset, global_batch=...); ",
        _SCALER: "a LossScaleOptimizer for float16",
        _BATCH_NORM: _LAYER,
    },
    "hora.keras": {
        _BROADCAST: "fit(..., callbacks=[hora.callbacks.BroadcastGlobalVariablesCallback(0)])",
        " before the first step.": ".",
        _LOADER: "fit(hora.data_loader(x, y, global_batch=...))",
        _SAMPLER: "",
        _SCALER: "a LossScaleOptimizer for float16",
        _BATCH_NORM: _LAYER,
    },
    "hora.jax": {
        _BROADCAST: "params = hora.broadcast_parameters(params, root_rank=0)",
        _LOADER: "loader = hora.data_loader((x, y), global_batch=...)",
        _SAMPLER: "",
        _SCALER: "a scaled loss for float16",
    },
}
"""By adapter: what stands in place of a line of ``hora.torch``."""


def written_for(module: str, advice: str) -> str:
    """The advice, as a script can follow it that imports this adapter."""
    for line, other in _LINES.get(module, {}).items():
        advice = advice.replace(line, other)
    return advice
