"""Gradients averaged over the ranks: ``DistributedGradientTape``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hora.adapter.ops import ReduceOp
from hora.core.errors import GradientError
from hora.tensorflow._autograph import unconverted
from hora.tensorflow._checks import operation
from hora.tensorflow._collectives import allreduce
from hora.tensorflow._compression import Compressing, Compression
from hora.tensorflow._context import current, required
from hora.tensorflow._grouped import reduce_group
from hora.tensorflow._process_sets import ProcessSet, global_process_set

__all__ = ["Averaging", "DistributedGradientTape", "PartialDistributedGradientTape", "identity"]


@dataclass(eq=False, kw_only=True)
class Averaging:
    """How gradients of all ranks become one, for the tape and for optimizers.

    Attributes:
        function: who does it, for errors.
        compression: what travels.
        sparse_as_dense: whether ``tf.IndexedSlices`` are made dense first.
        op: ``Average``, ``Sum`` or ``Adasum``.
        predivide: factor that divides before the sum and multiplies after it.
        process_set: the ranks that take part; others keep their gradients.
        scale_local: whether gradients of variables that stay local are divided by the number of ranks.
        local: keys of those variables.
        scaled: whether an optimizer that scales losses leaves out steps that overflow.
    """

    function: str
    compression: Compressing = Compression.none
    sparse_as_dense: bool = False
    op: ReduceOp = ReduceOp.Average
    predivide: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    local: set[Any] = field(default_factory=set)
    scaled: bool = False

    @classmethod
    def of(
        cls,
        function: str,
        *,
        op: Any,
        gradient_predivide_factor: float,
        num_groups: int,
        groups: Any,
        **others: Any,
    ) -> Averaging:
        """The arguments of Horovod, checked.

        Raises:
            GradientError: an operation, factor or groups that cannot be.
        """
        found = operation(None, op, function=function)
        if found not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
            raise GradientError(
                f"{function}: gradients are combined by Average, Sum or Adasum, not {found.name}.",
                fix="Write op=hora.Average.",
            )
        if gradient_predivide_factor != 1.0 and found is not ReduceOp.Average:
            raise GradientError(
                f"{function}: gradient_predivide_factor={gradient_predivide_factor} needs op=Average, and "
                f"op is {found.name}.",
                fix="Leave it out, or write op=hora.Average.",
            )
        _check_groups(num_groups if groups is None else groups, function)
        return cls(function=function, op=found, predivide=float(gradient_predivide_factor), **others)

    def register_local(self, variable: Any) -> None:
        """The gradient of this variable stays each rank's own."""
        self.local.add(identity(variable))

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients combined; None stays None.

        Dense ones travel together, in one message for each dtype.

        Args:
            gradients: tensors, ``tf.IndexedSlices`` and None.
            variables: what they are gradients of.
        """
        context = required(self.function)
        size = len(self.process_set.members)
        alone = size == 1 or current.rank() not in self.process_set.members
        found = [self._as_dense(gradient) for gradient in gradients]
        dense = []
        for place, (gradient, variable) in enumerate(zip(found[:], variables, strict=True)):
            if gradient is None:
                continue
            if identity(variable) in self.local:
                found[place] = _scaled(gradient, 1 / current.size()) if self.scale_local else gradient
                continue
            if alone:
                continue
            if isinstance(gradient, tf.IndexedSlices):
                found[place] = self._sparse(gradient)
                continue
            dense.append(place)
        if dense:
            targets = [variables[place] for place in dense]
            watched = all(hasattr(each, "shape") and hasattr(each, "dtype") for each in targets)
            training = context.steps_of(targets, self.process_set, scaled=self.scaled) if watched else None
            reduced = reduce_group(
                [found[place] for place in dense],
                op=self.op,
                compression=self.compression,
                prescale_factor=1 / self.predivide,
                postscale_factor=self.predivide,
                process_set=self.process_set,
                training=training,
                names=() if training is None else training.names,
            )
            for place, gradient in zip(dense, reduced, strict=True):
                found[place] = gradient
        return found

    def _as_dense(self, gradient: Any) -> Any:
        slices = self.sparse_as_dense and isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if slices else gradient

    def _sparse(self, gradient: tf.IndexedSlices) -> Any:
        if self.op is ReduceOp.Adasum:
            raise GradientError(
                f"{self.function}: Adasum has no sparse gradients.",
                fix="Write sparse_as_dense=True.",
            )
        return allreduce(gradient, op=self.op, compression=self.compression, process_set=self.process_set)


@unconverted
def DistributedGradientTape(  # noqa: N802, PLR0917 - Horovod's name, and its order of arguments
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A gradient tape whose ``gradient()`` gives the average over the ranks.

        with hora.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model(x, training=True), y)
        gradients = tape.gradient(loss, model.trainable_variables)

    A tape that has recorded already can be wrapped, too. Works eagerly and inside a ``tf.function``; that
    must not be compiled by XLA (``jit_compile=True``).

    Args:
        gradtape: the tape; it stays usable as it is.
        device_dense: accepted for scripts written for Horovod.
        device_sparse: likewise.
        compression: what travels; see :class:`Compression`.
        sparse_as_dense: make ``tf.IndexedSlices`` dense before; otherwise they are gathered.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: divides gradients before they are added up and multiplies them after, for
            ranges that the sum would leave.
        num_groups: accepted: all gradients of a dtype travel together in any case.
        groups: likewise.
        process_set: the ranks that take part; on others ``gradient()`` gives their own gradients.
        scale_local_gradients: whether gradients of variables of :meth:`register_local_source` are divided by
            the number of workers, as those of others are in effect.

    Returns:
        A tape of a subclass of the given one's class, with ``register_local_source(variable)``.

    Raises:
        GradientError: arguments that do not go together.
    """
    averaging = Averaging.of(
        "DistributedGradientTape",
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        scale_local=scale_local_gradients,
    )
    plain = type(gradtape)
    if not issubclass(plain, tf.GradientTape):
        raise GradientError(
            f"DistributedGradientTape takes a tf.GradientTape, not {plain.__name__}.",
            fix="Write hora.DistributedGradientTape(tf.GradientTape()).",
        )
    kind: Any = type(plain.__name__, (_Distributed, plain), {})
    tape: Any = kind.__new__(kind)
    tape.__dict__.update(gradtape.__dict__)
    tape._averaging = averaging
    return tape


def PartialDistributedGradientTape(  # noqa: N802, PLR0917 - Horovod's name, and its order of arguments
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | None = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A :func:`DistributedGradientTape` that leaves the variables of some layers to each rank.

    Args:
        gradtape: as there, and so are all others but ``local_layers``.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        op: see there.
        gradient_predivide_factor: see there.
        num_groups: see there.
        groups: see there.
        process_set: see there.
        local_layers: a Keras layer or several, whose gradients stay local.
        scale_local_gradients: see there.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


class _Distributed(tf.GradientTape):  # type: ignore[misc]
    """What a distributed tape has on top of its class."""

    _averaging: Averaging

    @unconverted
    def gradient(
        self, target: Any, sources: Any, *args: Any, use_generic_names: bool = False, **kwargs: Any
    ) -> Any:
        """The gradients of ``target``, combined over the ranks; arguments as those of ``tf.GradientTape``.

        ``use_generic_names`` is accepted for scripts written for Horovod.
        """
        gradients = super().gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients)
        reduced = self._averaging.reduce(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, reduced) if tf.nest.is_nested(gradients) else reduced[0]

    def register_local_source(self, source: Any) -> None:
        """Gradients of this variable stay each rank's own."""
        self._averaging.register_local(source)


def identity(variable: Any) -> Any:
    """What tells variables apart, the same for a Keras variable and what it holds."""
    inner = getattr(variable, "_value", variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)


def variables_of(layers: Any) -> list[Any]:
    """The trainable variables of a Keras layer, or of several."""
    if layers is None:
        return []
    several: Iterable[Any] = layers if isinstance(layers, Iterable) else [layers]
    return [variable for layer in several for variable in layer.trainable_weights]


def _scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _check_groups(groups: Any, function: str) -> None:
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups >= 0:
            return
    elif isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) for group in groups):
        return
    raise GradientError(
        f"{function}: groups={groups!r} is neither a number of groups nor a list of lists of variables.",
        fix="Leave it out: all gradients travel together.",
    )
