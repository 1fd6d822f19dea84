"""``DistributedOptimizer``: the user's Keras optimizer, with gradients that are combined over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from keras.optimizers import LossScaleOptimizer, Optimizer

from hora.core.errors import GradientError, UsageError
from hora.keras._backend import api
from hora.keras._options import Options
from hora.keras._reduce import reduce_gradients

__all__ = ["Distributed", "DistributedOptimizer", "PartialDistributedOptimizer", "wrap"]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    *,
    name: str | None = None,
    compression: Any = api.Compression.none,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = True,
    op: Any = api.Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    process_set: Any = api.global_process_set,
) -> Any:
    """Let a Keras optimizer step by the gradients of all ranks.

    The optimizer itself is changed and returned: nothing of its state or its settings is lost, a built one
    stays built, ``isinstance`` and callbacks see what it was, and a model that is saved with it opens in
    plain Keras too. Gradients are combined before anything else is done with them: before a
    ``LossScaleOptimizer`` looks for what is not finite and unscales, before clipping, weight decay and
    averages of weights. It works in ``model.fit``, in ``train_on_batch``, and in loops that call ``apply`` or
    ``apply_gradients``; on JAX a loop of one's own runs inside ``hora.jax.spmd``.

    Args:
        optimizer: any Keras optimizer, or its name, such as ``"adam"``.
        name: of the reduction, in the timeline and in messages.
        compression: how gradients travel: ``Compression.fp16`` or ``bf16``.
        backward_passes_per_step: with more than 1, the gradients of so many batches add up on each rank and
            are combined in the last, by Keras's own ``gradient_accumulation_steps``. (On JAX they are
            combined for each batch: a compiled step has one form.)
        average_aggregated_gradients: the gradients of those batches make a mean; False for their sum, which
            is what Horovod does by default.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the average after.
        sparse_as_dense: gradients of an embedding travel as a whole tensor, not as the rows that occur.
        process_set: the ranks that combine; the others step by their own gradients.

    Returns:
        The optimizer.

    Raises:
        UsageError: no Keras optimizer, or one that is distributed already.
        GradientError: what does not go together.
    """
    return wrap(
        optimizer,
        Options(
            name=name,
            op=op,
            compression=compression,
            predivide=gradient_predivide_factor,
            passes=backward_passes_per_step,
            average_passes=average_aggregated_gradients,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        ),
    )


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *, local_layers: Any = (), scale_local_gradients: bool = True, **options: Any
) -> Any:
    """:func:`DistributedOptimizer`, but some layers keep their gradients to their rank.

    Args:
        optimizer: as there.
        local_layers: a layer or several, whose variables each rank trains by its own data. Name them for the
            broadcast too: ``BroadcastGlobalVariablesCallback(0, local_variables=...)``.
        scale_local_gradients: divide their gradients by the number of ranks, as an average would.
        options: the other arguments of :func:`DistributedOptimizer`.

    Returns:
        The optimizer.
    """
    layers = list(local_layers) if isinstance(local_layers, Sequence) else [local_layers]
    passes = options.pop("backward_passes_per_step", 1)
    return wrap(
        optimizer,
        Options(
            **{"op": api.Average, "compression": api.Compression.none, "process_set": api.global_process_set}
            | {_NAMES.get(key, key): value for key, value in options.items()},
            passes=passes,
            local_layers=layers,
            scale_local=scale_local_gradients,
        ),
    )


_NAMES = {"average_aggregated_gradients": "average_passes", "gradient_predivide_factor": "predivide"}


_TYPE: Any = vars(object)["__class__"]
"""Sets what an object is an instance of, whatever it says itself."""


class Distributed:
    """What comes before the class of the user's optimizer."""

    _plain: ClassVar[type]
    _options: ClassVar[Options]
    _scaled: ClassVar[bool] = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # What Keras writes to a file is the optimizer that it was, so that the file needs no Hora.
        return self._plain

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """An optimizer of this configuration that is distributed in the same way."""
        plain: Any = cls._plain
        given = {} if custom_objects is None else {"custom_objects": custom_objects}
        return wrap(plain.from_config(config, **given), cls._options)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Update the variables by the gradients of all ranks."""
        me: Any = self
        grads = list(grads)
        variables = me._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not me.gradient_accumulation_steps:
            grads = self._combined(grads, variables)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        # Keras calls it first of all once it has added up the gradients of several batches.
        me: Any = self
        if me.gradient_accumulation_steps:
            grads = self._combined(list(grads), me._trainable_variables)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _combined(self, grads: list[Any], variables: Sequence[Any]) -> list[Any]:
        options = self._options
        grads = reduce_gradients(grads, variables, options, scaled=self._scaled)
        if options.passes > 1 and not options.average_passes:
            grads = [None if gradient is None else gradient * options.passes for gradient in grads]
        return grads


class DistributedLossScale(Distributed):
    """The same for ``LossScaleOptimizer``, which looks at the gradients before the optimizer inside does."""

    _scaled: ClassVar[bool] = True

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Update by the gradients of all ranks; JAX's train step calls it."""
        me: Any = self
        grads = self._combined(list(grads), me._trainable_variables)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]


def wrap(optimizer: Any, options: Options) -> Any:
    """Put :class:`Distributed` before the optimizer's class, in the object itself."""
    import keras

    if isinstance(optimizer, str | dict):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"DistributedOptimizer takes a Keras optimizer, not {type(optimizer).__name__}.",
            fix="Write hora.DistributedOptimizer(keras.optimizers.Adam(1e-3)).",
        )
    if isinstance(optimizer, Distributed):
        raise UsageError(
            f"The optimizer {optimizer.name!r} is distributed already.",  # type: ignore[attr-defined]
            fix="Call DistributedOptimizer once; load_model() does it for the optimizer of the file.",
        )
    plain = type(optimizer)
    scales = isinstance(optimizer, LossScaleOptimizer)
    if scales and isinstance(optimizer.inner_optimizer, Distributed):
        raise UsageError(
            "The optimizer inside LossScaleOptimizer is distributed: its gradients would be unscaled on each "
            "rank first, and a rank whose own are not finite would step without the others.",
            fix="Write hora.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)).",
        )
    _accumulate(optimizer.inner_optimizer if scales else optimizer, options.passes)
    from hora.keras import _hooks  # it builds on this module; the script may have called another init()

    _hooks.install()
    made = type(
        plain.__name__,
        (DistributedLossScale if scales else Distributed, plain),
        {"_plain": plain, "_options": options, "__module__": "hora.keras", "__doc__": plain.__doc__},
    )
    _TYPE.__set__(optimizer, made)
    return optimizer


def unwrap(optimizer: Any) -> Options:
    """Make it the optimizer that it was; what it was distributed by."""
    options: Options = optimizer._options
    _TYPE.__set__(optimizer, optimizer._plain)
    return options


def _accumulate(optimizer: Any, passes: int) -> None:
    steps = optimizer.gradient_accumulation_steps or 1
    if passes in (1, steps):
        return
    if steps > 1 or optimizer.built:
        state = f"has gradient_accumulation_steps={steps}" if steps > 1 else "is built"
        raise GradientError(
            f"backward_passes_per_step={passes}, but the optimizer {state}.",
            fix=f"Make it with gradient_accumulation_steps={passes}, and leave backward_passes_per_step out.",
        )
    optimizer.gradient_accumulation_steps = passes
