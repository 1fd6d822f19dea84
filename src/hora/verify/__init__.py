"""Does a script train the same model with N workers as with one? ``hora verify`` runs both and compares.

It knows no framework: what happens inside the ranks is recorded and changed by the adapter (``hora.torch``),
by a plan that travels as a file (``hora.core.recording``).
"""

from hora.verify.report import Report
from hora.verify.search import Question, verify

__all__ = ["Question", "Report", "verify"]
