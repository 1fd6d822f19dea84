"""Replaces a rank by another program, as in ``horovodrun -np 2 pytest tests``.

The program keeps what ties the rank to the launcher: its process, its variables, its descriptors.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    for key in ("HORA_STORE_FD", "HORA_STATUS_FD", "HORA_GUARD_FD", "HORA_GUARD_BOARD"):
        if key in os.environ:
            os.set_inheritable(int(os.environ[key]), True)
    os.execv(sys.argv[1], sys.argv[1:])
