"""The flags that say where the servers are and how to speak to them, and what they come to.

What lives here: parsing shared by the commands that call a server. What must not: calls.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from emberline.client import EmberlineError, Tls
from emberline.client.connection import DEFAULT_ADDRESS
from emberline.commands.exit import USAGE


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, with the callers' exit status."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: error: {message} (see --help)\n")


def add_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """The flags themselves; the environment holds defaults of those that are the same for all calls."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--address",
        default=environ.get("EMBERLINE_ADDRESS", DEFAULT_ADDRESS),
        metavar="HOST:PORT[,…]",
        help="of the server, or of several to choose from (default: $EMBERLINE_ADDRESS, else %(default)s)",
    )
    group.add_argument("--tls", action="store_true", help="TLS with the system's authorities; the next three imply it")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="authorities to trust instead, in PEM")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="this client's certificate chain, for mutual TLS")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    group.add_argument("--tls-server-name", metavar="NAME", help="what the server's certificate is for")
    group.add_argument("--token-file", type=Path, metavar="FILE", help="a bearer token; read again before each call")
    group.add_argument(
        "--allow-plaintext-token", action="store_true", help="send it without TLS to hosts other than this one"
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `Client`. Raises OSError or ValueError for a token file that is of no use."""
    tls = None
    files = (arguments.tls_ca, arguments.tls_cert, arguments.tls_key)
    if arguments.tls or any(path is not None for path in files):
        tls = Tls(*files)
    token = None
    if arguments.token_file is not None:
        token = _token_of(arguments.token_file)
        token()  # now, while a mistake can be told plainly
    return {
        "target": arguments.address,
        "tls": tls,
        "server_name": arguments.tls_server_name,
        "token": token,
        "allow_plaintext_token": arguments.allow_plaintext_token,
    }


def _token_of(path: Path) -> Callable[[], str]:
    def read() -> str:
        token = path.read_text().strip()
        if not token.isascii() or not token.isprintable() or not token or " " in token:
            raise ValueError(f"{path}: expected one token: printable ASCII without spaces")
        return token

    return read


def positive(text: str) -> float:
    """A number of seconds above zero, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


positive.__name__ = "positive number"  # argparse puts it into its message


def complain(error: EmberlineError | str) -> None:
    """One line on stderr, and one for each field at fault."""
    print(f"emberline: error: {error}", file=sys.stderr)
    if isinstance(error, EmberlineError):
        for violation in error.field_violations:
            print(f"  {violation.field}: {violation.description}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
