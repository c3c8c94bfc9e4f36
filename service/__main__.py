"""`python -m service`: the same as the installed command `emberline`."""

from __future__ import annotations

import sys

from service.cli import main

if __name__ == "__main__":
    sys.exit(main())
