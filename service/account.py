"""The account of a call of Generate or Complete: who it is, and what it came to.

What lives here: what is noted of a call on its way, the ids that every line logged on its behalf carries, and what is
told at its end. What must not: text of users (the label is theirs, and bounded), and anything that a call's outcome
depends on: whatever raises in here is logged, and the call ends as it would have.

At its end a call leaves one line, event `request finished`:

| field | what it tells |
|---|---|
| `request_id`, `trace_id` | the caller's label, and the trace it is part of where there is one (both on every line) |
| `client` | the name that its credentials stand for, where `auth.py` has bound one |
| `method`, `n` | the rpc; sequences asked for |
| `status`, `reason`, `error` | name of the gRPC code; ErrorInfo's reason and the error's class where it ended badly |
| `finish` | why its last sequence ended |
| `num_*_tokens` | of the prompt, of these from the prefix cache, resumed, put out |
| `queue_ms`, `prefill_ms`, `decode_ms`, `total_ms` | until its first step; from there to its first output; the rest |
| `engine`, `num_attempts`, `num_deaths` | the replica that had it last; times it was sent to one; engines it saw die |

and the same in metrics, in its trace, and as load in its trailing metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from scheduler import logs
from service import status
from service.call_record import CallRecord, Timeline
from service.errors import CallError, DrainingError, EngineDeadError, EngineStartingError, QueueFullError
from service.metrics.recorder import Metrics
from service.telemetry import CallTrace, Tracing
from service.totals import Totals

DEADLINE_SLACK_S = 0.1
"""For a request's way here."""
_QUIET_ERRORS = (DrainingError, EngineDeadError, EngineStartingError, QueueFullError)
"""These come in crowds, and the crowd's cause has a record of its own: one line for each would be a flood."""
_FAILURE_CODES = frozenset({"INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN"})
"""What a balancer should take for this server's trouble rather than the caller's."""


class CallContext(Protocol):
    """What is asked of a call's gRPC context."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...

    def set_trailing_metadata(self, trailing_metadata: Any, /) -> None: ...

    def time_remaining(self) -> float | None:
        """Until its deadline; None: it has none."""


@dataclass(slots=True)
class Account:
    """What is noted of one call on its way."""

    label: str = ""
    started_s: float = 0.0
    operation: str = "text_completion"
    num_sequences: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_resumed_tokens: int = 0
    num_output_tokens: int = 0
    finish: str | None = None
    has_output: bool = False
    timeline: Timeline = field(default_factory=Timeline)
    """Its stream's, once it has one."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    code: str
    reason: str = ""
    error: str = ""
    is_quiet: bool = False


class Accounts:
    """Opens one for each call and closes it."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        totals: Totals,
        metrics: Metrics,
        tracing: Tracing,
        load_metadata: Callable[[], tuple[tuple[str, bytes], ...]],
    ) -> None:
        """`load_metadata`: the server's load, as trailing metadata tells it."""
        self._clock = clock
        self._totals = totals
        self._metrics = metrics
        self._tracing = tracing
        self._load_metadata = load_metadata
        self._failed: set[str] = set()

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        label: str,
        context: CallContext | None,
        *,
        is_chat: bool = False,
    ) -> Iterator[Account]:
        """One call, from its first moment on, in the task that answers it. `label`: the caller's, which goes into logs
        and traces as it is; one is made if it is empty. `context`: None for a caller in here.
        """
        account = Account(label or uuid.uuid4().hex, self._clock())
        if is_chat:
            account.operation = "chat"
        totals = self._totals
        totals.num_live_calls += 1
        trace = self._begin(method, account, context)
        outcome = _Outcome("OK")
        try:
            yield account
        except (asyncio.CancelledError, GeneratorExit):
            outcome = _Outcome("DEADLINE_EXCEEDED" if _is_late(context) else "CANCELLED", error="Cancelled")
            raise
        except CallError as error:
            code, reason = status.code_and_reason(error)
            name = type(error).__name__.removesuffix("Error")
            outcome = _Outcome(code, reason, name, isinstance(error, _QUIET_ERRORS))
            raise
        except Exception:
            outcome = _Outcome("INTERNAL", "INTERNAL", "Internal")
            raise
        finally:
            totals.num_live_calls -= 1
            totals.num_finished_calls += 1
            totals.num_failed_calls += outcome.code in _FAILURE_CODES
            self._end(_record(method, account, outcome, self._clock()), outcome, trace, context)

    def refused(self, error: CallError) -> None:
        """A call was refused before its message was read: it is counted, and has neither a line nor a trace. In a crowd
        these would be most of what a refusal costs.
        """
        code, reason = status.code_and_reason(error)
        self._totals.num_finished_calls += 1
        self._totals.num_failed_calls += code in _FAILURE_CODES
        self._metrics.call_refused(code, reason)

    def has_output(self, account: Account) -> None:
        """The call has output; the first time counts."""
        if not account.has_output and account.timeline.first_output_s is not None:
            account.has_output = True
            self._metrics.first_token(account.timeline.first_output_s - account.started_s)

    def _begin(self, method: str, account: Account, context: CallContext | None) -> CallTrace | None:
        trace = None
        with self._guarded("begin"):
            # Never unbound: the task is the call's own, and its context ends with it.
            structlog.contextvars.bind_contextvars(request_id=account.label)
            trace = self._tracing.begin(method, () if context is None else context.invocation_metadata() or ())
            if trace.trace_id:
                structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)
        return trace

    def _end(
        self,
        call: CallRecord,
        outcome: _Outcome,
        trace: CallTrace | None,
        context: CallContext | None,
    ) -> None:
        self._metrics.call_finished(call)
        with self._guarded("load report"):
            if context is not None:
                context.set_trailing_metadata(self._load_metadata())
        with self._guarded("trace"):
            if trace is not None:
                trace.end(call)
        with self._guarded("log"):
            log = logs.get_logger()
            (log.debug if outcome.is_quiet else log.info)("request finished", **_line(call, outcome))

    @contextlib.contextmanager
    def _guarded(self, part: str) -> Iterator[None]:
        """Told once for each place: what fails for one call fails for all."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no call may end otherwise because its account could not be kept
            if part not in self._failed:
                self._failed.add(part)
                logs.get_logger().error("account not kept", part=part, **logs.describe(error))


def _is_late(context: CallContext | None) -> bool:
    """Whether a call that was cancelled is over because of its deadline. The caller, who begins to count earlier, may
    have found out first and have cancelled.
    """
    left_s = None if context is None else context.time_remaining()
    return left_s is not None and left_s <= DEADLINE_SLACK_S


def _record(method: str, account: Account, outcome: _Outcome, ended_s: float) -> CallRecord:
    return CallRecord(
        method=method,
        label=account.label,
        code=outcome.code,
        reason=outcome.reason,
        finish=(account.finish or "").lower(),
        started_s=account.started_s,
        ended_s=ended_s,
        timeline=account.timeline,
        operation=account.operation,
        num_sequences=account.num_sequences,
        num_prompt_tokens=account.num_prompt_tokens,
        num_cached_tokens=account.num_cached_tokens,
        num_resumed_tokens=account.num_resumed_tokens,
        num_output_tokens=account.num_output_tokens,
    )


def _line(call: CallRecord, outcome: _Outcome) -> dict[str, Any]:
    timeline = call.timeline
    fields: dict[str, Any] = {
        "request_id": call.label,
        "method": call.method,
        "status": call.code,
        "finish": call.finish.upper() or None,
        "n": call.num_sequences,
        "num_prompt_tokens": call.num_prompt_tokens,
        "num_cached_tokens": call.num_cached_tokens,
        "num_resumed_tokens": call.num_resumed_tokens,
        "num_output_tokens": call.num_output_tokens,
        "queue_ms": _ms(call.queue_s),
        "prefill_ms": _ms(call.prefill_s),
        "decode_ms": _ms(call.decode_s),
        "total_ms": _ms(call.total_s),
        "engine": timeline.attempts[-1][1] if timeline.attempts else None,
        "num_attempts": len(timeline.attempts),
        "num_deaths": len(timeline.deaths),
    }
    if outcome.reason:
        fields["reason"] = outcome.reason
    if outcome.error:
        fields["error"] = outcome.error
    return fields


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
