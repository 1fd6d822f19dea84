"""Imported before the script in each rank of ``hora chaos``, by ``HORA_PRELOAD``."""

from __future__ import annotations

import importlib.util
import os

from hora.core.journal import BELL, ring
from hora.core.settings import load

_settings = load()
assert _settings.chaos is not None, "hora chaos sets both"
ring(_settings.chaos / BELL, b"%d" % os.getpid())
if importlib.util.find_spec("torch") is not None:
    from hora.torch.chaos._steps import Steps

    _worker = _settings.worker
    Steps(
        _settings.chaos,
        worker=(_settings.rank or 0) if _worker is None else _worker,
        attempt=_settings.attempt or 1,
    ).start()
