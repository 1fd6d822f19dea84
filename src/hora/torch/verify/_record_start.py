"""Imported before the script in each rank of ``hora verify``, by ``HORA_PRELOAD``: starts the recording."""

from __future__ import annotations

from hora.core.recording import Plan
from hora.core.settings import load
from hora.torch.verify._record import Recorder

_settings = load()
assert _settings.verify is not None, "the launcher sets both"
recorder = Recorder(Plan.read(_settings.verify), rank=_settings.rank or 0, size=_settings.size or 1)
recorder.start()
