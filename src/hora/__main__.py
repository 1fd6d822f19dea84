"""``python -m hora``: the same as the ``hora`` command."""

from hora.cli import main

raise SystemExit(main())
