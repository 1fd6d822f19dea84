"""The options of ``hora train maskrcnn``."""

from __future__ import annotations

from hora.workloads.maskrcnn.config import PROFILES
from hora.workloads.scenes.options import Options

__all__ = ["add", "check", "profile", "words"]

_options = Options(PROFILES)
add, check, profile, words = _options.add, _options.check, _options.profile, _options.words
