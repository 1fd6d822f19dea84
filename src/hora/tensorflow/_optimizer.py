"""Optimizers that average gradients over the ranks before they use them.

A Keras optimizer becomes one of a subclass of its class, whose ``apply`` averages: ``apply_gradients`` and
``model.fit`` both come through it. One of TensorFlow 1 gets another ``compute_gradients``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.tensorflow._autograph import unconverted
from hora.tensorflow._compression import Compressing, Compression
from hora.tensorflow._gradients import Averaging, variables_of
from hora.tensorflow._process_sets import ProcessSet, global_process_set
from hora.tensorflow._request import dispatcher

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer"]


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name, and its order of arguments
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | None = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let an optimizer average the gradients of all ranks.

    Args:
        optimizer: of Keras 3 on TensorFlow, or of ``tf.compat.v1.train``.
        name: of the optimizer, where it has none of its own.
        use_locking: accepted for scripts written for Horovod.
        device_dense: likewise.
        device_sparse: likewise.
        compression: what travels; see :class:`Compression`.
        sparse_as_dense: make ``tf.IndexedSlices`` dense before.
        backward_passes_per_step: gradients of so many calls are added up before they are averaged and used.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: divides gradients before they are added up and multiplies them after.
        average_aggregated_gradients: divide by ``backward_passes_per_step``.
        num_groups: accepted: all gradients of a dtype travel together in any case.
        groups: likewise.
        process_set: the ranks that take part.
        scale_local_gradients: see ``DistributedGradientTape``.

    Returns:
        The optimizer, now of a subclass of its class, with ``register_local_var(variable)``.

    Raises:
        GradientError: what is no optimizer, is wrapped already, or arguments that do not go together.
    """
    function = "DistributedOptimizer"
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise GradientError(
            f"{function}: backward_passes_per_step={backward_passes_per_step!r} must be > 0.",
            fix="Write backward_passes_per_step=1, or leave it out.",
        )
    averaging = Averaging.of(
        function,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local=scale_local_gradients,
    )
    if isinstance(optimizer, _Distributed):
        raise GradientError(
            "DistributedOptimizer got an optimizer that averages already.", fix="Wrap it once."
        )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        base: type[_Distributed] = _OfTensorFlow1
    elif isinstance(optimizer, tf.keras.optimizers.Optimizer):
        base = _OfKeras
    else:
        raise GradientError(
            f"DistributedOptimizer takes an optimizer of Keras or of tf.compat.v1.train, not "
            f"{type(optimizer).__name__}.",
            fix="Write hora.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)).",
        )
    plain = type(optimizer)
    optimizer.__class__ = type(plain.__name__, (base, plain), {"__module__": plain.__module__})
    # Past the attribute tracking of Keras: the variables below are no part of its state.
    object.__setattr__(optimizer, "_hora_averaging", averaging)
    object.__setattr__(
        optimizer, "_hora_passes", _Passes(backward_passes_per_step, average=average_aggregated_gradients)
    )
    return optimizer


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """A :func:`DistributedOptimizer` that leaves the variables of some layers to each rank.

    Args:
        optimizer: as there, and so are all others.
        args: see there.
        local_layers: a Keras layer or several, whose gradients stay local.
        kwargs: see there.
    """
    wrapped = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in variables_of(local_layers):
        wrapped.register_local_var(variable)
    return wrapped


class _Distributed:
    """What every distributed optimizer has."""

    _hora_averaging: Averaging
    _hora_passes: _Passes

    def register_local_var(self, var: Any) -> None:
        """Gradients of this variable stay each rank's own."""
        self._hora_averaging.register_local(var)


class _OfKeras(_Distributed):
    @unconverted
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Average the gradients, then use them."""
        following: Any = super()
        found = list(grads)
        variables = list(trainable_variables) if trainable_variables is not None else None
        known = variables if variables is not None else list(self._trainable_variables)  # type: ignore[attr-defined]
        averaging, passes = self._hora_averaging, self._hora_passes

        def use(gradients: Any) -> None:
            following.apply(averaging.reduce(gradients, known), variables)

        if passes.count == 1:
            use(found)
            return
        if not self.built:  # type: ignore[attr-defined]
            with tf.init_scope():
                self.build(known)  # type: ignore[attr-defined]
        passes.add(found, use, self.iterations if dispatcher().as_horovod else None)  # type: ignore[attr-defined]


class _OfTensorFlow1(_Distributed):
    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients of all ranks, with the variables."""
        following: Any = super()
        pairs = following.compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._hora_averaging.reduce(gradients, variables), variables, strict=True))


class _Passes:
    """Adds up gradients over several calls.

    Args:
        count: calls to one use.
        average: whether the sum is divided by ``count``.
    """

    def __init__(self, count: int, *, average: bool) -> None:
        self.count = count
        self._average = average
        self._sums: list[Any] | None = None
        self._made: Any = None

    def add(self, gradients: list[Any], use: Any, skipped: Any) -> None:
        """Add these, and use the sum if it is complete.

        Args:
            gradients: of this call.
            use: called with the sums.
            skipped: a counter that goes on at calls that use nothing; None: there is none.
        """
        dense = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
        if self._sums is None:
            with tf.init_scope():
                self._made = tf.Variable(0, dtype=tf.int32, trainable=False)
                self._sums = [
                    None if each is None else tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False)
                    for each in dense
                ]
        sums, made = self._sums, self._made
        for total, gradient in zip(sums, dense, strict=True):
            if total is not None and gradient is not None:
                total.assign_add(gradient)
        made.assign_add(1)

        def complete() -> Any:
            divisor = self.count if self._average else 1
            use([None if total is None else total / tf.cast(divisor, total.dtype) for total in sums])
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            made.assign(0)
            return tf.constant(True)

        def incomplete() -> Any:
            if skipped is not None:
                skipped.assign_add(1)
            return tf.constant(False)

        tf.cond(made >= self.count, complete, incomplete)
