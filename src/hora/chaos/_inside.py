"""The first program of a job, in its namespaces if it has any: prepares them, then becomes the launcher.

``python -I -S _inside.py PARENT READY DISK BYTES NET -- command ...``: DISK is a folder that becomes a small
disk of BYTES bytes (empty: none), NET is 1 for a network of the job's own, READY a descriptor that gets a
byte when all is done. The launcher is told to stop when PARENT ends, in whatever way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""


def main() -> None:
    parent, ready, disk, size, net = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    command = sys.argv[7:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)
    if disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", disk], check=True)
    if net == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # Rules for single ports have to come before that for all local addresses.
        for family in ("-4", "-6"):
            subprocess.run(["ip", family, "rule", "add", "pref", "100", "lookup", "local"], check=True)
            subprocess.run(["ip", family, "rule", "del", "pref", "0"], check=True)
    os.write(ready, b"1")
    os.close(ready)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
