"""Checks of the numbers that optimizers and rules are given."""

from __future__ import annotations

from hora.core.errors import UsageError

__all__ = ["batch_ratio", "check_ranges"]


def check_ranges(name: str, values: dict[str, float], examples: dict[str, str]) -> None:
    """Each is at least 0; what decays an average is below 1.

    Args:
        name: of the optimizer.
        values: by the name of the argument.
        examples: a line to write, for each.

    Raises:
        UsageError: one is out of its range, or not a number.
    """
    for argument, value in values.items():
        below_one = argument in DECAYS
        if value >= 0 and not (below_one and value >= 1):
            continue
        reach = "from 0 to below 1" if below_one else "at least 0"
        raise UsageError(
            f"{name} takes {argument} {reach}, not {value}.", fix=f"Write for example {examples[argument]}."
        )


def batch_ratio(batch: int, base_batch: int) -> float:
    """How many times larger a global batch is.

    Raises:
        UsageError: one that is empty.
    """
    if batch < 1 or base_batch < 1:
        raise UsageError(
            f"A global batch has at least 1 sample: batch={batch}, base_batch={base_batch}.",
            fix="Give the number of samples per step over all workers.",
        )
    return batch / base_batch


DECAYS = ("momentum", "beta1", "beta2")
