"""The options of ``hora train ssd``."""

from __future__ import annotations

from hora.workloads.scenes.options import Options
from hora.workloads.ssd.config import PROFILES

__all__ = ["add", "check", "profile", "words"]

_options = Options(PROFILES)
add, check, profile, words = _options.add, _options.check, _options.profile, _options.words
