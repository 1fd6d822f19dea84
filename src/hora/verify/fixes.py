"""The lines to write against each cause, in the words of each framework."""

from __future__ import annotations

from collections.abc import Mapping

from hora.verify.runs import Run

__all__ = ["STEPS", "fix_of"]

STEPS: Mapping[str, tuple[str, str]] = {
    "hora.torch": ("a torch.optim optimizer", "loss.backward() and optimizer.step()"),
    "hora.tensorflow": (
        "a Keras optimizer",
        "tape.gradient() and optimizer.apply_gradients(), or model.fit; optimizers of tf.compat.v1 and "
        "variables that the script changes itself are not followed",
    ),
    "hora.keras": ("a Keras optimizer", "model.fit, model.train_on_batch or optimizer.apply"),
    "hora.jax": (
        "an Optax optimizer",
        "jax.value_and_grad, optimizer.update() and optax.apply_updates(); updates that the script adds "
        "itself are not followed",
    ),
}
"""What makes a step, and how a script does it, by adapter."""

_RANDOM = (
    "Nothing is wrong with independent dropout. Augment before the loop, or by a seed of the sample's own."
)
_BATCH_NORM = (
    "Use hora.SyncBatchNormalization() in the place of BatchNormalization, or accept it: it is usual, and "
    "harmless where each worker has enough samples."
)
_SHARE = "or give each worker its own 1/size of one global batch."

_FIXES: Mapping[str, Mapping[str, str]] = {
    "hora.tensorflow": {
        "initial-parameters": "Write hora.broadcast_variables(model.variables) before the loop, and seed the "
        "model by tf.keras.utils.set_random_seed(1), alike on every rank.",
        "samples": "Write hora.data_loader((x, y), global_batch=..., seed=...), or hora.shard(dataset, "
        f"global_batch=...), {_SHARE}",
        "averaging": "Write tape = hora.DistributedGradientTape(tape), or "
        "hora.DistributedOptimizer(optimizer): one of the two, with op=hora.Average.",
        "weighting": "Write the loss as a sum over the global count: "
        "tf.reduce_sum(losses) * hora.size() / loader.samples_now.",
        "batch-norm": _BATCH_NORM,
        "randomness": _RANDOM,
        "clipping": "Clip what hora.DistributedGradientTape gives, or by the optimizer: "
        "tf.keras.optimizers.Adam(..., global_clipnorm=1.0).",
    },
    "hora.keras": {
        "initial-parameters": "Give fit(callbacks=[hora.callbacks.BroadcastGlobalVariablesCallback()]), and "
        "seed the model by keras.utils.set_random_seed(1), alike on every rank.",
        "samples": f"Write model.fit(hora.data_loader(x, y, global_batch=..., seed=...)), {_SHARE}",
        "averaging": "Write model.compile(hora.DistributedOptimizer(optimizer), ...), once, with "
        "op=hora.Average.",
        "weighting": "Give every worker as many samples: hora.data_loader(x, y, global_batch=...) with "
        'tail="drop" or tail="pad".',
        "batch-norm": _BATCH_NORM,
        "randomness": _RANDOM,
        "clipping": "Clip by the optimizer that is given to hora.DistributedOptimizer: "
        "keras.optimizers.Adam(..., global_clipnorm=1.0).",
    },
    "hora.jax": {
        "initial-parameters": "Write params = hora.broadcast_parameters(params) before "
        "optimizer.init(params), of a key that is alike on every rank.",
        "samples": f"Write hora.data_loader((x, y), global_batch=..., seed=...), {_SHARE}",
        "averaging": "Write optimizer = hora.DistributedOptimizer(optax.adam(...)), with "
        "op=hora.Average, and average gradients nowhere else.",
        "weighting": "Write the loss as a sum over the global count: "
        "losses.sum() * hora.size() / global_batch.",
        "batch-norm": "Give the layer the axis of the ranks: axis_name=hora.AXIS.",
        "randomness": _RANDOM,
        "clipping": "Clip inside: hora.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(1.0), "
        "optax.adam(...))).",
    },
}


def fix_of(cause: str, usual: str, run: Run) -> str:
    """What to write against a cause, for a script of this run's framework.

    Args:
        cause: its slug.
        usual: what to write with PyTorch, or with any of them.
        run: which tells the framework.
    """
    ending = run.ranks[0].ending
    return _FIXES.get("" if ending is None else ending.module, {}).get(cause, usual)
