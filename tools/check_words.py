"""Hold the text of the repository to the house's words: no synonyms in prose, names or messages.

A word of another project's interface is fine where that project is named, so only the words that have
no such use are listed here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SYNONYMS = {
    r"\bworld[ -]size\b": "size",
    r"\blocal world size\b": "local size",
    r"\bminibatch(es)?\b": "micro-batch (or global batch)",
    r"\bmini-batch(es)?\b": "micro-batch (or global batch)",
    r"\bmicrobatch(es)?\b": "micro-batch",
    r"\bexperiment name\b": "run",
    r"\bprocess group set\b": "process set",
}
SUFFIXES = {".py", ".md", ".toml", ".html", ".txt"}
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Print each synonym with its place; 1 if there is any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    found = 0
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix not in SUFFIXES or path == Path(__file__) or not path.exists():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, word in SYNONYMS.items():
                if match := re.search(pattern, line, re.IGNORECASE):
                    print(f"{name}:{number}: {match[0]!r}: the word here is {word!r}")
                    found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
