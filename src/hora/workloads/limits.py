"""What any workload can check before a worker is started."""

from __future__ import annotations

from hora.core.errors import GlobalBatchError
from hora.core.plural import plural

__all__ = ["check_batch"]


def check_batch(batch: int, *, workers: int, samples: int, noun: str) -> None:
    """Find a global batch that cannot be trained with.

    Args:
        batch: the global batch, samples per step of all workers.
        workers: that share it, in equal parts.
        samples: of the training data.
        noun: what one sample is called.

    Raises:
        GlobalBatchError: it does not divide among the workers, or there are too few samples for it.
    """
    if batch % workers:
        below, above = batch // workers * workers, (batch // workers + 1) * workers
        raise GlobalBatchError(
            f"--global-batch {batch} does not divide among {workers} {plural(workers, 'worker')}.",
            fix=f"Use {f'{below} or ' if below else ''}{above}, or another -n.",
        )
    if batch > samples:
        raise GlobalBatchError(
            f"--global-batch {batch} is larger than the {samples} training {plural(samples, noun)}.",
            fix=f"Use at most {samples // workers * workers}."
            if workers <= samples
            else f"Start at most {samples} {plural(samples, 'worker')}.",
        )
