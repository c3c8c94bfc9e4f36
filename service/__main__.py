"""`python -m service serve` and `autopsy`: the same as `emberline serve` and `autopsy`, without the script."""

from __future__ import annotations

import sys

from service.cli import main

if __name__ == "__main__":
    sys.exit(main())
