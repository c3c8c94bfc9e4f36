"""The rpcs of administrators, there only with `--enable-admin`.

What lives here: Abort and Drain. What must not: who may call them (`auth.py`; `config.py` refuses to offer them to
everybody who may call anything), and how a server drains (`server.py`; the act is handed in). Each act is logged; the
line carries the name of whoever's token it was, as every line of a call does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from emberline.v1 import admin_pb2
from scheduler import logs
from service import convert
from service.backend import Backend
from service.errors import AbortedByAdministratorError

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer:
    """Abort and Drain.

    Args:
        backend: The requests that live.
        drain: Begins to drain, or shortens the grace; given seconds or None for the configured grace, returns how many
            requests live.
    """

    def __init__(self, backend: Backend, drain: Callable[[float | None], int]) -> None:
        self._backend = backend
        self._drain = drain

    async def Abort(  # noqa: N802 - the protocol's name
        self, message: admin_pb2.AbortRequest, _context: _Context
    ) -> admin_pb2.AbortResponse:
        """A request is in the dispatcher, or on its way there; one that is over by itself is not live any more."""
        labels = convert.abort_labels(message)
        aborted = self._backend.dispatcher.abort(labels, AbortedByAdministratorError)
        aborted |= self._backend.admission.abort(set(labels) - aborted)
        logs.get_logger().warning("aborted by an administrator", num_given=len(labels), num_aborted=len(aborted))
        return admin_pb2.AbortResponse(
            results=[admin_pb2.AbortResult(request_id=label, aborted=label in aborted) for label in labels]
        )

    async def Drain(  # noqa: N802 - the protocol's name
        self, message: admin_pb2.DrainRequest, _context: _Context
    ) -> admin_pb2.DrainResponse:
        """Answers at once."""
        grace_s = convert.drain_grace_s(message)
        logs.get_logger().warning("drain asked for by an administrator", grace_s=grace_s)
        return admin_pb2.DrainResponse(live_requests=self._drain(grace_s))
