"""Words in shared memory on which processes wait for each other: Linux futexes, called through ctypes.

A word counts how many have arrived. The kernel adds to it (``FUTEX_WAKE_OP``), which is atomic and fully
ordered on every processor: whatever was written to shared memory before :func:`arrive` is seen by whoever
has seen the sum. Reading is where processors differ. On x86-64 a load is never ordered before an earlier
load. Arm may do that, so there :func:`fence` follows the last read of a word; it is a futex call that wakes
nobody, which the kernel begins with a full barrier.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Any

__all__ = ["AVAILABLE", "MOST", "arrive", "fence", "mark", "probe", "sleep", "wake"]

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
"""The system call's number: arch/*/entry/syscalls and include/uapi/asm-generic/unistd.h of Linux."""

_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ALL = 2**31 - 1

_ADD_ONE_AND_WAKE_AT = (1 << 28) | (1 << 12)
"""``FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, value)``: the lowest twelve bits are the value."""

_MARK_AND_WAKE = (2 << 28) | (1 << 31) | (30 << 12) | (5 << 24)
"""``FUTEX_OP(FUTEX_OP_OR | FUTEX_OP_OPARG_SHIFT, 30, FUTEX_OP_CMP_GE, 0)``: sets bit 30, and wakes always,
since no word is negative."""

MOST = 2048
"""Arrivals that a word can count: the comparison has twelve bits, of which the first is the sign."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_number = _NUMBERS.get(platform.machine(), -1)
AVAILABLE = _number > 0 and sys.platform == "linux" and ctypes.sizeof(ctypes.c_long) == 8
"""Whether this system has futexes that are known here."""

_ordered = platform.machine() == "x86_64"


def _prototype(library: type[ctypes.CDLL], timeout: type) -> Any:
    function: Any = library(None, use_errno=True)["syscall"]
    function.restype = ctypes.c_long
    function.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        timeout,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    return function


# Waking never waits, so it keeps the interpreter's lock; sleeping gives it to other threads.
_quick = _prototype(ctypes.PyDLL, ctypes.c_long)
_slow = _prototype(ctypes.CDLL, ctypes.POINTER(_Timespec))


def arrive(address: int, nobody: int, *, last: int) -> None:
    """Add one to the word; whoever finds ``last`` there wakes those that sleep on it.

    Args:
        address: of the word.
        nobody: of a word on which nobody sleeps.
        last: the word's value before the last arrival, below :data:`MOST`.
    """
    if _quick(_number, nobody, _WAKE_OP, 0, _ALL, address, _ADD_ONE_AND_WAKE_AT | last) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def sleep(address: int, value: int, seconds: float) -> bool:
    """Sleep while the word holds ``value``; False when the time is over. A signal ends it early, too."""
    time = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if _slow(_number, address, _WAIT, value, ctypes.byref(time), None, 0) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EAGAIN, errno.EINTR):
        return True
    if code == errno.ETIMEDOUT:
        return False
    raise OSError(code, os.strerror(code))


def wake(address: int) -> None:
    """Wake all that sleep on the word."""
    _quick(_number, address, _WAKE, _ALL, 0, None, 0)


def mark(address: int, nobody: int) -> None:
    """Wake all that sleep on the word; whoever is about to, while it holds its old value, does not.

    The word is above any number of arrivals from then on.
    """
    _quick(_number, nobody, _WAKE_OP, 0, _ALL, address, _MARK_AND_WAKE)


def probe(nobody: int) -> None:
    """Raise OSError where a container forbids futexes."""
    if _quick(_number, nobody, _WAKE, 0, 0, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def fence(nobody: int) -> None:
    """After the last read of a word: no read of shared memory that follows is done before it."""
    if not _ordered:
        _quick(_number, nobody, _WAKE, 0, 0, None, 0)
