"""What can go wrong with one call, as exceptions.

What lives here: the classes that the service raises at a caller, with the few values their status needs. What must
not: gRPC codes (`status.py` holds the only table), exception text of others, text of users. A new instance is raised
for each call: an exception shared by many streams would grow its traceback with each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.errors import EmberlineError


class CallError(EmberlineError):
    """Base of all errors that end a call with a status."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field at fault. Neither part holds what the caller sent, apart from numbers."""

    field: str
    """Its path in the request, such as `sampling.top_p` or `token_ids.ids[3]`."""
    description: str
    """What it must be, with the bounds."""


class InvalidRequestError(CallError):
    """The request breaks rules of the protocol; it holds all violations found. INVALID_ARGUMENT."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__("the request is not valid")
        self.violations = tuple(violations)


class TemplateError(CallError):
    """The model's chat template refuses the conversation. INVALID_ARGUMENT, without the template's own words: they may
    quote the conversation.
    """

    def __init__(self) -> None:
        super().__init__("the model's chat template refuses this conversation")


class NoChatTemplateError(CallError):
    """The served model has no chat template. FAILED_PRECONDITION."""

    def __init__(self) -> None:
        super().__init__("the served model has no chat template; send text or token_ids")


class UnsupportedOptionError(CallError):
    """The request is valid but uses what this build does not support. UNIMPLEMENTED."""

    def __init__(self, options: Sequence[str]) -> None:
        super().__init__("not supported in this version: " + ", ".join(options))
        self.options = tuple(options)


class UnknownModelError(CallError):
    """Another model than the served one is asked for. NOT_FOUND."""

    def __init__(self, served_model_name: str) -> None:
        super().__init__("no such model here")
        self.served_model_name = served_model_name


class DuplicateRequestIdError(CallError):
    """A live call has this request_id already. ALREADY_EXISTS."""

    def __init__(self) -> None:
        super().__init__("a live request has this request_id")


class QueueFullError(CallError):
    """No place in the queue. RESOURCE_EXHAUSTED."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the queue is full")
        self.retry_after_s = retry_after_s


class SlowReaderError(CallError):
    """The caller reads more slowly than the limits allow. RESOURCE_EXHAUSTED."""

    def __init__(self) -> None:
        super().__init__("the stream is read too slowly")


class NeverFitsError(CallError):
    """The request could not get a single token even with the whole KV pool to itself. INVALID_ARGUMENT."""

    def __init__(self) -> None:
        super().__init__("prompt and resumed tokens, with one more to come, never fit into this server's KV pool")


class EngineStartingError(CallError):
    """No engine is ready yet. UNAVAILABLE."""

    def __init__(self, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: expected time until one is; None: unknown."""
        super().__init__("the engine is starting")
        self.retry_after_s = retry_after_s


class DrainingError(CallError):
    """The server takes no new calls: it is about to stop. UNAVAILABLE."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the server is draining")
        self.retry_after_s = retry_after_s


class EngineDeadError(CallError):
    """The engine that had this request, or the only one there was, is dead. UNAVAILABLE."""

    def __init__(self, death_id: str, *, in_step: bool, retry_after_s: float | None) -> None:
        """`in_step`: the request was in the dying step, so it may be the killer and must not be retried.
        `retry_after_s`: expected time to serve again; None: it will not.
        """
        super().__init__(f"the engine died (death_id {death_id})")
        self.death_id = death_id
        self.in_step = in_step
        self.retry_after_s = retry_after_s


class NonFiniteError(CallError):
    """The model gave this request logits that are no numbers. INTERNAL, never retried."""

    def __init__(self) -> None:
        super().__init__("the model's output for this request is not finite")


class PoisonRequestError(CallError):
    """The engine cannot live with this request: it died twice over it, the second time with nothing else in the step,
    or its step raised with nothing else in it. INTERNAL, never retried onto another replica.
    """

    def __init__(self, death_id: str | None = None) -> None:
        """`death_id`: the death that told; None if no engine died of it, or that is long ago."""
        super().__init__("this request makes the engine fail" + (f" (death_id {death_id})" if death_id else ""))
        self.death_id = death_id


class RequestOutOfMemoryError(CallError):
    """Memory ran out over this request though it had the step to itself. RESOURCE_EXHAUSTED, never retried."""

    def __init__(self) -> None:
        super().__init__("this request needs more memory than the engine has")


class InternalError(CallError):
    """Our own bug; the log has the cause under this id. INTERNAL."""

    def __init__(self, incident_id: str) -> None:
        super().__init__("internal error")
        self.incident_id = incident_id


class UnauthenticatedError(CallError):
    """No credentials, or none that this server knows. UNAUTHENTICATED."""

    def __init__(self) -> None:
        super().__init__("a valid bearer token is required")


class PermissionDeniedError(CallError):
    """Known credentials, which do not open this service. PERMISSION_DENIED."""

    def __init__(self, scope: str) -> None:
        super().__init__(f"these credentials do not have the scope {scope}")
        self.scope = scope


class AbortedByAdministratorError(CallError):
    """An administrator ended the request. ABORTED."""

    def __init__(self) -> None:
        super().__init__("aborted by an administrator")


class TimeLimitError(CallError):
    """A time limit passed, or is sure to pass, before the request's first step. DEADLINE_EXCEEDED.

    `limit`: which one, `deadline` (the call's own), `max_queue_time` or `max_time`. `place`: where it was found out,
    `admission` (refused early) or `queue`.
    """

    def __init__(self, limit: str, place: str) -> None:
        super().__init__(f"{limit} would pass before the first token" if place == "admission" else f"{limit} passed")
        self.limit = limit
        self.place = place


class GuideLimitError(CallError):
    """Compiling the guide, or following it, takes more time or memory than it may. INVALID_ARGUMENT."""

    def __init__(self, what: str) -> None:
        """`what`: `time`, `memory` or `size`."""
        super().__init__(f"the guide exceeds the limit of {what}")
        self.what = what


class BadGuideError(CallError):
    """The resumed tokens do not follow the guide. INVALID_ARGUMENT."""

    def __init__(self) -> None:
        super().__init__("the resumed tokens do not follow the guide")


class GuideDeadEndError(CallError):
    """Somewhere on the way guide, allowed_token_ids and min_tokens left no token to sample. INVALID_ARGUMENT."""

    def __init__(self) -> None:
        super().__init__("the guide and the other options together leave no token to sample")
