"""Engine states → grpc.health.v1, answered from memory.

The law: the latest value per watcher and nothing else; no lock is held across a write, so one stalled watcher harms
nobody; a Watch ends only when its caller or `close()` ends it.

Names: `""`, `readiness` and InferenceService tell whether a request sent now would be served; `liveness` whether the
process can recover by itself; each other service that is offered has its own name too, and serves whenever it would
answer, which needs no engine.

A watcher is a task that compares the value it last sent with the present one, sends the difference, and sleeps on an
event of its own. A value that comes and goes while it is writing is never sent: what it sends next is the latest.
A client that watches takes a Watch that ends as a failure and UNIMPLEMENTED as healthy, so neither happens by accident.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.errors import FieldViolation, InvalidRequestError
from service.limits import WATCHERS_MAX

READINESS_NAMES = ("", "readiness", "emberline.v1.InferenceService")
LIVENESS_NAME = "liveness"
TOKENIZER_NAME = "emberline.v1.TokenizerService"
INFO_NAME = "emberline.v1.InfoService"
ADMIN_NAME = "emberline.v1.AdminService"
NAME_CHARS_MAX = 256
"""Of the service asked for: a Watch of an unknown name holds it for as long as it lives."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the stub is not annotated
    """Readiness names begin NOT_SERVING, liveness SERVING. All methods belong to the event loop's thread."""

    def __init__(self, *, max_watchers: int = WATCHERS_MAX) -> None:
        self._max_watchers = max_watchers
        self._watchers: set[asyncio.Event] = set()
        self._closing = asyncio.Event()
        self._statuses = dict.fromkeys(READINESS_NAMES, _NOT_SERVING) | {LIVENESS_NAME: _SERVING}

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def set_serving(self, serving: bool) -> None:
        """Whether a request sent now would be served. Never blocks."""
        self._set(READINESS_NAMES, _SERVING if serving else _NOT_SERVING)

    def set_alive(self, alive: bool) -> None:
        """Whether the process can still recover by itself. Never blocks."""
        self._set((LIVENESS_NAME,), _SERVING if alive else _NOT_SERVING)

    def set_offered(self, name: str, *, serving: bool) -> None:
        """This service is there, and whether it would answer. Never blocks."""
        self._set((name,), _SERVING if serving else _NOT_SERVING)

    def close(self) -> None:
        """End every Watch (after it has been sent the last value if its reader takes it) and refuse new ones. Check and
        List go on. Call it before waiting for the last calls: an open Watch would use up all of that time. (One whose
        reader has stalled still does: nothing gets past what it does not read.)
        """
        self._closing.set()
        self._wake()

    async def Check(  # noqa: N802 - the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(_checked_name(request))
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802 - the protocol's name
        self,
        request: health_pb2.HealthListRequest,  # noqa: ARG002 - it has no fields
        context: Context,  # noqa: ARG002 - the protocol's signature
    ) -> health_pb2.HealthListResponse:
        response = health_pb2.HealthListResponse()
        for name, status in self._statuses.items():
            response.statuses[name].status = status
        return response

    async def Watch(  # noqa: N802 - the protocol's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        if self._closing.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        if len(self._watchers) >= self._max_watchers:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers")
        name = _checked_name(request)
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            sent: int | None = None
            while True:
                changed.clear()
                status = self._statuses.get(name, _SERVICE_UNKNOWN)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                elif self._closing.is_set():
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _set(self, names: tuple[str, ...], status: int) -> None:
        for name in names:
            self._statuses[name] = status
        self._wake()

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


def _checked_name(request: health_pb2.HealthCheckRequest) -> str:
    name: str = request.service
    if len(name) > NAME_CHARS_MAX:
        raise InvalidRequestError([FieldViolation("service", f"at most {NAME_CHARS_MAX} characters")])
    return name
