"""`emberline health`: what a server says of itself, for people, probes and scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from emberline.client import Client, EmberlineError, errors
from emberline.client.connection import HEALTH_SERVICE
from emberline.commands import connect
from emberline.commands import exit as status

DEFAULT_TIMEOUT_S = 5.0
SERVING = "SERVING"


def run(arguments: Sequence[str]) -> int:
    """Tell whether a server serves (exit status 0 yes, 1 no, 2 unreachable)."""
    options = _parser().parse_args(arguments)
    try:
        settings = connect.settings(options)
        client = Client(**settings, attempts_max=1)  # whoever probes tries again by its own rules
    except (OSError, ValueError) as error:
        connect.complain(str(error))
        return status.USAGE
    with client:
        try:
            if options.watch:
                return _watch(client, options.service)
            state = client.health(options.service, timeout_s=options.timeout)
        except KeyboardInterrupt:
            return status.INTERRUPTED
        except (OSError, ValueError) as error:  # the token's file, since
            connect.complain(str(error))
            return status.USAGE
        except EmberlineError as error:
            connect.complain(error)
            return _status_of(error)
    print(state)
    return status.DONE if state == SERVING else status.FAILED


def _watch(client: Client, service: str) -> int:
    """Each change, until Ctrl-C or the server's end; the status is that of the last one."""
    last = ""
    try:
        for state in client.watch_health(service):
            last = state
            print(state, flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return status.DONE if last == SERVING else status.FAILED
    connect.complain("the server has ended the watch")
    return status.UNREACHABLE


def _status_of(error: EmberlineError) -> int:
    unreachable = isinstance(error, errors.UnavailableError | errors.DeadlineExceededError)
    return status.UNREACHABLE if unreachable else status.FAILED


def _parser() -> connect.Parser:
    parser = connect.Parser(prog="emberline health", description="Asks grpc.health.v1.Health, as probes do.")
    parser.add_argument(
        "service",
        nargs="?",
        default=HEALTH_SERVICE,
        help="a service's name, or `readiness`, `liveness`, '' (default: %(default)s)",
    )
    parser.add_argument("--watch", action="store_true", help="print each change until interrupted")
    parser.add_argument(
        "--timeout",
        type=connect.positive,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds for an answer, without --watch (default: %(default)g)",
    )
    connect.add_flags(parser)
    return parser
