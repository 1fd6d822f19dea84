"""Which exceptions are what a rank sees of another rank's end."""

from __future__ import annotations

import pytest

from hora.launch._record import looks_like_echo


@pytest.mark.parametrize(
    ("kind", "message", "echo"),
    [
        ("Broken", "The group was aborted.", True),  # what a rank sees whose world is left
        ("Broken", "Rank 3 has not come to the collective within 600 s.", False),
        ("DistBackendError", "Rank 1 has ended.", True),
        ("RuntimeError", "NCCL communicator was aborted on rank 0.", True),
        ("ConnectionRefusedError", "[Errno 111] Connection refused", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ValueError", "The group was aborted.", False),
        ("ValueError", "INTERNAL: Gloo all-reduce failed: Connection reset by peer", True),
        ("JaxRuntimeError", "INTERNAL: Gloo all-gather failed: Connection closed by peer", True),
        ("JaxRuntimeError", "INVALID_ARGUMENT: shapes differ", False),
    ],
)
def test_echoes(kind: str, message: str, *, echo: bool) -> None:
    assert looks_like_echo(kind, message) is echo
