"""What happens inside the ranks of ``hora verify`` with TensorFlow: records of each step, and changes.

What is in a ``tf.function`` runs as Python, operation by operation, so that it can be looked at; it computes
the same. Optimizers are Keras's: ``hora.keras.verify`` follows their steps.
"""

from __future__ import annotations

import tensorflow as tf

from hora.adapter.recording.recorder import recorder
from hora.tensorflow.verify._follow import Follow

__all__ = ["start"]


def start() -> None:
    """Look on from here on; called once, before the script trains."""
    tf.config.run_functions_eagerly(True)
    Follow(recorder()).start()
