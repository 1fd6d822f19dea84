"""Follows the steps of Keras's optimizers, and changes their gradients and rates where an experiment does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops
from keras.src.optimizers.base_optimizer import BaseOptimizer
from numpy.typing import NDArray

from hora.adapter.recording.recorder import Recorder
from hora.core.errors import HoraError
from hora.keras import _optimizer as distributed
from hora.keras._backend import api, engine
from hora.keras.verify._fit import Fit, around, numbers

__all__ = ["Steps"]


class Steps:
    """The optimizers of one rank."""

    def __init__(self, recorder: Recorder, fit: Fit) -> None:
        self._recorder = recorder
        self._fit = fit
        self._inside = False
        self._used: list[NDArray[Any]] = []
        self._keys: list[int] = []

    def start(self) -> None:
        """Look on from here on."""
        around(BaseOptimizer, "apply", self._apply)
        around(BaseOptimizer, "_clip_gradients", self._clip)
        around(BaseOptimizer, "_get_current_learning_rate", self._rate)
        around(distributed, "reduce_gradients", self._reduce)

    def _apply(self, original: Any) -> Any:
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            recorder = self._recorder
            if not recorder.active or self._inside:
                return original(optimizer, grads, trainable_variables)
            grads = list(grads)
            known = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            pairs = list(zip(grads, known, strict=True))
            if recorder.in_step:
                recorder.end_pass(counts=self._fit.counts or None)
                self._fit.counts.clear()
            elif not recorder.passes:
                recorder.begin_pass()
            names = _names([variable for _, variable in pairs])
            before = dict(zip(names, self._values(pairs), strict=True))
            self._inside = True
            self._keys = [
                id(getattr(variable, "_value", variable)) for each, variable in pairs if each is not None
            ]
            try:
                original(optimizer, grads, [variable for _, variable in pairs])
                rate = float(numbers(optimizer.learning_rate))
            finally:
                self._inside = False
            every = optimizer.gradient_accumulation_steps
            if every and int(numbers(optimizer.iterations)) % every:
                return None
            after = dict(zip(names, self._values(pairs), strict=True))
            with_one = [
                name for name, (gradient, _) in zip(names, pairs, strict=True) if gradient is not None
            ]
            used = dict(zip(with_one, self._used, strict=False))
            self._fit.at_end(
                lambda others: recorder.step(
                    optimizer=optimizer,
                    rates=[rate],
                    gradients=used,
                    before=before,
                    parameters=after,
                    buffers=self._fit.buffers(others),
                )
            )
            return None

        return apply

    def _values(self, pairs: Sequence[tuple[Any, Any]]) -> list[NDArray[Any]]:
        try:
            return [numbers(variable) for _, variable in pairs]
        except HoraError:
            raise
        except Exception as error:  # noqa: BLE001 - each framework has its own for what has no value
            self._recorder.refuse(
                "hora verify cannot look into this step: the optimizer is called inside a program that is "
                f"compiled already ({type(error).__name__}).",
                "Make the step by model.fit, tf.function, jax.jit or hora.spmd in the script itself, below "
                "`import hora...`, and call optimizer.apply in it, not in a loop of the framework such as "
                "lax.scan or tf.while_loop.",
            )

    def _clip(self, original: Any) -> Any:
        def clip(optimizer: Any, grads: Any) -> Any:
            recorder = self._recorder
            if not self._inside:
                return original(optimizer, grads)
            grads = self._changed(list(grads))
            self._used = [numbers(ops.convert_to_tensor(each)) for each in grads]
            if optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue:
                recorder.uses.add("clipping")
                if "clipping" in recorder.apply:
                    return grads
            return original(optimizer, grads)

        return clip

    def _changed(self, grads: list[Any]) -> list[Any]:
        recorder = self._recorder
        if recorder.unclipped and all(key in recorder.raw for key in self._keys):
            grads = [engine.native(recorder.raw[key]) for key in self._keys]
        if recorder.averages:
            arrays = [numbers(ops.convert_to_tensor(each)) for each in grads]
            flat = np.concatenate([array.reshape(-1) for array in arrays])
            flat = numbers(api.allreduce(engine.native(flat), op=api.Average, name="hora.verify"))
            ends = np.cumsum([array.size for array in arrays])[:-1]
            grads = [
                engine.native(part.reshape(array.shape).astype(array.dtype))
                for part, array in zip(np.split(flat, ends), arrays, strict=True)
            ]
        factor = recorder.factor()
        return grads if factor == 1.0 else [each * factor for each in grads]

    def _rate(self, original: Any) -> Any:
        def rate(optimizer: Any) -> Any:
            own = original(optimizer)
            if not self._inside:
                return own
            value = float(numbers(own))
            wanted = self._recorder.rate(value)
            return own if wanted == value else ops.convert_to_tensor(wanted, dtype=str(own.dtype))

        return rate

    def _reduce(self, original: Any) -> Any:
        def reduce(gradients: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
            weight = self._recorder.weight()
            if weight != 1.0:
                gradients = [None if each is None else each * weight for each in gradients]
            reduced: list[Any] = original(gradients, *args, **kwargs)
            return reduced

        return reduce


def _names(variables: Sequence[Any]) -> list[str]:
    """Names that a user knows, each once."""
    names: dict[str, int] = {}
    for variable in variables:
        name = str(variable.path if hasattr(variable, "path") else variable.name)
        names[name if name not in names else f"{name} ({len(names)})"] = 1
    return list(names)
