"""Exit statuses of the callers' commands. (`emberline serve` has those of the design.)"""

from __future__ import annotations

from typing import Final

DONE: Final = 0
"""`generate`: the answer is whole. `health`: SERVING."""
FAILED: Final = 1
"""`generate`: the server answered with an error. `health`: it does not serve."""
UNREACHABLE: Final = 2
"""No server, or none that serves, could be reached."""
USAGE: Final = 64
"""Wrong flags; EX_USAGE of sysexits.h, since 2 is taken."""
INTERRUPTED: Final = 130
"""Ctrl-C; 128 + SIGINT."""
PIPE_CLOSED: Final = 141
"""Nobody reads the output any more; 128 + SIGPIPE."""
