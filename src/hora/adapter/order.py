"""The order of samples: a pure function of seed, epoch and position, cut into global batches.

No generator of numpy or of a framework takes part, so the order stays the same with every version of them,
in every framework, and with every number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import GlobalBatchError, UsageError
from hora.core.plural import plural

__all__ = [
    "Epochs",
    "Step",
    "Tail",
    "check_global_batch",
    "check_tail",
    "epoch_order",
    "positions",
    "sample_seed",
    "share",
]

Tail = Literal["drop", "pad", "uneven"]
"""What happens to the samples left when the global batch does not divide the data set."""

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; these
# constants are those of Vigna's public-domain splitmix64.c (variant 13 of Stafford's mixers).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def epoch_order(count: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """The sample at each position of an epoch: int64 of shape ``(count,)``, a permutation.

    Samples are sorted by a 64-bit hash of (seed, epoch, sample). The hash is one-to-one in the sample,
    so there are no ties.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(_stream(seed, epoch))
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_MIX_1)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_MIX_2)
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def sample_seed(*, seed: int, epoch: int, position: int) -> int:
    """A seed of 64 bits for what is random in the sample at this position: crops, flips, noise."""
    return _mix(_stream(seed, epoch) ^ _mix(position + _GOLDEN))


def _stream(seed: int, epoch: int) -> int:
    return _mix(_mix(seed + _GOLDEN) + epoch * _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Step:
    """One global batch: its positions ``start`` to ``stop - 1``, and what the epoch has used up after it."""

    start: int
    stop: int
    consumed: int


class Epochs:
    """Where a training is in its data: epochs, cut into global batches; one integer at any world.

    A subclass hands out the batches: it calls :meth:`_begin`, for each of the :meth:`_steps` that are left
    :meth:`_hand_out`, then :meth:`_end`.

    Attributes:
        samples: number of samples in the data set.
        global_batch: samples per step over all workers.
        padded: samples that ``tail="pad"`` repeats at the end of each epoch, over all workers.
    """

    def __init__(self, *, samples: int, global_batch: int, seed: int, shuffle: bool, tail: Tail) -> None:
        self.samples = samples
        self.global_batch = global_batch
        self.padded = -samples % global_batch if tail == "pad" else 0
        self._seed = seed
        self._shuffle = shuffle
        self._tail = tail
        self._epoch = 0
        self._consumed = 0
        self._current = global_batch
        self._resumed = False  # the next iter() goes on inside an epoch
        self._inside = False  # a batch is with the caller
        self._serial = 0

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the next one; the first is 0."""
        return self._epoch + (self._consumed >= self.samples and not self._inside)

    @property
    def samples_now(self) -> int:
        """Samples of the current global batch, over all workers."""
        return self._current

    @property
    def samples_per_epoch(self) -> int:
        """Samples that a whole epoch hands out to all workers: without those dropped, with those padded."""
        return self.samples if self._tail == "uneven" else len(self) * self.global_batch

    @property
    def remaining(self) -> int:
        """Steps that the next ``iter()`` will make: fewer than ``len()`` after a resume inside an epoch."""
        return len(self._steps(self._consumed if self._resumed else 0))

    def __len__(self) -> int:
        """Steps per epoch."""
        return len(self._steps(0))

    def state_dict(self) -> dict[str, int]:
        """Where the training is, as one integer: samples used since the start, ended epochs rounded up.

        It counts what was handed out, not what was loaded ahead, and is valid with any number of
        workers and any global batch.
        """
        return {"position": self._epoch * self.samples + self._consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state`` was taken: the next ``iter()`` gives the rest of that epoch.

        Raises:
            UsageError: ``state`` holds no position.
        """
        position = state.get("position")
        if not isinstance(position, int) or position < 0:
            raise UsageError(
                f"{dict(state)!r} is not the state of a data loader.",
                fix="Give what loader.state_dict() returned, such as {'position': 51200}.",
            )
        self._epoch, self._consumed = divmod(position, self.samples)
        self._resumed, self._inside = True, False
        self._serial += 1

    def _begin(self) -> int:
        """The next epoch begins, or goes on after a resume; a number for :meth:`_hand_out`."""
        if self._consumed and not self._resumed:
            self._epoch, self._consumed = self._epoch + 1, 0
        self._resumed = False
        self._serial += 1
        return self._serial

    def _samples_in_order(self) -> NDArray[np.int64]:
        """The sample at each position of the epoch that has begun."""
        return epoch_order(self.samples, seed=self._seed, epoch=self._epoch, shuffle=self._shuffle)

    def _check(self, serial: int) -> None:
        """Raise UsageError if another epoch has begun since this one."""
        if serial != self._serial:
            raise UsageError(
                "This iterator of a data loader is stale: iter() or load_state_dict() came after it.",
                fix="Use one iterator at a time, or make a second data loader.",
            )

    def _hand_out(self, step: Step) -> None:
        """The caller gets this global batch now."""
        self._current = step.stop - step.start
        self._consumed, self._inside = step.consumed, True

    def _end(self) -> None:
        """The caller has done with the last batch of the epoch."""
        self._inside = False

    def _indices(self, serial: int, *, rank: int, size: int) -> Iterator[NDArray[np.int64]]:
        """Which samples a rank gets in each step of the epoch that has begun; each is handed out."""
        order = self._samples_in_order()
        for step in self._steps(self._consumed):
            self._check(serial)
            self._hand_out(step)
            yield positions(order, *share(step.start, step.stop, rank=rank, size=size))
        self._check(serial)
        self._end()

    def _steps(self, consumed: int) -> list[Step]:
        """The global batches from position ``consumed`` to the epoch's end."""
        count, batch = self.samples - consumed, self.global_batch
        number = count // batch if self._tail == "drop" else math.ceil(count / batch)
        steps = []
        for index in range(number):
            start = consumed + index * batch
            stop = start + batch if self._tail == "pad" else min(start + batch, self.samples)
            # After its last step an epoch is used up, whatever its tail was.
            steps.append(Step(start, stop, self.samples if index == number - 1 else stop))
        return steps


def share(start: int, stop: int, *, rank: int, size: int) -> tuple[int, int]:
    """This rank's contiguous part of positions ``start`` to ``stop - 1``; the first ranks take the rest."""
    part, rest = divmod(stop - start, size)
    first = start + rank * part + min(rank, rest)
    return first, first + part + (rank < rest)


def positions(order: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """The samples there; positions past the end begin again at the epoch's start."""
    if stop <= len(order):
        return order[start:stop]
    return order[np.arange(start, stop) % len(order)]


def check_tail(tail: str) -> None:
    """Raise UsageError for an unknown tail."""
    if tail not in ("drop", "pad", "uneven"):
        raise UsageError(f"tail={tail!r} is unknown.", fix="Write tail='drop', tail='pad' or tail='uneven'.")


def check_global_batch(global_batch: int, *, samples: int, size: int, tail: str, uneven: bool) -> None:
    """Raise GlobalBatchError for a global batch that does not fit the workers or the data set.

    Args:
        global_batch: samples per step over all workers.
        samples: in the data set.
        size: number of workers.
        tail: see :data:`Tail`.
        uneven: whether workers may get different numbers of samples.
    """
    workers = f"{size} {plural(size, 'worker')}"
    held = f"{samples} {plural(samples, 'sample')}"
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise GlobalBatchError(
            f"global_batch={global_batch!r} is not a positive whole number of samples.",
            fix=f"Write for example global_batch={32 * size}.",
        )
    if samples == 0:
        raise GlobalBatchError(
            "The data set is empty.", fix="Check the path or filter that it was made with."
        )
    if samples < size:
        raise GlobalBatchError(
            f"The data set has {held}, fewer than the {workers}.",
            fix=f"Start at most {samples} {plural(samples, 'worker')}: hora run -n {samples} ...",
        )
    if global_batch % size and not uneven:
        below, above = global_batch // size * size, (global_batch // size + 1) * size
        choice = f"{below} or {above}" if below else f"{above}"
        raise GlobalBatchError(
            f"global_batch={global_batch} does not divide among {workers}.",
            fix=f"Use {choice}, or pass tail='uneven'.",
        )
    if global_batch > samples and tail == "drop":
        raise GlobalBatchError(
            f"global_batch={global_batch} is larger than the data set, which has {held}, so that "
            "tail='drop' would leave nothing.",
            fix=f"Use at most {samples // size * size}, or pass tail='uneven'.",
        )
