"""Starts the agent on another host, from the same copy of Hora that its supervisor is."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.insert(0, root)
    from hora.launch._agent import main

    main()
