"""The one line of a finished request.

What lives here: what is noted of a call on its way, and the record at its end. What must not: text of users (the label
is theirs, and bounded), and anything that a call's outcome depends on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from scheduler import logs
from service.errors import CallError, DrainingError, EngineDeadError, EngineStartingError, QueueFullError

_QUIET_ERRORS = (DrainingError, EngineDeadError, EngineStartingError, QueueFullError)
"""These come in crowds, and the crowd's cause has a record of its own: one line for each would be a flood."""

CLIENT: ContextVar[str | None] = ContextVar("client", default=None)
"""The name of the token that the present call came with, set before its handler runs."""


@dataclass(slots=True)
class Account:
    """What the one line of a finished request tells."""

    label: str = ""
    started_s: float = 0.0
    submitted_s: float | None = None
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    num_output_tokens: int = 0
    finish: str | None = None


@contextlib.contextmanager
def one_line(account: Account, clock: Callable[[], float]) -> Iterator[None]:
    """Log the request's one line, however it ends. No text of the user is in it, apart from the label."""
    outcome: dict[str, Any] = {}
    client = CLIENT.get()
    caller = {} if client is None else {"client": client}
    log = logs.get_logger().info
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        outcome = {"error": "Cancelled"}
        raise
    except CallError as error:
        outcome = {"error": type(error).__name__.removesuffix("Error")}
        if isinstance(error, _QUIET_ERRORS):
            log = logs.get_logger().debug
        raise
    except Exception:
        outcome = {"error": "Internal"}
        raise
    finally:

        def ms(until_s: float | None) -> float | None:
            return None if until_s is None else round((until_s - account.started_s) * 1000, 1)

        log(
            "request finished",
            request_id=account.label,
            **caller,
            finish=account.finish,
            **outcome,
            num_prompt_tokens=account.num_prompt_tokens,
            num_cached_tokens=account.num_cached_tokens,
            num_resumed_tokens=account.num_resumed_tokens,
            num_output_tokens=account.num_output_tokens,
            submitted_ms=ms(account.submitted_s),
            first_token_ms=ms(account.first_token_s),
            total_ms=ms(clock()),
        )
