"""What a rank tells the launcher outside of any collective: that it can stop, saved, has stopped.

A notice is one line of JSON on a pipe that all ranks of a job share. Nobody waits for it, and it is
there whether the guard watches or not. Without a launcher of ours a notice goes nowhere.
"""

from __future__ import annotations

import json
import os
import stat

__all__ = ["EXIT_STOPPED", "StopForNow", "tell"]

EXIT_STOPPED = 75
"""Exit code of ranks, and of a job, that stopped because they were asked to, with their state saved.

``EX_TEMPFAIL`` of <sysexits.h>: "try again later".
"""

VARIABLE = "HORA_NOTICES"


class StopForNow(SystemExit):
    """Ends a rank that was asked to stop, with exit code 75; its state is saved."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


def tell(kind: str, **details: int) -> bool:
    """Tell the launcher; whether it could be told.

    Args:
        kind: ``edge`` (this rank stops at a step edge when it is asked to), ``saved`` (a checkpoint of
            ``step`` is committed) or ``stopped`` (it ends at ``step``, with its state saved).
        details: what belongs to it, together less than 4096 bytes (PIPE_BUF), so that lines stay whole.
    """
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    if not (number.isdecimal() and inode.isdecimal()):
        return False
    # Of an elastic job's worker the number lasts, while its rank may change.
    who = int(os.environ.get("HORA_WORKER") or os.environ["HORA_RANK"])
    line = json.dumps({"notice": kind, "rank": who, **details}) + "\n"
    try:
        there = os.fstat(int(number))
        # A script that closes all descriptors may have a file of its own under this number by now.
        if not stat.S_ISFIFO(there.st_mode) or there.st_ino != int(inode):
            return False
        os.write(int(number), line.encode())
    except OSError:  # closed, or the launcher has gone, and this rank is about to be killed
        return False
    return True
