"""The module that ``HORA_PRELOAD`` names in each rank of ``hora verify``."""

from __future__ import annotations

from hora.adapter.recording.start import start

start()
